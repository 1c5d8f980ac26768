"""The shuffle is a permutation of any size, computed position by position, and the one that its module describes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vha_paddle.data.shuffle import shuffled

WORD = 1 << 64


def splitmix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def in_whole_numbers(position: int, size: int, key: tuple[int, ...]) -> int:
    """The same shuffle, of one position and in Python's integers."""
    rows = math.ceil(math.sqrt(size))
    columns = math.ceil(size / rows)
    state, round_keys = 0, []
    for part in key:
        state = splitmix64(((state ^ part) + 0x9E3779B97F4A7C15) % WORD)
    for _ in range(8):
        state = splitmix64((state + 0x9E3779B97F4A7C15) % WORD)
        round_keys.append(state)
    while True:
        row, column = divmod(position, columns)
        for number, round_key in enumerate(round_keys):
            if number % 2:
                column = (column + splitmix64((row + round_key) % WORD)) % columns
            else:
                row = (row + splitmix64((column + round_key) % WORD)) % rows
        position = row * columns + column
        if position < size:
            return position


@pytest.mark.parametrize("size", [*range(1, 30), 100, 101, 997, 10_000])
def test_every_position_has_a_place_of_its_own(size: int) -> None:
    assert sorted(shuffled(np.arange(size), size, 7, 3)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 22, 101, 122_000_000, (1 << 40) + 7])
@pytest.mark.parametrize("key", [(0,), (1, 2, 3), (WORD - 1, 0, 5)])
def test_places_are_those_of_the_description(size: int, key: tuple[int, ...]) -> None:
    positions = np.unique(np.linspace(0, size - 1, 9).astype(np.int64))
    assert shuffled(positions, size, *key).tolist() == [in_whole_numbers(int(p), size, key) for p in positions]


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
