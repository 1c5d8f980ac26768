"""Parquet files that ask for more memory than they are worth, and what is read of their descriptions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.prepared import ROOT
from vha_paddle.data import parquet_pages
from vha_paddle.data.parquet_pages import Refused, largest_page, read_chunks
from vha_paddle.data.thrift import INT32, INT64, Damaged, Structs

READ = """
import sys
from pathlib import Path
from vha_paddle.data.inputs import find_inputs, make_parts
from vha_paddle.data.readers import read_documents
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
before, documents, bad = peak(), 0, []
for part in make_parts(find_inputs(sys.argv[1:]), 1 << 30):
    for piece in part:
        for document in read_documents(piece, "text", bad.append):
            documents += 1
print(peak() - before, documents, *bad)
"""


def peak_of_reading(path: Path) -> tuple[int, int, str]:
    """MiB that a process grows by while it reads a file, documents, and what is said of the file."""
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    grown, documents, *said = done.stdout.split(maxsplit=2)
    return int(grown), int(documents), "".join(said).strip()


def number(value: int, zigzag: bool = True) -> bytes:
    """A number as Thrift's compact protocol has it."""
    value = value << 1 if zigzag else value
    groups = []
    while value >= 128:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def one_row(path: Path) -> None:
    """160 MiB in 5 kB."""
    pq.write_table(pa.table({"text": ["a" * (160 << 20)]}), path, compression="zstd", use_dictionary=False)


def long_row_among_others(path: Path) -> None:
    texts = ["a" * (160 << 20), *"b" * 9]
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", use_dictionary=False)


def shared_string(path: Path) -> None:
    """400 rows of 1 MiB in 300 bytes."""
    texts = pa.DictionaryArray.from_arrays(np.zeros(400, np.int32), ["b" * (1 << 20)])
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", store_schema=False)


def forged_size(path: Path) -> None:
    """A page that says of itself that it unpacks to 1.3 GB."""
    pq.write_table(pa.table({"text": ["c" * 9000] * 99}), path, compression="snappy", use_dictionary=False)
    content = path.read_bytes()
    (chunk,) = read_chunks(str(path))[0]
    start = chunk[9]
    true = number(largest_page(str(path), [[chunk]], 0, 0))
    said = number(1_300_000_000)
    at = content.index(b"\x15" + true, start)
    path.write_bytes(content[: at + 1] + said + content[at + 1 + len(true) :])


def delta_bomb(path: Path) -> None:
    """A page of 30 values that says inside that it has 2**30 lengths."""
    encoding = {"text": "DELTA_LENGTH_BYTE_ARRAY"}
    table = pa.table({"text": ["abc", "de", "f"] * 10})
    pq.write_table(table, path, use_dictionary=False, column_encoding=encoding, compression="none")
    content = path.read_bytes()
    at = content.index(bytes.fromhex("80 01 04 1e 06 01 02 00 00 00"))  # block, miniblocks, total, first, ...
    lie = number(1 << 30, False) + b"\x01" + number(1 << 30, False) + b"\x00\x00\x00"
    path.write_bytes(content[:at] + lie + content[at + len(lie) :])


def endless_footer(path: Path) -> None:
    """3 MB that become 900 MB: a row group of a million columns, of which only an offset is said."""
    schema = b"\x48\x06schema\x15\x02\x00" + b"\x15\x0c\x25\x00\x18\x04text\x25\x00\x00"
    columns = b"\x19\xfc" + number(1_000_000, False) + b"\x26\x00\x00" * 1_000_000
    footer = b"\x15\x02\x19\x2c" + schema + b"\x16\x02\x19\x1c" + columns + b"\x16\x00\x16\x00\x00\x00"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")


@pytest.mark.parametrize(
    ("write", "documents", "said"),
    [
        (one_row, 0, "takes 167,772,1"),
        (long_row_among_others, 0, "; write it again with smaller pages"),
        (shared_string, 400, ""),
        (forged_size, 0, "takes 1,300,000,000; write it again"),
        (delta_bomb, 0, "is delta-encoded, which is not supported"),
        (endless_footer, 0, "its footer describes more than 400,000 things"),
    ],
)
def test_file_that_asks_for_much_memory_does_not_get_it(
    tmp_path: Path, write: Callable[[Path], None], documents: int, said: str
) -> None:
    write(tmp_path / "a.parquet")
    grown, read, problem = peak_of_reading(tmp_path / "a.parquet")
    assert grown < 80
    assert read == documents
    assert said in problem and bool(said) == bool(problem)


def test_large_page_of_true_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow writes 1,024 rows to a page, however long they are; these 140 MB do not pack to a hundredth."""
    text = np.random.default_rng(0).integers(32, 127, 4 << 20, np.uint8).tobytes().decode()
    texts = [text[row:] + text[:row] for row in range(33)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="snappy")
    assert largest_page(str(tmp_path / "a.parquet"), read_chunks(str(tmp_path / "a.parquet")), 0, 0) > 128 << 20
    assert peak_of_reading(tmp_path / "a.parquet")[1:] == (33, "")
    monkeypatch.setattr(parquet_pages, "LARGEST_PAGE", 100 << 20)
    with pytest.raises(Refused, match="a page of 138,4.* takes 138,4"):
        largest_page(str(tmp_path / "a.parquet"), read_chunks(str(tmp_path / "a.parquet")), 0, 0)


def test_dictionary_is_not_believed_how_many_values_it_has(tmp_path: Path) -> None:
    """Arrow makes room for them by the header alone."""
    sizes = b"\x15" + number(2) + (b"\x15" + number(10)) * 2  # type, unpacked, stored
    header = sizes + b"\x4c\x15" + number(1 << 28) + b"\x15\x00\x00" + b"\x00"  # field 7: values, encoding
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + header + b" " * 100)
    with pytest.raises(Refused, match="a page of 10 bytes takes 4,294,967,306"):
        largest_page(str(tmp_path / "a.parquet"), [[{5: 1, 7: 100, 9: 60, 11: 4}]], 0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zstd", "data_page_version": "2.0", "use_dictionary": False},
        {"compression": "none", "data_page_size": 100, "write_page_index": True, "row_group_size": 70},
        {"dictionary_pagesize_limit": 50, "write_statistics": False, "compression": "gzip"},
    ],
)
def test_descriptions_are_those_that_pyarrow_reads(tmp_path: Path, options: dict[str, Any]) -> None:
    texts = [None if row % 9 == 0 else f"{row} text" * (row % 5) for row in range(200)]
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": range(200), "text": texts}), path, **options)
    theirs, ours = pq.ParquetFile(path).metadata, read_chunks(path)
    assert len(ours) == theirs.num_row_groups
    for group, chunks in enumerate(ours):
        for column, chunk in enumerate(chunks):
            their = theirs.row_group(group).column(column)
            expected = (their.num_values, their.total_compressed_size, their.data_page_offset)
            assert tuple(chunk[field] for field in (5, 7, 9)) == expected
            assert chunk.get(11) == their.dictionary_page_offset
            assert 0 < largest_page(path, ours, group, column) <= 2 * their.total_uncompressed_size + 16 * 200


def test_pages_that_are_cut_or_end_too_soon_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    chunks = read_chunks(path)
    for field, value in ((5, 3), (7, 10), (9, 1 << 40), (9, -5), (5, None)):
        with pytest.raises(Refused, match="the header of a page is damaged"):
            largest_page(path, [[{**chunks[0][0], 11: None, field: value}]], 0, 0)
    for group, column in ((1, 0), (0, 1)):
        with pytest.raises(Refused, match="its footer is damaged"):
            largest_page(path, chunks, group, column)


WANTED = {1: INT32, 2: INT64, 70_000 - 65_536: INT32, 5: {1: INT32}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("15 04 16 05 00", {1: 2, 2: -3}),
        ("15 04 50", {1: 2}),  # a struct may end with any step
        ("15 82 80 80 80 10 00", {1: 1}),  # of a number of 33 bits, 32 count
        ("05 e0 c5 08 06 00", {4464: 3}),  # so do 16 of the number of a field
        ("16 04 00", {1: None}),  # of another kind
        ("11 00", {1: None}),
        ("17 0000000000000000 18 02 ffff 00", {1: None, 2: None}),
        ("39 18 01 78 29 31 01 02 01 00", {5: [None] * 3}),  # a list of one text; one of three booleans
        ("5c 15 08 25 02 00 00", {5: {1: 4}}),
        ("59 2c 15 08 00 15 06 00 00", {5: [{1: 4}, {1: 3}]}),
    ],
)
def test_structs_are_read(content: str, expected: dict[int, Any]) -> None:
    structs = Structs(bytes.fromhex(content) + b"rest", 2)
    assert structs.struct(WANTED) == expected
    assert structs.position == len(bytes.fromhex(content))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "15",
        "15 04",
        "15 ff ff ff ff ff ff ff ff ff ff 00",  # a number without end
        "18 05 61 00",  # a text that is longer than all
        "1b 00 00",  # a map
        "1f 00",  # no kind
        "15 04 05 02 06 00",  # field 1 twice
        "59 3c 00 00 00 00",  # three structs, of two that may be
        "59 fc ff ff ff ff 0f",
        "1c" * 40 + "00" * 41,
        "19" + "19" * 40 + "00" * 41,
    ],
)
def test_what_is_no_struct_is_refused(content: str) -> None:
    with pytest.raises(Damaged):
        Structs(bytes.fromhex(content), 2).struct(WANTED)
