"""The whole stream of a run, against an oracle: whatever the sets, their weights, the seed and who reads it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.oracles.stream import stream
from vha_paddle.data.indexed import IndexedTokens, write_indexed
from vha_paddle.data.loader import Part, TokenBatches

NUM_SAMPLES = [1, 1, 2, 3, 4, 7, 8, 9, 13, 16, 25, 31, 32]  # one, prime, powers of two, squares of odd numbers


def any_blend(rng: np.random.Generator, folder: Path, length: int) -> tuple[list[np.ndarray], list[Part]]:
    """Random sets of one to a few samples, with and without a tail, of both token types; and weights."""
    sets, parts = [], []
    for number in range(rng.integers(1, 5)):
        tail = rng.choice([0, length - 1, rng.integers(0, length)])
        tokens = rng.integers(0, 5000, int(rng.choice(NUM_SAMPLES)) * length + 1 + tail)
        vocab_size = int(rng.choice([5000, 70_000]))
        write_indexed(
            folder / f"{number}",
            np.array_split(tokens, rng.integers(1, len(tokens) + 1)),  # type: ignore[arg-type]
            vocab_size,
            eod_id=None,
            tokenizer_sha256=None,
            source="random",
        )
        sets.append(tokens)
        indexed = IndexedTokens(folder / f"{number}", vocab_size=vocab_size)
        parts.append(Part(indexed, int(rng.choice([1, 1, 2, 3, 7, 40]))))
    return sets, parts


@pytest.mark.parametrize("number", range(12))
def test_the_stream_is_the_one_described_for_any_sets_and_readers(tmp_path: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    length, seed = int(rng.choice([1, 2, 5, 8])), (0, 1, 2**64 - 1)[rng.integers(3)]
    sets, parts = any_blend(rng, tmp_path, length)
    expected = np.stack(list(itertools.islice(stream(sets, [part.weight for part in parts], length, seed), 240)))
    consumed = 0
    while consumed < 240:  # a run that is stopped and goes on under other layouts, at the same global batch
        ranks, accumulated = int(rng.choice([1, 2, 3, 4])), int(rng.choice([1, 2, 5]))
        size = 12 // ranks
        readers = [TokenBatches(parts, length, 12, seed) for _ in range(ranks)]
        for step in range(consumed // 12, min(consumed // 12 + accumulated, 20)):
            for rank, reader in enumerate(readers):
                tokens_BS, labels_BS = reader.batch(step, rank * size, (rank + 1) * size)
                own = expected[step * 12 + rank * size :][:size]
                assert np.array_equal(tokens_BS, own[:, :-1]) and np.array_equal(labels_BS, own[:, 1:])
            consumed += 12
    for part, tokens in zip(parts, sets, strict=True):
        assert np.array_equal(part.indexed.tokens, tokens)
