"""What a run reads, sample by sample: written from the description of the data's order, in Python's integers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def place(position: int, size: int, key: Sequence[int]) -> int:
    """Where the shuffle of `size` items under `key` puts a position."""
    rows = math.ceil(math.sqrt(size))
    columns = math.ceil(size / rows)
    state, round_keys = 0, []
    for part in key:
        state = splitmix64(((state ^ part) + GOLDEN) % WORD)
    for _ in range(8):
        state = splitmix64((state + GOLDEN) % WORD)
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


def datasets(weights: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The dataset of each sample, and its number among that dataset's: of those whose next sample may come, the one
    whose must come first."""
    total, taken, n = sum(weights), [0] * len(weights), 0
    while True:
        may = [d for d, weight in enumerate(weights) if taken[d] * total // weight <= n]
        chosen = min(may, key=lambda d: (math.ceil((taken[d] + 1) * total / weights[d]), d))
        yield chosen, taken[chosen]
        taken[chosen] += 1
        n += 1


def stream(sets: Sequence[np.ndarray], weights: Sequence[int], length: int, seed: int) -> Iterator[np.ndarray]:
    """The window of `length` + 1 tokens of each sample."""
    for dataset, number in datasets(weights):
        tokens = sets[dataset]
        samples = (len(tokens) - 1) // length
        epoch, position = divmod(number, samples)
        start = place(position, samples, (seed, epoch, dataset)) * length
        yield tokens[start : start + length + 1]
