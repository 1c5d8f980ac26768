"""Several datasets as one stream: which of them each sample of the stream is from.

Datasets have whole weights w_1 .. w_m that add up to W. The stream repeats a pattern of W samples, w_d of them from
dataset d, so where any sample comes from is looked up, not counted up to.

Of the first n samples, dataset d gives the floor or the ceiling of n w_d / W: it is less than one sample away from its
share at every n. Taking the dataset that is furthest behind its weight, as Megatron-LM does, does not promise so much
for three and more. Here sample j of dataset d (from 0) may not come before the share has begun to ask for it, at
floor(j W / w_d), and must come by ceil((j + 1) W / w_d); of those that may, the one that must come first is taken.
Such a sequence exists (Tijdeman, "The chairman assignment problem", 1980) and taking the earliest deadline finds it, as
it does for one machine and unit tasks with windows (Baruah et al., "Proportionate progress", 1996).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


class Blend:
    """The samples of a stream dealt out to datasets by weight.

    Attributes:
        weights: w_d, positive.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = np.array(weights, dtype=np.int64)
        self._pattern = _pattern(weights)
        self._number = np.zeros(len(self._pattern), dtype=np.int64)  # of the dataset's samples within the pattern
        for dataset in range(len(weights)):
            mine = self._pattern == dataset
            self._number[mine] = np.arange(np.count_nonzero(mine))

    def at(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The dataset of each sample of the stream, and which of that dataset's samples it is, counted from 0."""
        rounds, place = np.divmod(samples, len(self._pattern))
        datasets = self._pattern[place]
        return datasets, rounds * self.weights[datasets] + self._number[place]

    def count(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` of the stream come from each dataset."""
        rounds, rest = divmod(num_samples, len(self._pattern))
        return rounds * self.weights + np.bincount(self._pattern[:rest], minlength=len(self.weights))


def _pattern(weights: Sequence[int]) -> np.ndarray:
    """The dataset of each of the first W samples."""
    total = sum(weights)
    taken = [0] * len(weights)
    early = [(0, dataset) for dataset in range(len(weights))]  # by when their next sample may come
    ready: list[tuple[int, int]] = []  # by when it must
    pattern = np.empty(total, dtype=np.int64)
    for place in range(total):
        while early and early[0][0] <= place:
            _, dataset = heapq.heappop(early)
            deadline = -(-(taken[dataset] + 1) * total // weights[dataset])
            heapq.heappush(ready, (deadline, dataset))
        _, dataset = heapq.heappop(ready)
        pattern[place] = dataset
        taken[dataset] += 1
        heapq.heappush(early, (taken[dataset] * total // weights[dataset], dataset))
    return pattern
