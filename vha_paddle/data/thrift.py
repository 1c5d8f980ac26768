"""Reading structs of Thrift's compact protocol, of which the descriptions in a Parquet file are made.

Numbers come out as Arrow reads them, cut to their width, so that nothing can mean one thing here and another there.

Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INT32, INT64 = 5, 6
_BOOLEANS, _BYTE, _INT16, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, 4, 7, 8, (9, 10), 12
_BITS = {_INT16: 32, INT32: 32, INT64: 64}
_DEEPEST = 16  # structs and lists in each other; Parquet has 9

Wanted = Mapping[int, "Wanted | int"]
"""Numbers of the fields that are kept: of an integer its kind, of a struct or a list of structs which of theirs."""


class Damaged(Exception):
    """These bytes are no struct."""


class Structs:
    """Reads structs one after another from some bytes.

    Attributes:
        position: of what is read next.
        structs: those that were elements of a list, kept or not.
    """

    def __init__(self, content: bytes, most_structs: int) -> None:
        """Take the bytes, and how many structs there may be in their lists."""
        self._content = content
        self._most_structs = most_structs
        self.position = self.structs = 0

    def struct(self, wanted: Wanted, depth: int = 0) -> dict[int, Any]:
        """The wanted fields of the next one, by number; None for one of another kind.

        Raises:
            Damaged: there is none, or a wanted field stands twice in it.
        """
        fields: dict[int, Any] = {}
        number = 0
        while True:
            step, kind = divmod(self._byte(), 16)
            if kind == 0:
                return fields
            number = (number + step if step else self._integer(32)) % 2**16
            if number in fields:
                raise Damaged
            value = None if kind in _BOOLEANS else self._value(kind, wanted.get(number, {}), depth)
            if number in wanted:
                fields[number] = value

    def _value(self, kind: int, wanted: Wanted | int, depth: int) -> Any:
        inside = {} if isinstance(wanted, int) else wanted
        if kind == _BINARY:
            self._skip(self._varint())
        elif kind == INT32 or kind == INT64 or kind == _INT16:
            value = self._integer(_BITS[kind])
            return value if kind == wanted else None
        elif kind == _STRUCT and depth < _DEEPEST:
            return self.struct(inside, depth + 1)
        elif kind in _LISTS and depth < _DEEPEST:
            return self._list(inside, depth + 1)
        elif kind == _BYTE or kind == _DOUBLE:
            self._skip(1 if kind == _BYTE else 8)
        else:  # maps, of which Parquet has none, and what is no kind
            raise Damaged
        return None

    def _list(self, wanted: Wanted, depth: int) -> list[Any]:
        size, kind = divmod(self._byte(), 16)
        if size == 15:
            size = self._varint()
        if kind == _STRUCT:
            self.structs += size
            if self.structs > self._most_structs:
                raise Damaged
        found = []
        for _ in range(size):
            value = self._value(_BYTE if kind in _BOOLEANS else kind, wanted, depth)
            if wanted:
                found.append(value)
        return found

    def _byte(self) -> int:
        self.position += 1
        if self.position > len(self._content):
            raise Damaged
        return self._content[self.position - 1]

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self._content):
            raise Damaged

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise Damaged

    def _integer(self, bits: int) -> int:
        value = self._varint() % 2**bits
        return (value >> 1) ^ -(value & 1)
