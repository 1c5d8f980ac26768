"""The training stream is reproducible, complete and independent of who reads it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.loader import Part, TokenBatches, ValidationWindows, unigram_entropy
from vha_paddle.errors import UserError

S = 7
SAMPLES = 22  # in `counting`


@pytest.fixture
def counting(opened: Callable[..., IndexedTokens]) -> IndexedTokens:
    """The tokens 0 to 160, so that a window's first token says where it starts: 22 samples and a tail."""
    return opened(range(100), range(100, 161))


def epoch_of(batches: TokenBatches, epoch: int) -> list[int]:
    """The number of each sample of an epoch, in the order in which it is read."""
    n = SAMPLES
    return (batches.samples(epoch * n, (epoch + 1) * n)[0][:, 0] // S).tolist()


def test_batch_has_the_stated_shape_and_type(counting: IndexedTokens) -> None:
    tokens_BS, labels_BS = TokenBatches([Part(counting)], S, 4, seed=0).batch(0)
    assert tokens_BS.shape == labels_BS.shape == (4, S)
    assert tokens_BS.dtype == labels_BS.dtype == np.int64
    assert tokens_BS.flags.c_contiguous and labels_BS.flags.c_contiguous


def test_labels_are_the_tokens_one_further(counting: IndexedTokens) -> None:
    tokens_BS, labels_BS = TokenBatches([Part(counting)], S, 4, seed=0).batch(3)
    assert np.array_equal(labels_BS, tokens_BS + 1)
    assert np.array_equal(tokens_BS, tokens_BS[:, :1] + np.arange(S))


def test_each_sample_is_read_once_an_epoch(counting: IndexedTokens) -> None:
    batches = TokenBatches([Part(counting)], S, 4, seed=0)
    assert (161 - 1) // S == SAMPLES
    for epoch in range(3):
        assert sorted(epoch_of(batches, epoch)) == list(range(SAMPLES))


def test_epochs_and_seeds_have_orders_of_their_own(counting: IndexedTokens) -> None:
    first, other = (TokenBatches([Part(counting)], S, 4, seed=seed) for seed in (0, 1))
    orders = [epoch_of(first, 0), epoch_of(first, 1), epoch_of(other, 0), list(range(22))]
    assert len({tuple(order) for order in orders}) == 4


def test_order_is_the_one_that_earlier_runs_saw(counting: IndexedTokens) -> None:
    """Written down, because a resumed run must continue the stream on any version of anything."""
    order = epoch_of(TokenBatches([Part(counting)], S, 4, seed=1234), 2)
    assert order == [20, 13, 14, 10, 2, 21, 18, 7, 12, 3, 19, 4, 0, 15, 6, 17, 1, 8, 16, 5, 11, 9]


def test_stream_continues_from_the_sample_index_alone(counting: IndexedTokens) -> None:
    ran = TokenBatches([Part(counting)], S, 4, seed=0)
    history = [ran.batch(step) for step in range(20)]
    resumed = TokenBatches([Part(counting)], S, 4, seed=0)
    for step in (13, 19, 2):  # a fresh loader, out of order, across epochs of 5.5 batches
        for mine, theirs in zip(resumed.batch(step), history[step], strict=True):
            assert np.array_equal(mine, theirs)


def test_batch_may_span_epochs(counting: IndexedTokens) -> None:
    batches = TokenBatches([Part(counting)], S, 4, seed=0)
    starts = batches.batch(5)[0][:, 0] // S  # samples 20 to 23 of epochs of 22
    assert starts.tolist() == epoch_of(batches, 0)[20:] + epoch_of(batches, 1)[:2]


def test_batch_may_be_longer_than_an_epoch(counting: IndexedTokens) -> None:
    batches = TokenBatches([Part(counting)], S, 50, seed=0)
    starts = (batches.batch(0)[0][:, 0] // S).tolist()
    assert starts == epoch_of(batches, 0) + epoch_of(batches, 1) + epoch_of(batches, 2)[:6]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_any_layout_reads_the_same_global_batch(counting: IndexedTokens, ranks: int) -> None:
    whole = TokenBatches([Part(counting)], S, 12, seed=0)
    share = 12 // ranks
    for step in (0, 1, 5):
        parts = [
            TokenBatches([Part(counting)], S, 12, seed=0).batch(step, rank * share, (rank + 1) * share)
            for rank in range(ranks)
        ]
        for which in (0, 1):
            together = np.concatenate([part[which] for part in parts])
            assert np.array_equal(together, whole.batch(step)[which])


def test_stream_is_the_same_for_any_batch_size(counting: IndexedTokens) -> None:
    small, large = (TokenBatches([Part(counting)], S, size, seed=0) for size in (3, 12))
    together = np.concatenate([small.batch(step)[0] for step in range(8)])
    assert np.array_equal(together, np.concatenate([large.batch(step)[0] for step in range(2)]))


def test_empty_slice_of_a_batch_is_empty(counting: IndexedTokens) -> None:
    assert TokenBatches([Part(counting)], S, 4, seed=0).batch(0, 2, 2)[0].shape == (0, S)


def test_batches_can_be_changed_without_touching_the_data(counting: IndexedTokens) -> None:
    batches = TokenBatches([Part(counting)], S, 4, seed=0)
    batches.batch(0)[0][:] = -1
    assert batches.batch(0)[0].min() >= 0


def test_fingerprint_changes_with_what_decides_the_stream(
    counting: IndexedTokens, opened: Callable[..., IndexedTokens]
) -> None:
    prints = {
        TokenBatches([Part(counting)], S, 4, seed=0).fingerprint,
        TokenBatches([Part(counting)], S, 4, seed=1).fingerprint,
        TokenBatches([Part(counting)], S + 1, 4, seed=0).fingerprint,
    }
    same = TokenBatches([Part(counting)], S, 8, seed=0).fingerprint
    assert same in prints and len(prints) == 3
    other_text = opened(range(1, 162))
    assert TokenBatches([Part(other_text)], S, 4, seed=0).fingerprint not in prints


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5)])
def test_rows_outside_the_global_batch_are_refused(counting: IndexedTokens, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside a global batch of 4"):
        TokenBatches([Part(counting)], S, 4, seed=0).batch(0, start, stop)


def test_negative_step_is_refused(counting: IndexedTokens) -> None:
    with pytest.raises(ValueError, match="not a range of the stream"):
        TokenBatches([Part(counting)], S, 4, seed=0).batch(-1)


def test_validation_goes_through_the_windows_in_order(counting: IndexedTokens) -> None:
    windows = ValidationWindows(counting, S)
    batches = list(windows.batches(5))
    assert [len(tokens_BS) for tokens_BS, _ in batches] == [5, 5, 5, 5, 2]
    assert np.concatenate([tokens_BS for tokens_BS, _ in batches]).ravel().tolist() == list(range(22 * S))
    assert np.concatenate([labels_BS for _, labels_BS in batches]).ravel().tolist() == list(range(1, 22 * S + 1))


def test_validation_samples_outside_the_dataset_are_refused(counting: IndexedTokens) -> None:
    with pytest.raises(ValueError, match="outside the 22 of this dataset"):
        ValidationWindows(counting, S).samples(20, 23)


def test_dataset_of_exactly_one_sample_is_enough(opened: Callable[..., IndexedTokens]) -> None:
    batches = TokenBatches([Part(opened(range(S + 1)))], S, 2, seed=0)
    assert batches.batch(0)[1].tolist() == [list(range(1, S + 1))] * 2


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_dataset_shorter_than_a_sample_is_a_user_error(opened: Callable[..., IndexedTokens], kind: str) -> None:
    indexed = opened(range(S))
    with pytest.raises(UserError, match="holds 7 tokens, fewer than one sample of sequence_length"):
        TokenBatches([Part(indexed)], S, 2, seed=0) if kind == "train" else ValidationWindows(indexed, S)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 0), "sequence_length 0 must be at least 1"),
        ((S, 0, 0), "global_batch_size 0 must be at least 1"),
        ((S, 4, -1), "data seed -1 must be in"),
        ((S, 4, 1 << 64), "must be in"),
    ],
)
def test_number_out_of_range_is_a_user_error(
    counting: IndexedTokens, arguments: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        TokenBatches([Part(counting)], *arguments)


@pytest.mark.parametrize("chunk", [3, 1 << 22])
@pytest.mark.parametrize("vocab_size", [1000, 100_000])
def test_unigram_entropy_is_that_of_the_counts(
    opened: Callable[..., IndexedTokens], monkeypatch: pytest.MonkeyPatch, chunk: int, vocab_size: int
) -> None:
    monkeypatch.setattr("vha_paddle.data.indexed._CHUNK", chunk)
    tokens = [1, 1, 5, 999, 1, 7, 5, 0, 1, 2]
    indexed = opened(tokens[:4], tokens[4:], vocab_size=vocab_size)
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    assert unigram_entropy(indexed) == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-12)


def test_unigram_entropy_of_one_token_is_zero(opened: Callable[..., IndexedTokens]) -> None:
    assert unigram_entropy(opened([3, 3, 3])) == 0.0
