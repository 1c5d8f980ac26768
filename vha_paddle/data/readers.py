"""The documents of a slice of input, one at a time, and what happens to what is no document.

A document is one string of English, code or anything else; everything after this module sees only strings. JSONL has
one on each line and Parquet one in each row, under a key; a plain-text file is one. Line ends and indentation are kept.
A file is never read whole, a line that has no end is not either, and what was compressed is not taken at its word about
how large it is: memory is bounded by `LONGEST_DOCUMENT`, and in Parquet, which packs many rows together, by what
`parquet_pages` allows.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from vha_paddle.data.corpus import builtin_documents
from vha_paddle.data.inputs import Slice
from vha_paddle.data.parquet_pages import Chunks, Refused, largest_page, read_chunks

LONGEST_DOCUMENT = 64 << 20  # bytes of a document, or of the line that holds it

_BUFFER = 1 << 20
_ZSTD_BUFFER = 1 << 16  # what lies in it before a cut is lost with it
_ROWS = 128  # of a Parquet file, decoded together at most
_ROW_BYTES = 16 << 20  # that these may have together, unless one has more
# What reading a damaged file can raise: the file system, gzip, and Arrow's zstd and Parquet readers.
_DAMAGE = (OSError, EOFError, zlib.error, pyarrow.ArrowException, UnicodeDecodeError)  # the last of a damaged schema


@dataclass(frozen=True)
class Bad:
    """Something of the input that gives no document.

    Attributes:
        kind: what is lost: a `line`, a `row`, a `row_group` or (the rest of) a `file`.
        file: its path.
        where: the numbers of line, row group and row, as far as they apply; lines count from 1, the others from 0.
        reason: what is wrong with it.
    """

    kind: str
    file: str
    where: dict[str, int]
    reason: str

    def __str__(self) -> str:
        if self.kind == "line":
            return f"{self.file}:{self.where['line']} {self.reason}"
        numbers = [f"{name.replace('_', ' ')} {number}" for name, number in self.where.items()]
        return " ".join([self.file, *numbers, self.reason])


@dataclass(frozen=True)
class Document:
    """A text, and the same as UTF-8."""

    text: str
    utf8: bytes


class _Unusable(Exception):
    """Why a line or a row holds no document."""


def read_documents(
    piece: Slice,
    text_key: str,
    on_bad: Callable[[Bad], None],
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[Document]:
    """Yield the documents of a slice, in order; also those of nothing but white space.

    Args:
        text_key: key, or column, of the text.
        on_bad: told of everything that gives no document; it may raise.
        advance: told the input bytes that were read since the last call; they add up to `piece.bytes`.
    """
    if piece.format == "builtin":
        yield from (Document(text, text.encode()) for text in builtin_documents())
        return
    told = 0

    def reached(position: int) -> None:
        nonlocal told
        position = min(max(position, told), piece.bytes)
        advance(position - told)
        told = position

    reader = {"text": _text, "jsonl": _jsonl, "parquet": _parquet}[piece.format]
    yield from reader(piece, text_key, on_bad, reached)
    reached(piece.bytes)


def _opened(piece: Slice, raw: BinaryIO) -> BinaryIO:
    """The content of a file that may be compressed."""
    if piece.compression == "gzip":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if piece.compression == "zstd":
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        return io.BufferedReader(stream, _ZSTD_BUFFER)
    return raw


def _text(piece: Slice, _: str, on_bad: Callable[[Bad], None], reached: Callable[[int], None]) -> Iterator[Document]:
    try:
        with open(piece.path, "rb") as raw, closing(_opened(piece, raw)) as file:
            content = file.read(LONGEST_DOCUMENT + 1)
        if len(content) > LONGEST_DOCUMENT:
            raise _Unusable(f"is longer than {LONGEST_DOCUMENT:,} bytes; divide it, or make it JSONL")
        yield _document(_decoded(content.removeprefix(codecs.BOM_UTF8)))
    except _Unusable as error:
        on_bad(Bad("file", piece.path, {}, str(error)))
    except _DAMAGE as error:
        on_bad(Bad("file", piece.path, {}, _spelled(error)))


def _jsonl(
    piece: Slice, text_key: str, on_bad: Callable[[Bad], None], reached: Callable[[int], None]
) -> Iterator[Document]:
    number = 0  # of the line, from the slice's first
    try:
        with open(piece.path, "rb", _BUFFER) as raw, closing(_opened(piece, raw)) as file:
            position = piece.start
            if piece.start:
                file.seek(piece.start - 1)
                position += _skip_line(file) - 1  # to the first line that begins in the slice
            while piece.compression != "none" or position < piece.stop:
                line = file.readline(LONGEST_DOCUMENT + 1)
                if not line:
                    break
                number += 1
                position += len(line)
                if number == 1 and piece.start == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    if len(line) > LONGEST_DOCUMENT and not line.endswith(b"\n"):
                        position += _skip_line(file)
                        raise _Unusable(f"is longer than {LONGEST_DOCUMENT:,} bytes; divide the document")
                    reached(raw.tell() if piece.compression != "none" else position - piece.start)
                    if line.strip():
                        yield _from_json(line, text_key)
                except _Unusable as error:
                    on_bad(Bad("line", piece.path, {"line": _LINES.before(piece) + number}, str(error)))
    except _DAMAGE as error:
        where = {"after_line": _LINES.before(piece) + number} if number else {}
        on_bad(Bad("file", piece.path, where, _spelled(error)))


def _skip_line(file: BinaryIO) -> int:
    """Read to the next line; returns the bytes that were read."""
    skipped = 0
    while chunk := file.readline(_BUFFER):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


class _LineCounts:
    """Numbers of lines before a place in a file, counted only when something there must be named."""

    def __init__(self) -> None:
        self._path, self._stop, self._lines = "", 0, 0

    def before(self, piece: Slice) -> int:
        """Lines that begin before the slice. Slices of one file that follow one another read it once."""
        if piece.start == 0:
            return 0
        if piece.path != self._path or piece.start < self._stop:
            self._path, self._stop, self._lines = piece.path, 0, 0
        with open(piece.path, "rb") as file:
            file.seek(self._stop)
            # A line that begins at `start` ends the one before it at `start` - 1.
            while self._stop < piece.start and (block := file.read(min(_BUFFER, piece.start - self._stop))):
                self._lines += block.count(b"\n")
                self._stop += len(block)
            file.seek(piece.start - 1)
            inside = file.read(1) != b"\n"
        return self._lines + inside


_LINES = _LineCounts()


def _from_json(line: bytes, text_key: str) -> Document:
    try:
        record = json.loads(_decoded(line))
    except json.JSONDecodeError as error:
        raise _Unusable(f"is not JSON ({error.msg}); each line must be one object") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise _Unusable("is JSON that no parser should read; each line must be one flat object") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        raise _Unusable(f'must be an object with a string under the key "{text_key}"; name another with --text-key')
    return _document(record[text_key])


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _Unusable(f"is not UTF-8 at its byte {error.start}; convert it first") from None


def _document(text: str) -> Document:
    try:
        return Document(text, text.encode())
    except UnicodeEncodeError:
        raise _Unusable("holds half of a surrogate pair; repair its \\u escapes") from None


def _parquet(
    piece: Slice, text_key: str, on_bad: Callable[[Bad], None], reached: Callable[[int], None]
) -> Iterator[Document]:
    try:
        chunks = read_chunks(piece.path)
        file = pyarrow.parquet.ParquetFile(piece.path, buffer_size=_BUFFER, pre_buffer=False)
    except (Refused, *_DAMAGE) as error:
        if piece.start == 0:  # the other slices of the file are lost with the same footer
            on_bad(Bad("file", piece.path, {}, _spelled(error)))
        return
    with file:
        groups = file.num_row_groups
        problem = _column_problem(file, text_key)
        if problem:
            if piece.start == 0:
                on_bad(Bad("file", piece.path, {}, problem))
            return
        mine = [group for group in range(groups) if piece.start <= group * piece.file_bytes // groups < piece.stop]
        for done, group in enumerate(mine):
            rows = max(file.metadata.row_group(group).num_rows, 1)
            documents = _row_group(file, group, piece.path, chunks, text_key, on_bad)
            for row, document in enumerate(documents, start=1):
                reached(piece.bytes * (done * rows + row) // (len(mine) * rows))
                yield document


def _column_problem(file: pyarrow.parquet.ParquetFile, text_key: str) -> str | None:
    schema = file.schema_arrow
    if schema.names.count(text_key) != 1:
        return f"has no column {text_key!r}, only {', '.join(schema.names)}; name one with --text-key"
    kind = schema.field(text_key).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return f"has {kind} in column {text_key!r}, not strings; name another with --text-key"
    return None


def _row_group(
    file: pyarrow.parquet.ParquetFile,
    group: int,
    path: str,
    chunks: Chunks,
    text_key: str,
    on_bad: Callable[[Bad], None],
) -> Iterator[Document]:
    row = 0
    try:
        column = [file.schema.column(number).path for number in range(len(file.schema))].index(text_key)
        largest = largest_page(path, chunks, group, column)
        rows = min(max(_ROW_BYTES // max(largest, 1), 1), _ROWS)
        for batch in file.iter_batches(rows, row_groups=[group], columns=[text_key], use_threads=False):
            for value in batch.column(0):
                try:
                    yield _from_value(value)
                except _Unusable as error:
                    on_bad(Bad("row", path, {"row_group": group, "row": row}, str(error)))
                row += 1
    except (Refused, *_DAMAGE) as error:
        on_bad(Bad("row_group", path, {"row_group": group, "after_row": row}, _spelled(error)))


def _from_value(value: Any) -> Document:
    if not value.is_valid:
        raise _Unusable("is null; it must be a string")
    buffer = value.as_buffer()
    if buffer.size > LONGEST_DOCUMENT:
        raise _Unusable(f"is longer than {LONGEST_DOCUMENT:,} bytes; divide the document")
    content = buffer.to_pybytes()
    return Document(_decoded(content), content)


def _spelled(error: BaseException) -> str:
    """What a library says of a damaged file, on one line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"cannot be read: {' '.join(reason.split())}"
