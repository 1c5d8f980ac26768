"""Read a pickle without executing it: an interpreter of the opcodes that the writers of checkpoints emit.

Python's unpickler imports and calls what a stream names. This one knows the opcodes that numpy and Paddle emit in
protocols 2 to 4 and the names of `records.GLOBALS`; the result is data of `records.py`. A long string is not read:
its place in the file is kept, so that a file of any size is understood in little memory.

A stream is not believed: a length is compared with the file before anything is allocated from it, the memo is filled
in order, and the number of instructions and of bytes that are not tensors is bounded, so memory is too.

Source: the opcodes are described in CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from vha_paddle.errors import UserError
from vha_paddle.sources.containers.disk import DiskFile
from vha_paddle.sources.containers.records import (
    GLOBALS,
    DamagedPickle,
    Pairs,
    Span,
    call,
    new_object,
    set_state,
)

PROTOCOLS = (2, 3, 4)  # that paddle.save offers
MAX_INSTRUCTIONS = 8_000_000  # 18,000 tensors, cut for 64 ranks, take 1.5 million
MAX_STREAM_BYTES = 128 << 20  # instructions and names, without the long strings
MAX_NAME_BYTES = 1024  # what is longer stays in the file
_BUFFER_BYTES = 64 << 10
_SHOWN_CHARACTERS = 200


def read_pickle(file: DiskFile) -> Any:
    """The value that a file holds.

    Raises:
        UserError: the file is truncated or damaged, or names something that is not data; nothing was executed.
    """
    stream = _Stream(file)
    try:
        return stream.run()
    except DamagedPickle as error:
        raise UserError(
            f"{file.path}: truncated or damaged, or no weights of Paddle's: {error} before byte {stream.position}; "
            "nothing was executed; copy the file again"
        ) from None


class _Stream:
    """The state of the interpreter: a stack, the places of the marks on it, a memo, and a place in the file."""

    def __init__(self, file: DiskFile) -> None:
        self.position = 0
        self._file = file
        self._buffer, self._buffer_start = b"", 0
        self._num_read = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        """Interpret the stream to its end."""
        if self._bytes(1) != b"\x80":
            raise DamagedPickle("no pickle")
        protocol = self._bytes(1)[0]
        if protocol not in PROTOCOLS:
            raise DamagedPickle(f"pickle protocol {protocol}, where Paddle writes 2 to 4")
        for _ in range(MAX_INSTRUCTIONS):
            opcode = self._bytes(1)
            if opcode == b".":
                break
            instruction = _INSTRUCTIONS.get(opcode)
            if instruction is None:
                raise DamagedPickle(f"an instruction (0x{opcode.hex()}) that Paddle does not write")
            instruction(self)
        else:
            raise DamagedPickle(f"more than {MAX_INSTRUCTIONS} instructions")
        value = self._pop()
        if self._stack or self._marks or self.position != self._file.size:
            raise DamagedPickle("something left over at its end")
        return value

    # The file.

    def _bytes(self, count: int) -> bytes:
        """The next few bytes."""
        self._fits(count)
        self._num_read += count
        if self._num_read > MAX_STREAM_BYTES:
            raise DamagedPickle(f"more than {MAX_STREAM_BYTES} bytes that are no tensor's")
        start = self.position - self._buffer_start
        if not 0 <= start <= len(self._buffer) - count:
            self._buffer_start, start = self.position, 0
            self._buffer = self._file.read(self.position, min(_BUFFER_BYTES, self._file.size - self.position))
        self.position += count
        return self._buffer[start : start + count]

    def _fits(self, count: int) -> None:
        if count > self._file.size - self.position:
            raise DamagedPickle(f"{count} bytes announced where the file has {self._file.size - self.position}")

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form)))[0])

    def _line(self) -> str:
        line = bytearray()
        while (byte := self._bytes(1)) != b"\n":
            line += byte
            if len(line) > MAX_NAME_BYTES:
                raise DamagedPickle("a name that is too long")
        return _decoded(bytes(line))

    # The stack.

    def _pop(self) -> Any:
        floor = self._marks[-1] if self._marks else 0
        if len(self._stack) <= floor:
            raise DamagedPickle("a value is missing")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise DamagedPickle("a mark is missing")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _top(self, kind: type[Any]) -> Any:
        """The value on the stack that the one just taken goes into."""
        value = self._pop()
        if type(value) is not kind:
            raise DamagedPickle("an entry of what has no entries")
        self._stack.append(value)
        return value

    # Instructions.

    def text(self, form: str) -> None:
        length = self._number(form)
        self._stack.append(
            self._span(length, is_text=True) if length > MAX_NAME_BYTES else _decoded(self._bytes(length))
        )

    def binary(self, form: str) -> None:
        length = self._number(form)
        self._stack.append(self._span(length, is_text=False) if length > MAX_NAME_BYTES else self._bytes(length))

    def _span(self, length: int, is_text: bool) -> Span:
        self._fits(length)
        span = Span(self.position, length, is_text)
        self.position += length
        return span

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def integer(self, form: str) -> None:
        self._stack.append(self._number(form))

    def long_integer(self) -> None:
        length = self._number("<B")
        if length > 8:
            raise DamagedPickle("an integer of more than 8 bytes")
        self._stack.append(int.from_bytes(self._bytes(length), "little", signed=True))

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self._bytes(8))[0])

    def frame(self) -> None:
        self._fits(self._number("<Q"))  # says only how much a reader should fetch at once

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def tuple_to_mark(self) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def extend(self) -> None:
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._top(Pairs).append((key, value))

    def set_items(self) -> None:
        values = self._pop_to_mark()
        if len(values) % 2:
            raise DamagedPickle("a key without a value")
        self._top(Pairs).extend(zip(values[::2], values[1::2], strict=True))

    def memoize(self) -> None:
        value = self._pop()
        self._stack.append(value)
        self._memo.append(value)

    def put(self, form: str) -> None:
        # writers number what they remember in order; any other number would be an allocation of the stream's choice
        if self._number(form) != len(self._memo):
            raise DamagedPickle("a memo out of order")
        self.memoize()

    def get(self, form: str) -> None:
        number = self._number(form)
        if number >= len(self._memo):
            raise DamagedPickle("a memo that was not written")
        self._stack.append(self._memo[number])

    def named_global(self) -> None:
        self._refer(self._line(), self._line())

    def stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise DamagedPickle("a name that is no text")
        self._refer(module, name)

    def _refer(self, module: str, name: str) -> None:
        known = GLOBALS.get((module, name))
        if known is None:
            shown = ascii(f"{module}.{name}"[:_SHOWN_CHARACTERS])[1:-1]
            raise UserError(
                f"{self._file.path}: refers to {shown}, which is no part of weights; nothing was executed; "
                "give a file of weights only, from a source that you trust"
            )
        self._stack.append(known)

    def reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        self._stack.append(call(function, arguments))

    def new_object(self) -> None:
        arguments, kind = self._pop(), self._pop()
        self._stack.append(new_object(kind, arguments))

    def build(self) -> None:
        state, value = self._pop(), self._pop()
        set_state(value, state)
        self._stack.append(value)


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise DamagedPickle("text that is not UTF-8") from None


_INSTRUCTIONS: dict[bytes, Callable[[_Stream], None]] = {
    b"\x95": _Stream.frame,
    b"N": lambda stream: stream.push(None),
    b"\x88": lambda stream: stream.push(True),
    b"\x89": lambda stream: stream.push(False),
    b"J": lambda stream: stream.integer("<i"),
    b"K": lambda stream: stream.integer("<B"),
    b"M": lambda stream: stream.integer("<H"),
    b"\x8a": _Stream.long_integer,
    b"G": _Stream.real,
    b"X": lambda stream: stream.text("<I"),
    b"\x8c": lambda stream: stream.text("<B"),
    b"\x8d": lambda stream: stream.text("<Q"),
    b"B": lambda stream: stream.binary("<I"),
    b"C": lambda stream: stream.binary("<B"),
    b"\x8e": lambda stream: stream.binary("<Q"),
    b"(": _Stream.mark,
    b")": lambda stream: stream.push(()),
    b"t": _Stream.tuple_to_mark,
    b"\x85": lambda stream: stream.tuple_of(1),
    b"\x86": lambda stream: stream.tuple_of(2),
    b"\x87": lambda stream: stream.tuple_of(3),
    b"]": lambda stream: stream.push([]),
    b"a": _Stream.append,
    b"e": _Stream.extend,
    b"}": lambda stream: stream.push(Pairs()),
    b"s": _Stream.set_item,
    b"u": _Stream.set_items,
    b"\x94": _Stream.memoize,
    b"q": lambda stream: stream.put("<B"),
    b"r": lambda stream: stream.put("<I"),
    b"h": lambda stream: stream.get("<B"),
    b"j": lambda stream: stream.get("<I"),
    b"c": _Stream.named_global,
    b"\x93": _Stream.stack_global,
    b"R": _Stream.reduce,
    b"\x81": _Stream.new_object,
    b"b": _Stream.build,
}
