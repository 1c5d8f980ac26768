"""The stream of several datasets: shares, epochs of each, the same for every reader; and what a fault says."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from vha_paddle.data.fingerprint import difference
from vha_paddle.data.indexed import HEADER, IndexedTokens, write_indexed
from vha_paddle.data.loader import Part, TokenBatches, ValidationWindows
from vha_paddle.data.shuffle import shuffled
from vha_paddle.errors import RunError, UserError

S = 4
SIZES = (21, 13, 42)  # tokens: 5, 3 and 10 samples
WEIGHTS = (5, 3, 2)


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    """Datasets of consecutive tokens from 0, 1000 and 2000 on; the second is stored in four bytes a token."""
    return [
        Part(written(tmp_path / f"set{number}", range(1000 * number, 1000 * number + size), vocab_size), weight)
        for number, (size, weight, vocab_size) in enumerate(zip(SIZES, WEIGHTS, (5000, 70_000, 5000), strict=True))
    ]


def written(prefix: Path, tokens: Sequence[int], vocab_size: int = 5000) -> IndexedTokens:
    write_indexed(prefix, [tokens], vocab_size, eod_id=None, tokenizer_sha256="abc", source="test")
    return IndexedTokens(prefix)


def stream(batches: TokenBatches, count: int) -> list[tuple[int, int]]:
    """Dataset and sample of each of the first samples."""
    firsts = batches.samples(0, count)[0][:, 0]
    return [(int(first) // 1000, int(first) % 1000 // S) for first in firsts]


def test_datasets_come_in_their_shares_and_each_in_epochs_of_its_own(parts: list[Part]) -> None:
    batches = TokenBatches(parts, S, 10, seed=3)
    samples = stream(batches, 100)
    for dataset, (size, weight) in enumerate(zip(SIZES, WEIGHTS, strict=True)):
        mine = [sample for of, sample in samples if of == dataset]
        assert len(mine) == 10 * weight
        per_epoch = (size - 1) // S
        for epoch in range(len(mine) // per_epoch):
            order = shuffled(np.arange(per_epoch), per_epoch, 3, epoch, dataset).tolist()
            assert mine[epoch * per_epoch :][:per_epoch] == order


def test_labels_are_the_tokens_one_further_in_every_dataset(parts: list[Part]) -> None:
    tokens_BS, labels_BS = TokenBatches(parts, S, 10, seed=3).batch(2)
    assert tokens_BS.dtype == labels_BS.dtype == np.int64 and tokens_BS.shape == (10, S)
    assert np.array_equal(labels_BS, tokens_BS + 1)


def test_passes_count_tokens_and_epochs_of_each(parts: list[Part]) -> None:
    passes = TokenBatches(parts, S, 10, seed=3).passes(100)
    assert [one.part for one in passes] == parts
    assert [one.tokens for one in passes] == [50 * S, 30 * S, 20 * S]
    assert [one.epochs for one in passes] == [10.0, 10.0, 2.0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("batch_size", [6, 12])
def test_the_stream_does_not_depend_on_ranks_or_batch_size(parts: list[Part], ranks: int, batch_size: int) -> None:
    expected = TokenBatches(parts, S, 36, seed=3).batch(0)
    share = batch_size // ranks
    for which in (0, 1):
        read = [
            TokenBatches(parts, S, batch_size, seed=3).batch(step, rank * share, (rank + 1) * share)[which]
            for step in range(36 // batch_size)
            for rank in range(ranks)
        ]
        assert np.array_equal(np.concatenate(read), expected[which])


def test_a_rank_reads_its_own_rows_and_no_others(parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    batches, sizes = TokenBatches(parts, S, 30, seed=3), []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: sizes.append(preadv(*arguments)) or sizes[-1])
    batches.batch(1, 10, 16)
    assert len(sizes) == 6 and set(sizes) <= {2 * (S + 1), 4 * (S + 1)}


def test_a_difference_of_fingerprints_is_named(parts: list[Part], tmp_path: Path) -> None:
    def fingerprint(parts: Sequence[Part], length: int = S, seed: int = 3) -> str:
        return TokenBatches(parts, length, 10, seed).fingerprint

    now, names = fingerprint(parts), ["a", "b", "c"]
    other = Part(written(tmp_path / "other", range(7, 50)), 3)
    before = {
        fingerprint([parts[0], other, parts[2]]): f"b holds other tokens than the one in its place did .sha256 "
        f"{other.indexed.digest[:12]}",
        fingerprint([parts[0], parts[1]._replace(weight=4), parts[2]]): "b had weight 4 and has 3",
        fingerprint([parts[0], *parts[2:]]): "it was a blend of 2 and is one of 3",
        fingerprint(parts, seed=4): "seed was 4 and is 3",
        fingerprint(parts, length=3): "sequence_length was 3 and is 4",
        "5f" * 32: "ordered by another version",
        "none": "ordered by another version",
    }
    assert now not in before and len(before) == 7
    for old, message in before.items():
        assert message.replace(".sha256", "(sha256") in difference(old, now, names), old
    moved = [Part(written(tmp_path / "moved", range(SIZES[0])), WEIGHTS[0]), *parts[1:]]
    assert fingerprint(moved) == now, "a path is no part of it"


@pytest.mark.parametrize("wrong", [-1, 4900, 5000])
def test_a_token_that_the_model_does_not_have_is_refused_when_it_is_read(tmp_path: Path, wrong: int) -> None:
    tokens = np.arange(41, dtype=np.int32)
    tokens[17] = wrong
    indexed = written(tmp_path / "set", range(41), vocab_size=70_000)
    tokens.tofile(indexed.bin_path)
    message = rf"set\.bin: token number 17 is {wrong}, which is not in \[0, vocab_size=4900\)"
    with pytest.raises(RunError, match=message):
        TokenBatches([Part(indexed)], S, 10, seed=3, vocab_size=4900).batch(0)
    with pytest.raises(RunError, match=message):
        ValidationWindows(indexed, S, vocab_size=4900).samples(4, 6)
    TokenBatches([Part(indexed)], S, 10, seed=3, vocab_size=5001 if wrong > 0 else None).batch(0)


def test_a_file_that_became_shorter_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    indexed = written(tmp_path / "set", range(41))
    batches = TokenBatches([Part(indexed)], S, 10, seed=3)
    os.truncate(indexed.bin_path, 40)
    with pytest.raises(RunError, match=r"set\.bin: ends within sample \d+; it is shorter than when the run started"):
        batches.batch(0)


def test_a_read_that_gives_less_than_it_was_asked_for_is_continued(
    parts: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of network file systems may."""
    expected, preadv = TokenBatches(parts, S, 10, seed=3).batch(1), os.preadv

    def three_bytes(file: int, views: list[memoryview], offset: int) -> int:
        views[0][:] = bytes(len(views[0]))  # memory that is used again may hold what should be read
        return preadv(file, [views[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", three_bytes)
    for one, other in zip(TokenBatches(parts, S, 10, seed=3).batch(1), expected, strict=True):
        assert np.array_equal(one, other)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = TokenBatches([Part(written(tmp_path / "set", range(41)))], S, 10, seed=3)

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(RunError, match=r"set\.bin: cannot be read \(Input/output error\)"):
        batches.batch(0)


def test_a_dataset_of_the_blend_shorter_than_a_sample_is_named(parts: list[Part]) -> None:
    with pytest.raises(UserError, match="set1 holds 13 tokens, fewer than one sample"):
        TokenBatches(parts, 20, 10, seed=3)


def test_of_a_large_file_chunks_at_equal_distances_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vha_paddle.data.indexed._CHUNK", 4)
    tokens = np.arange(64, dtype=np.uint16) % 10
    for place, scanned, is_found in ((16, 8, False), (32, 8, True), (63, 8, True), (16, 64, True), (63, 64, True)):
        indexed = written(tmp_path / "set", range(64))
        wrong = tokens.copy()
        wrong[place] = 999
        wrong.tofile(indexed.bin_path)
        monkeypatch.setattr("vha_paddle.data.indexed._MOST_SCANNED", scanned)
        if is_found:
            with pytest.raises(UserError, match="holds token id 999"):
                IndexedTokens(tmp_path / "set", vocab_size=100)
        else:
            IndexedTokens(tmp_path / "set", vocab_size=100)


def test_a_large_file_that_took_the_place_of_another_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest stayed, and it is not read through at the start."""
    monkeypatch.setattr("vha_paddle.data.indexed._CHUNK", 4)
    tokens = np.arange(64, dtype=np.uint16)
    whole = written(tmp_path / "set", range(64)).digest
    for scanned, place, differs in ((8, 33, True), (8, 61, True), (8, 17, False)):
        monkeypatch.setattr("vha_paddle.data.indexed._MOST_SCANNED", scanned)
        tokens.tofile(tmp_path / "set.bin")
        before = IndexedTokens(tmp_path / "set", vocab_size=100).digest
        other = tokens.copy()
        other[place] = 0
        other.tofile(tmp_path / "set.bin")
        assert before.startswith(f"{whole}+")
        assert (IndexedTokens(tmp_path / "set", vocab_size=100).digest != before) == differs
    names, kept = ["a"], [Part(written(tmp_path / "set", range(64)))]
    now = TokenBatches(kept, S, 10, seed=3).fingerprint
    assert "a holds other tokens" in difference(now + "+5f", now, names)


def test_a_hundred_billion_tokens_take_no_more_memory_than_a_batch(tmp_path: Path) -> None:
    """A file with nothing in it but its length; what is read of it lies far apart."""
    tokens, documents = 100_000_000_000, 100
    bin_path = tmp_path / "huge.bin"
    bin_path.touch()
    os.truncate(bin_path, 2 * tokens)
    sizes = np.full(documents, tokens // documents, np.int32)
    with open(tmp_path / "huge.idx", "wb") as file:
        file.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1))
        file.write(sizes.tobytes())
        file.write((np.arange(documents, dtype=np.int64) * 2 * sizes).tobytes())
        file.write(np.arange(documents + 1, dtype=np.int64).tobytes())
    tracemalloc.start()
    try:
        batches = TokenBatches([Part(IndexedTokens(tmp_path / "huge"))], 4096, 64, seed=0)
        for step in (0, 200_000, 10**9):
            assert batches.batch(step)[0].shape == (64, 4096)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 64 * 4097 * 8  # a few copies of one batch
