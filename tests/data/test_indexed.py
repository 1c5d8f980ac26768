"""The files on disk: their layout byte for byte, their reader, and what it refuses."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vha_paddle.data import indexed, indexed_writer
from vha_paddle.data.indexed import HEADER, IndexedTokens, write_indexed
from vha_paddle.data.indexed_writer import Piece, PieceWriter, join_pieces
from vha_paddle.data.loader import unigram_entropy
from vha_paddle.errors import UserError

DOCUMENTS = ([5, 6, 7], [8], [9, 999, 0, 4])


def index_bytes(code: int, sizes: list[int], width: int, starts: list[int]) -> bytes:
    """An .idx written from the format's description."""
    pointers = [sum(sizes[:index]) * width for index in range(len(sizes))]
    parts = [b"MMIDIDX\x00\x00", struct.pack("<QBQQ", 1, code, len(sizes), len(starts))]
    parts += [struct.pack("<i", size) for size in sizes]
    parts += [struct.pack("<q", number) for number in pointers + starts]
    return b"".join(parts)


@pytest.mark.parametrize(
    ("vocab_size", "code", "letter"), [(1000, 8, "H"), (65_535, 8, "H"), (65_536, 4, "i"), (151_936, 4, "i")]
)
def test_files_follow_the_format_byte_for_byte(
    write_tokens: Callable[..., Path], vocab_size: int, code: int, letter: str
) -> None:
    prefix = write_tokens(*DOCUMENTS, vocab_size=vocab_size, eod_id=2)
    flat = [5, 6, 7, 2, 8, 2, 9, 999, 0, 4, 2]
    assert prefix.with_suffix(".bin").read_bytes() == struct.pack(f"<{len(flat)}{letter}", *flat)
    expected = index_bytes(code, [4, 2, 5], struct.calcsize(letter), [0, 1, 2, 3])
    assert prefix.with_suffix(".idx").read_bytes() == expected


def test_manifest_says_what_was_written(write_tokens: Callable[..., Path]) -> None:
    prefix = write_tokens(*DOCUMENTS, eod_id=2)
    assert json.loads(prefix.with_suffix(".json").read_text()) == {
        "tokens": 11,
        "documents": 3,
        "vocab_size": 1000,
        "eod_id": 2,
        "tokenizer_sha256": "abc",
        "bin_sha256": hashlib.sha256(prefix.with_suffix(".bin").read_bytes()).hexdigest(),
        "source": "test",
    }


def test_without_end_token_only_the_documents_are_stored(opened: Callable[..., IndexedTokens]) -> None:
    assert opened(*DOCUMENTS).tokens.tolist() == [5, 6, 7, 8, 9, 999, 0, 4]


@pytest.mark.parametrize("vocab_size", [1000, 100_000])
def test_reader_agrees_with_paddlenlps(write_tokens: Callable[..., Path], vocab_size: int) -> None:
    from paddlenlp.data.indexed_dataset import make_dataset

    chooser = np.random.default_rng(0)
    documents = [chooser.integers(0, 1000, size=chooser.integers(1, 40)) for _ in range(50)]
    prefix = write_tokens(*documents, vocab_size=vocab_size, eod_id=2)
    ours = IndexedTokens(prefix)
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = make_dataset(str(prefix), "mmap", skip_warmup=True)
    assert ours.num_documents == len(theirs) == 50
    assert np.array_equal(ours.sizes, theirs.sizes)
    assert np.array_equal(ours.document_starts, theirs.doc_idx)
    assert ours.tokens.dtype == theirs[0].dtype
    ends = np.cumsum(ours.sizes)
    for index, document in enumerate(documents):
        mine = ours.tokens[ends[index] - ours.sizes[index] : ends[index]]
        assert np.array_equal(mine, theirs.get(index)[0])
        assert np.array_equal(mine, [*document, 2])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1000, np.uint16), (100_000, np.int32)])
def test_files_are_those_of_paddlenlps_builder(
    write_tokens: Callable[..., Path], tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    from paddlenlp.data.indexed_dataset import MMapIndexedDatasetBuilder

    chooser = np.random.default_rng(1)
    documents = [chooser.integers(0, 1000, size=chooser.integers(1, 40)) for _ in range(50)]
    ours = write_tokens(*documents, vocab_size=vocab_size)
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_item(document)
        builder.end_document()
    with contextlib.redirect_stdout(io.StringIO()):
        builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert ours.with_suffix(suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_pieces_of_any_number_are_joined_to_the_same_bytes(
    write_tokens: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    documents = [[number] * (number + 1) for number in range(12)]
    whole = write_tokens(*documents, vocab_size=50, eod_id=49)
    monkeypatch.setattr(indexed_writer, "_BLOCK", block)
    monkeypatch.setattr(indexed, "_CHUNK", block)
    pieces = []
    for index, some in enumerate((documents[:5], documents[5:6], [], documents[6:])):
        tokens, sizes = tmp_path / f"{index}.tokens", tmp_path / f"{index}.sizes"
        with open(tokens, "wb") as tokens_file, open(sizes, "wb") as sizes_file:
            writer = PieceWriter(tokens_file, sizes_file, 50, 49)
            writer.add(some)
        pieces.append(Piece(tokens, sizes, 0, writer.documents))
    (tmp_path / "joined").mkdir()
    join_pieces(tmp_path / "joined/x", pieces, 50, eod_id=49, tokenizer_sha256="abc", source="test")
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"joined/x{suffix}").read_bytes() == whole.with_suffix(suffix).read_bytes()
    assert IndexedTokens(tmp_path / "joined/x", vocab_size=50).num_documents == 12


def test_document_of_several_sequences_is_one_stream(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(index_bytes(8, [2, 1, 3], 2, [0, 2, 3]))
    (tmp_path / "x.bin").write_bytes(struct.pack("<6H", 1, 2, 3, 4, 5, 6))
    indexed = IndexedTokens(tmp_path / "x", vocab_size=7)
    assert indexed.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert indexed.num_documents == 2
    assert indexed.manifest is None
    assert indexed.digest == hashlib.sha256((tmp_path / "x.bin").read_bytes()).hexdigest()


def test_tokens_are_mapped_read_only(opened: Callable[..., IndexedTokens]) -> None:
    indexed = opened(*DOCUMENTS)
    assert isinstance(indexed.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        indexed.tokens[0] = 1


def test_prefix_may_hold_a_dot(tmp_path: Path) -> None:
    write_indexed(tmp_path / "v1.5", [[1]], 10, eod_id=None, tokenizer_sha256=None, source="test")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.5.bin", "v1.5.idx", "v1.5.json"]
    assert IndexedTokens(tmp_path / "v1.5").num_tokens == 1


def test_writing_is_silent(write_tokens: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    write_tokens(*DOCUMENTS)
    assert capfd.readouterr() == ("", "")


def test_failed_write_leaves_the_old_data_and_nothing_else(write_tokens: Callable[..., Path], tmp_path: Path) -> None:
    prefix = write_tokens(*DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def failing():
        yield [1, 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_indexed(prefix, failing(), 1000, eod_id=None, tokenizer_sha256=None, source="test")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("broken_at", [0, 1, 2])
def test_index_is_never_there_without_its_data(
    write_tokens: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_at: int
) -> None:
    """A machine that dies between two renames leaves no .idx, so no reader takes old and new for a pair."""
    prefix = write_tokens(*DOCUMENTS)
    module = indexed_writer

    rename, calls = module.os.replace, []

    def dying(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > broken_at:
            raise OSError("power is gone")
        rename(source, target)

    monkeypatch.setattr(module.os, "replace", dying)
    with pytest.raises(OSError, match="power is gone"):
        write_tokens([1], [2])
    with pytest.raises(UserError, match=r"tokens\.idx is no file"):
        IndexedTokens(prefix)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no document for"),
        ([[1], []], "document 1 has no token"),
        ([[1], [2, 1000]], r"document 1 holds token id 1000, which is not in \[0, vocab_size=1000\)"),
        ([[-1]], "document 0 holds token id -1"),
    ],
)
def test_wrong_documents_are_a_user_error(
    write_tokens: Callable[..., Path], tmp_path: Path, documents: list[list[int]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write_tokens(*documents)
    assert list(tmp_path.iterdir()) == []


def test_end_token_outside_the_vocabulary_is_a_user_error(write_tokens: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="holds token id 1000"):
        write_tokens([1], eod_id=1000)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_a_user_error(write_tokens: Callable[..., Path], suffix: str) -> None:
    prefix = write_tokens(*DOCUMENTS)
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(UserError, match=rf"tokens\{suffix} is no file to read"):
        IndexedTokens(prefix)


def corrupt(content: bytes, offset: int, replacement: bytes) -> bytes:
    return content[:offset] + replacement + content[offset + len(replacement) :]


SIZES, POINTERS, STARTS = HEADER.size, HEADER.size + 12, HEADER.size + 36  # offsets with three sequences


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:20], "has 20 bytes, fewer than its header"),
        (lambda content: b"PK" + content[2:], "does not begin with the magic"),
        (lambda content: corrupt(content, 9, struct.pack("<Q", 2)), "has version 2, not 1"),
        (lambda content: corrupt(content, 17, b"\x06"), "has token type 6"),
        (lambda content: content[:-1], "bytes where its header says"),
        (lambda content: content + b"\x00", "bytes where its header says"),
        (lambda content: corrupt(content, 18, struct.pack("<Q", 1 << 62)), "bytes where its header says"),
        (lambda content: index_bytes(8, [], 2, [0]), "holds no sequence"),
        (lambda content: corrupt(content, SIZES, struct.pack("<i", -3)), "a sequence of negative length"),
        (lambda content: corrupt(content, SIZES, struct.pack("<i", 4)), "pointers that do not follow"),
        (lambda content: corrupt(content, POINTERS, struct.pack("<q", 2)), "pointers that do not follow"),
        (lambda content: corrupt(content, STARTS + 8, struct.pack("<q", 9)), "document index out of order"),
        (lambda content: corrupt(content, STARTS + 24, struct.pack("<q", 2)), "document index out of order"),
        (
            lambda content: index_bytes(8, [3, 1, 5], 2, [0, 1, 2, 3]),
            "describes 18 bytes and tokens.bin has 16",
        ),
    ],
)
def test_damaged_index_is_a_user_error(
    write_tokens: Callable[..., Path], change: Callable[[bytes], bytes], message: str
) -> None:
    prefix = write_tokens(*DOCUMENTS)
    index = prefix.with_suffix(".idx")
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(UserError, match=message):
        IndexedTokens(prefix)


def test_index_of_empty_sequences_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(index_bytes(8, [0], 2, [0, 1]))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(UserError, match="holds no token"):
        IndexedTokens(tmp_path / "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "must be an object with the keys tokens, documents"),
        ({"extra": 1}, "must be an object with the keys tokens, documents"),
        ({"tokens": "8"}, "tokens is '8' and must be int"),
        ({"documents": True}, "documents is True and must be int"),
        ({"eod_id": 2.5}, "eod_id is 2.5 and must be int | None"),
        ({"tokens": 9}, "counts 9 tokens in 3 documents, the files hold 8 in 3"),
        ({"documents": 4}, "counts 8 tokens in 4 documents, the files hold 8 in 3"),
    ],
)
def test_wrong_manifest_is_a_user_error(
    write_tokens: Callable[..., Path], change: str | dict[str, object], message: str
) -> None:
    path = write_tokens(*DOCUMENTS).with_suffix(".json")
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        IndexedTokens(path.with_suffix(""))


def test_vocabulary_of_exactly_the_largest_id_fits(write_tokens: Callable[..., Path]) -> None:
    assert IndexedTokens(write_tokens(*DOCUMENTS), vocab_size=1000).num_tokens == 8


@pytest.mark.parametrize("written_with", [1000, 100_000])
def test_token_beyond_the_models_vocabulary_is_a_user_error(
    write_tokens: Callable[..., Path], written_with: int
) -> None:
    prefix = write_tokens(*DOCUMENTS, vocab_size=written_with)
    with pytest.raises(UserError, match=r"holds token id 999, which is not in \[0, vocab_size=999\)"):
        IndexedTokens(prefix, vocab_size=999)


def test_negative_token_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(index_bytes(4, [2], 4, [0, 1]))
    (tmp_path / "x.bin").write_bytes(struct.pack("<2i", 1, -7))
    with pytest.raises(UserError, match="holds token id -7"):
        IndexedTokens(tmp_path / "x", vocab_size=10)


def test_tokens_that_are_not_those_of_the_manifest_are_a_user_error(write_tokens: Callable[..., Path]) -> None:
    """Another set of the same size, or a copy that ended early in a file of the full size."""
    prefix = write_tokens(*DOCUMENTS)
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(
        UserError, match=r"tokens\.bin has sha256 [0-9a-f]{64}, its manifest names [0-9a-f]{64}; it was"
    ):
        IndexedTokens(prefix, vocab_size=1000)
    prefix.with_suffix(".json").unlink()
    assert IndexedTokens(prefix, vocab_size=1000).digest == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("wrong", [-1, 2**31 - 1])
def test_a_token_that_the_first_look_missed_is_met_where_all_are_read(
    write_tokens: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """Counting how often each token occurs would take as many counters as its number says."""
    monkeypatch.setattr(indexed, "_CHUNK", 4)
    monkeypatch.setattr(indexed, "_MOST_SCANNED", 8)
    prefix = write_tokens(range(64), vocab_size=70_000)
    tokens = np.fromfile(prefix.with_suffix(".bin"), np.int32)
    tokens[6] = wrong
    tokens.tofile(prefix.with_suffix(".bin"))
    dataset = IndexedTokens(prefix, vocab_size=70_000)
    with pytest.raises(UserError, match=f"holds token id {wrong}, which is not in"):
        unigram_entropy(dataset)


def test_a_disk_that_fails_at_the_start_is_a_user_error(
    write_tokens: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = IndexedTokens(write_tokens(*DOCUMENTS), vocab_size=1000)

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr("builtins.open", lambda *_: Failing())
        with pytest.raises(UserError, match=r"tokens\.bin: cannot be read \(Input/output error\)"):
            list(dataset.chunks())
    dataset.bin_path.write_bytes(b"\0")
    with pytest.raises(UserError, match=r"tokens\.bin: became shorter while it was read"):
        list(dataset.chunks())


def test_another_tokenizer_is_a_user_error(write_tokens: Callable[..., Path]) -> None:
    prefix = write_tokens(*DOCUMENTS)
    assert IndexedTokens(prefix, tokenizer_sha256="abc").num_tokens == 8
    with pytest.raises(UserError, match="made with tokenizer abc, the one in use is def"):
        IndexedTokens(prefix, tokenizer_sha256="def")


def test_unknown_tokenizer_is_a_user_error_when_one_is_asked_for(write_tokens: Callable[..., Path]) -> None:
    prefix = write_tokens(*DOCUMENTS)
    prefix.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"made with tokenizer \(not recorded\)"):
        IndexedTokens(prefix, tokenizer_sha256="abc")
