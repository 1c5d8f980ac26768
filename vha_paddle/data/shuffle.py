"""A shuffle of any size that is never written down: where one position goes is computed from that position alone.

Positions 0 .. n - 1 are laid out in a rectangle of about sqrt(n) rows; rounds of a Feistel network move each along its
row and along its column, by an amount that a hash of the other coordinate gives. Every round can be undone, so the
whole is a permutation of the rectangle. A position that lands outside of n goes through it again until it is inside
(cycle walking), which is a permutation of 0 .. n - 1.

Of few items not all orders come equally often, and a rectangle with odd sides has even permutations only: what holds is
that no pair of positions has a pair of places that it prefers.

An epoch of any length thus needs no table of its order: nothing to build, to cache or to keep in memory.

Source: Luby and Rackoff 1988; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002; the hash is splitmix64.
"""

from __future__ import annotations

import math

import numpy as np

_ROUNDS = 8
_WORD = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's constants


def shuffled(positions: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Where a shuffle of `size` items puts the given positions, int64.

    Args:
        positions: in [0, size).
        key: non-negative integers below 2**64; another key is another shuffle.
    """
    rows = math.isqrt(size - 1) + 1 if size > 1 else 1
    columns = -(-size // rows)
    round_keys = _round_keys(key)
    result = positions.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        result[outside] = _permuted(result[outside], rows, columns, round_keys)
        outside = result >= size
    return result.astype(np.int64)


def _permuted(x: np.ndarray, rows: int, columns: int, round_keys: list[int]) -> np.ndarray:
    """A permutation of [0, rows * columns)."""
    num_rows, num_columns = np.uint64(rows), np.uint64(columns)
    row, column = x // num_columns, x % num_columns
    for number, key in enumerate(round_keys):
        if number % 2 == 0:
            row = (row + _mixed(column + np.uint64(key)) % num_rows) % num_rows
        else:
            column = (column + _mixed(row + np.uint64(key)) % num_columns) % num_columns
    return row * num_columns + column


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's hash of each element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: tuple[int, ...]) -> list[int]:
    state = 0
    for part in key:
        state = _hashed(state ^ part)
    keys = []
    for _ in range(_ROUNDS):
        state = _hashed(state)
        keys.append(state)
    return keys


def _hashed(x: int) -> int:
    """A step of splitmix64."""
    return int(_mixed(np.array([(x + _GOLDEN) & _WORD], dtype=np.uint64))[0])
