"""How much memory a Parquet file asks for, read from its descriptions before Arrow believes them.

Arrow allocates what the header of a page says, and a few bytes may unpack to gigabytes; a dictionary's one string may
stand in every row; of one byte that describes the file it makes 270. So all that is looked at first: what is beyond all
reason is refused, and the largest page says how many rows may be decoded together. The delta encodings are refused,
because such a page says once more inside how much is to be allocated: of 257 bytes, 8 GB.

This is done here and not by pyarrow's metadata, which end the process where some of them are damaged.

Source: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from vha_paddle.data.thrift import INT32, INT64, Damaged, Structs, Wanted

LARGEST_PAGE = 512 << 20
"""Bytes of a page, unpacked. Writers aim at 1 MiB, but Arrow's looks at the size only after 1,024 rows."""

_ANY_PAGE = 128 << 20  # bytes that a page may unpack to however small it is; a larger one
_RATIO = 100  # must not be as many times as large as it is in the file: text is some 10 times
_VALUE_BYTES = 16  # of memory for each value of a dictionary, beside its content
_ENCODINGS = {0, 2, 8}  # PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY

_MOST_STRUCTS = 400_000  # in the footer: some 100,000 column chunks, for which Arrow needs 100 MB, and at most 360
_LARGEST_HEADER = 16 << 20  # bytes of a page's header, as in Arrow
_USUAL_HEADER = 1 << 12

# Numbers of fields. FileMetaData: the row groups, in each the column chunks, in each their metadata, in which:
_VALUES, _BYTES, _DATA_PAGE, _DICTIONARY_PAGE = 5, 7, 9, 11
_ROW_GROUPS, _CHUNKS, _METADATA = 4, 1, 3
_FOOTER: Wanted = {
    _ROW_GROUPS: {_CHUNKS: {_METADATA: dict.fromkeys((_VALUES, _BYTES, _DATA_PAGE, _DICTIONARY_PAGE), INT64)}}
}
# PageHeader: type and sizes; and by type, the field of a struct about it, and in that the number of values and the
# encoding. Pages of other types are passed over.
_TYPE, _UNPACKED, _STORED = 1, 2, 3
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_ABOUT = {_DATA: (5, 1, 2), _DICTIONARY: (7, 1, 2), _DATA_2: (8, 1, 4)}
_HEADER: Wanted = {
    **dict.fromkeys((_TYPE, _UNPACKED, _STORED), INT32),
    **{field: dict.fromkeys(numbers, INT32) for field, *numbers in _ABOUT.values()},
}
_DAMAGED = "the header of a page is damaged"


class Refused(Exception):
    """Why a file or a row group cannot be decoded."""


Chunks = list[list[Any]]
"""What the footer says of each column of each row group."""


def read_chunks(path: str) -> Chunks:
    """What the footer says of each column of each row group; nothing where there is no footer, as Arrow will say.

    Raises:
        Refused: the footer is damaged, or describes too much.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size - 8  # of the footer, after which come its length and a magic
        file.seek(max(end, 0))
        length = int.from_bytes(file.read(4), "little")
        if length > end or file.read(4) != b"PAR1":
            return []
        file.seek(end - length)
        structs = Structs(file.read(length), _MOST_STRUCTS)
    try:
        groups = structs.struct(_FOOTER)[_ROW_GROUPS]
        return [[chunk.get(_METADATA) for chunk in group[_CHUNKS]] for group in groups]
    except (Damaged, KeyError, TypeError, AttributeError):
        if structs.structs > _MOST_STRUCTS:
            raise Refused(f"its footer describes more than {_MOST_STRUCTS:,} things") from None
        raise Refused("its footer is damaged") from None


def largest_page(path: str, chunks: Chunks, group: int, column: int) -> int:
    """Bytes of the largest page of a column in a row group, unpacked; no value there is larger.

    Raises:
        Refused: a page is too large, or the header of one is damaged.
        OSError: the file cannot be read.
    """
    if not (group < len(chunks) and column < len(chunks[group])):
        raise Refused("its footer is damaged")
    largest = 0
    with open(path, "rb") as file:
        for unpacked, stored in _pages(file, chunks[group][column]):
            if unpacked > LARGEST_PAGE or unpacked > max(_ANY_PAGE, _RATIO * stored):
                raise Refused(
                    f"a page of {stored:,} bytes takes {unpacked:,}; write it again with smaller pages "
                    "(in pyarrow, write_batch_size)"
                )
            largest = max(largest, unpacked)
    return largest


def _pages(file: BinaryIO, chunk: Any) -> Iterator[tuple[int, int]]:
    """The bytes that each page takes in memory, and those that it has in the file.

    They are those that Arrow will read: up to the one in which the values are complete.
    """
    start = _number(chunk, _DATA_PAGE)
    if 0 < (chunk.get(_DICTIONARY_PAGE) or 0) < start:
        start = chunk[_DICTIONARY_PAGE]
    stop = start + _number(chunk, _BYTES)
    missing = _number(chunk, _VALUES)
    while missing > 0:
        header, position = _page_header(file, start, stop)
        unpacked, stored = _number(header, _UNPACKED), _number(header, _STORED)
        page_type = _number(header, _TYPE)
        values = 0
        if page_type in _ABOUT:
            field, count, encoding = _ABOUT[page_type]
            values = _number(header.get(field), count)
            if _number(header.get(field), encoding) not in _ENCODINGS:
                raise Refused("it is delta-encoded, which is not supported; write it again in the encoding PLAIN")
        yield max(unpacked, stored) + (_VALUE_BYTES * values if page_type == _DICTIONARY else 0), stored
        missing -= 0 if page_type == _DICTIONARY else values
        start = position + stored


def _page_header(file: BinaryIO, start: int, stop: int) -> tuple[dict[int, Any], int]:
    """The header that begins at `start`, and where it ends."""
    for size in (_USUAL_HEADER, _LARGEST_HEADER):
        file.seek(start)
        structs = Structs(file.read(max(min(size, stop - start), 0)), 0)
        try:
            return structs.struct(_HEADER), start + structs.position
        except Damaged:
            continue
    raise Refused(_DAMAGED)


def _number(struct: Any, field: int) -> int:
    value = struct.get(field) if isinstance(struct, dict) else None
    if not isinstance(value, int) or value < 0:
        raise Refused(_DAMAGED)
    return value
