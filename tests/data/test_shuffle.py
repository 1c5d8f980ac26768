"""The shuffle is a permutation of any size, computed position by position, and the one that its module describes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.oracles.stream import WORD, place
from vha_paddle.data.shuffle import shuffled


@pytest.mark.parametrize("size", [*range(1, 30), 100, 101, 997, 10_000])
def test_every_position_has_a_place_of_its_own(size: int) -> None:
    assert sorted(shuffled(np.arange(size), size, 7, 3)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 22, 101, 122_000_000, (1 << 40) + 7])
@pytest.mark.parametrize("key", [(0,), (1, 2, 3), (WORD - 1, 0, 5)])
def test_places_are_those_of_the_description(size: int, key: tuple[int, ...]) -> None:
    positions = np.unique(np.linspace(0, size - 1, 9).astype(np.int64))
    assert shuffled(positions, size, *key).tolist() == [place(int(p), size, key) for p in positions]


def test_a_position_goes_to_the_same_place_alone_and_among_others() -> None:
    alone = [int(shuffled(np.array([position]), 50, 1)[0]) for position in range(50)]
    assert alone == shuffled(np.arange(50), 50, 1).tolist()


def test_no_position_is_nothing() -> None:
    assert shuffled(np.arange(0), 10, 1).tolist() == []


def test_keys_have_shuffles_of_their_own() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (0,), (0, 0, 0)]
    assert len({tuple(shuffled(np.arange(40), 40, *key)) for key in keys}) == len(keys)


def test_all_shuffles_of_a_few_come_equally_often() -> None:
    """24 orders of 4 items over 4800 keys, 200 expected of each: within four deviations."""
    orders = [tuple(shuffled(np.arange(4), 4, key).tolist()) for key in range(4800)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24 and max(abs(count - 200) for count in counts) < 4 * math.sqrt(200)


def test_neighbours_are_torn_apart_and_epochs_are_unrelated() -> None:
    size = 10_000
    first, second = (shuffled(np.arange(size), size, 5, epoch) for epoch in (0, 1))
    assert np.abs(np.diff(first)).mean() == pytest.approx(size / 3, rel=0.05)  # as of independent uniform numbers
    for one, other in ((first, np.arange(size)), (first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.04


def chi_squared(pairs: np.ndarray, size: int) -> float:
    """How far the counts of pairs `[n, 2]` of places are from even ones, in standard deviations of that distance."""
    counts = np.bincount(pairs[:, 0] * size + pairs[:, 1], minlength=size * size)
    is_possible = counts >= 0 if (pairs[:, 0] == pairs[:, 1]).any() else ~np.eye(size, dtype=bool).ravel()
    expected, freedom = len(pairs) / is_possible.sum(), is_possible.sum() - 1
    distance = ((counts[is_possible] - expected) ** 2 / expected).sum()
    return float((distance - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [7, 16])
def test_pairs_of_places_come_equally_often(size: int) -> None:
    """Of two positions in one order, and of one position under neighbouring seeds and in neighbouring epochs."""
    orders = np.array([[shuffled(np.arange(size), size, seed, epoch, 0) for epoch in (0, 1)] for seed in range(2000)])
    first, second = orders[:, 0], orders[:, 1]
    for position in (0, size // 2, size - 1):
        other = (position + 1) % size
        assert chi_squared(first[:, [position, other]], size) < 4, "two positions"
        assert chi_squared(np.stack([first[:-1, position], first[1:, position]], 1), size) < 4, "seeds"
        assert chi_squared(np.stack([first[:, position], second[:, position]], 1), size) < 4, "epochs"
