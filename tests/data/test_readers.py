"""Documents of every kind of file, and what is no document."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vha_paddle.data import readers
from vha_paddle.data.inputs import find_inputs, make_parts
from vha_paddle.data.readers import Bad, read_documents

TEXTS = ["one\n two", "é", "  ", "", "last \U0001d11e"]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def jsonl(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text, "id": 1}) + "\n" for text in texts).encode()


def read(path: Path, part_bytes: int = 1 << 30, key: str = "text") -> tuple[list[str], list[Bad]]:
    """Texts and problems of a file, slice by slice; progress must add up to its size."""
    texts, bad, advanced = [], [], []
    for part in make_parts(find_inputs([str(path)]), part_bytes):
        for piece in part:
            for document in read_documents(piece, key, bad.append, advanced.append):
                assert document.utf8 == document.text.encode()
                texts.append(document.text)
    if not any(problem.kind == "file" for problem in bad):
        assert sum(advanced) == path.stat().st_size
    assert min(advanced, default=0) >= 0
    return texts, bad


def write_parquet(path: Path, texts: list[str | None], rows: int = 2, key: str = "text") -> Path:
    """FineWeb-Edu's layout: the text among other columns, several row groups."""
    table = pa.table(
        {
            key: pa.array(texts, pa.string()),
            "id": [f"<urn:uuid:{number}>" for number in range(len(texts))],
            "language_score": [0.9] * len(texts),
            "token_count": list(range(len(texts))),
        }
    )
    pq.write_table(table, path, row_group_size=rows, compression="zstd")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_jsonl_is_one_document_a_line(tmp_path: Path, name: str) -> None:
    pack: Callable[[bytes], bytes] = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(jsonl(TEXTS[:2]) + b"\n \r\n" + jsonl(TEXTS[2:]).rstrip(b"\n")))
    assert read(tmp_path / name) == (TEXTS, [])


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_text_file_is_one_document_with_its_line_ends(tmp_path: Path, name: str) -> None:
    pack: Callable[[bytes], bytes] = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack("\ufeffone\r\n\r\n  two\té\n".encode()))
    assert read(tmp_path / name) == (["one\r\n\r\n  two\té\n"], [])


@pytest.mark.parametrize("part_bytes", [1, 1 << 30])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_byte_order_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path, name: str, part_bytes: int) -> None:
    content = b"\xef\xbb\xbf" + jsonl(["one", "two"]).replace(b"\n", b"\r\n")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(tmp_path / name, part_bytes) == (["one", "two"], [])


@pytest.mark.parametrize("part_bytes", [1, 16, 1 << 30])
def test_byte_order_mark_before_another_line_is_damage(tmp_path: Path, part_bytes: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\xef\xbb\xbf{"text": "two"}\n')
    texts, bad = read(tmp_path / "a.jsonl", part_bytes)
    assert texts == ["one"] and [problem.where for problem in bad] == [{"line": 2}]


def test_files_of_several_members_are_read_to_their_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(["one"])) + gzip.compress(jsonl(["two"])))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(jsonl(["one"])) + zstd(jsonl(["two"])))
    assert read(tmp_path / "a.jsonl.gz") == read(tmp_path / "a.jsonl.zst") == (["one", "two"], [])


@pytest.mark.parametrize("part_bytes", [1, 2, 7, 40, 64, 1000])
@pytest.mark.parametrize("ending", ["\n", ""])
def test_slices_of_a_jsonl_file_miss_and_repeat_no_line(tmp_path: Path, part_bytes: int, ending: str) -> None:
    texts = ["x" * length for length in (0, 50, 1, 3, 200, 7, 7)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts) + ending)
    assert read(tmp_path / "a.jsonl", part_bytes) == (texts, [])


@pytest.mark.parametrize("part_bytes", [13, 26, 39])
def test_line_that_begins_where_a_slice_does_is_read_once(tmp_path: Path, part_bytes: int) -> None:
    (tmp_path / "a.jsonl").write_text('{"text":"%s"}\n' * 6 % tuple("abcdef"))
    assert (tmp_path / "a.jsonl").stat().st_size == 6 * 13
    assert read(tmp_path / "a.jsonl", part_bytes) == (list("abcdef"), [])


@pytest.mark.parametrize("part_bytes", [1, 4, 10, 20, 300, 1 << 30])
def test_line_numbers_are_the_files_in_every_slice(tmp_path: Path, part_bytes: int) -> None:
    lines = ['{"text": "a"}', "", "{", '{"text": "b"}', "[]", '{"text": "c"}', "}"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, bad = read(tmp_path / "a.jsonl", part_bytes)
    assert texts == ["a", "b", "c"]
    assert [(problem.kind, problem.where) for problem in bad] == [("line", {"line": number}) for number in (3, 5, 7)]


@pytest.mark.parametrize("key", ["text", "content"])
@pytest.mark.parametrize("part_bytes", [60, 500, 1 << 30])
def test_parquet_is_one_document_a_row(tmp_path: Path, part_bytes: int, key: str) -> None:
    texts = [*TEXTS, *(f"document {number}" for number in range(20))]
    path = write_parquet(tmp_path / "a.parquet", texts, rows=3, key=key)
    assert read(path, part_bytes, key) == (texts, [])


def test_parquet_of_large_strings_and_dictionaries_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"], pa.large_string())}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == ["a", "b", "a"]


def test_rows_without_text_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["a", None, "b", "c", None], rows=3)
    texts, bad = read(path)
    assert texts == ["a", "b", "c"]
    assert [str(problem) for problem in bad] == [
        f"{path} row group 0 row 1 is null; it must be a string",
        f"{path} row group 1 row 1 is null; it must be a string",
    ]


def test_row_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"ab\xff", b"good too"], pa.binary())
    pq.write_table(pa.table({"text": raw.cast(pa.string(), safe=False)}), tmp_path / "a.parquet")
    texts, bad = read(tmp_path / "a.parquet")
    assert texts == ["good", "good too"]
    assert [(p.where, p.reason) for p in bad] == [
        ({"row_group": 0, "row": 1}, "is not UTF-8 at its byte 2; convert it first")
    ]


def test_damaged_row_group_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [f"{number}" * 100 for number in range(6)])
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(content)
    texts, bad = read(path)
    assert texts == [f"{number}" * 100 for number in (0, 1, 4, 5)]
    assert [(problem.kind, problem.where) for problem in bad] == [("row_group", {"row_group": 1, "after_row": 0})]
    assert "\n" not in bad[0].reason and "cannot be read" in bad[0].reason


@pytest.mark.parametrize("part_bytes", [10, 1 << 30])
@pytest.mark.parametrize(
    ("column", "message"),
    [("other", "has no column 'text', only other"), ("text", "has int64 in column 'text', not strings")],
)
def test_parquet_of_other_columns_is_named_once(tmp_path: Path, part_bytes: int, column: str, message: str) -> None:
    pq.write_table(pa.table({column: [1, 2, 3]}), tmp_path / "a.parquet")
    texts, bad = read(tmp_path / "a.parquet", part_bytes)
    assert texts == []
    assert len(bad) == 1 and bad[0].kind == "file" and message in str(bad[0])


@pytest.mark.parametrize("part_bytes", [10, 1 << 30])
def test_parquet_without_footer_is_named_once(tmp_path: Path, part_bytes: int) -> None:
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-5])
    texts, bad = read(path, part_bytes)
    assert texts == [] and [problem.kind for problem in bad] == ["file"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_cut_file_gives_what_comes_before_the_cut(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    texts = [f"{number} " + "".join(chr(33 + number * k * k % 90) for k in range(3000)) for number in range(300)]
    content = (gzip.compress if suffix == "gz" else zstd)(jsonl(texts))
    path.write_bytes(content[: len(content) * 2 // 3])
    read_texts, bad = read(path)
    assert 0 < len(read_texts) < 300 and read_texts == texts[: len(read_texts)]
    assert len(bad) == 1 and bad[0].kind == "file" and bad[0].where == {"after_line": len(read_texts)}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst", "a.parquet"])
def test_file_that_is_something_else_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not at all what the name says")
    texts, bad = read(tmp_path / name)
    assert texts == [] and [problem.kind for problem in bad] == ["file"]
    assert str(bad[0]).startswith(f"{tmp_path / name} cannot be read: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xff", r"a\.txt is not UTF-8 at its byte 2"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', r"a\.jsonl:2 is not UTF-8"),
        ("a.jsonl", b"{", r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is JSON that no parser should read"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", r"a\.jsonl:1 is JSON that no parser should read"),
        ("a.jsonl", b'["x"]', r"a\.jsonl:1 must be an object"),
        ("a.jsonl", b'{"text": 3}', r'a\.jsonl:1 must be an object with a string under the key "text"'),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:1 holds half of a surrogate pair"),
    ],
)
def test_what_is_no_document_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    _, bad = read(tmp_path / name)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(bad[0]))
    assert len(bad) == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.zst", "a.parquet"])
def test_document_beyond_the_limit_is_named_and_the_next_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST_DOCUMENT", 1000)
    texts = ["a" * 5000, "b"]
    if name == "a.parquet":
        write_parquet(tmp_path / name, texts)
    else:
        content = texts[0].encode() if name.startswith("a.txt") else jsonl(texts)
        (tmp_path / name).write_bytes({".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)(content))
    found, bad = read(tmp_path / name)
    assert found == ([] if name.startswith("a.txt") else ["b"])
    assert len(bad) == 1 and "is longer than 1,000 bytes" in bad[0].reason


def test_line_without_end_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gzip file of 100 KB can hold one line of 100 MB."""
    import tracemalloc

    monkeypatch.setattr(readers, "LONGEST_DOCUMENT", 1 << 20)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(32):
            file.write(b" " * (1 << 20))
    tracemalloc.start()
    try:
        texts, bad = read(tmp_path / "a.jsonl.gz")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert texts == [] and len(bad) == 1


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("x")
    (piece,) = make_parts(find_inputs([str(tmp_path / "a.jsonl")]), 100)[0]
    (tmp_path / "a.jsonl").unlink()
    bad: list[Bad] = []
    assert list(read_documents(piece, "text", bad.append)) == []
    assert str(bad[0]) == f"{tmp_path / 'a.jsonl'} cannot be read: No such file or directory"
