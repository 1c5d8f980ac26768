"""Every dataset of a blend has its share of the stream, to less than one sample, after any number of samples."""

from __future__ import annotations

import numpy as np
import pytest

from vha_paddle.data.blend import Blend


def random_weights(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 300, rng.integers(1, 12)).tolist() for _ in range(count)]


# the third and fourth are such that taking whichever is furthest behind is a whole sample and more off
WEIGHTS = [[1], [7, 2, 1], [1, 2, 13, 13, 14], [1, 1, 1, 40, 40, 41], [1] * 9, [999, 1], *random_weights(40)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_shares_are_exact_to_less_than_a_sample_at_every_length(weights: list[int]) -> None:
    total = sum(weights)
    datasets, _ = Blend(weights).at(np.arange(2 * total + 3))
    counts = np.cumsum(datasets[:, None] == np.arange(len(weights)), axis=0)
    exact = np.arange(1, len(datasets) + 1)[:, None] * np.array(weights)  # times `total`, in whole numbers
    assert (np.abs(counts * total - exact) < total).all()


@pytest.mark.parametrize("weights", WEIGHTS[:6], ids=str)
def test_samples_of_a_dataset_are_counted_without_a_gap(weights: list[int]) -> None:
    blend = Blend(weights)
    datasets, numbers = blend.at(np.arange(3 * sum(weights)))
    for dataset in range(len(weights)):
        assert numbers[datasets == dataset].tolist() == list(range(3 * weights[dataset]))
    for length in (0, 1, sum(weights), 2 * sum(weights) + 1):
        assert blend.count(length).tolist() == [(datasets[:length] == d).sum() for d in range(len(weights))]


def test_a_sample_far_into_the_stream_is_looked_up() -> None:
    blend = Blend([7, 2, 1])
    start = 10 * 10**15 + 3
    datasets, numbers = blend.at(np.arange(start, start + 5))
    near, of_near = blend.at(np.arange(3, 8))
    assert datasets.tolist() == near.tolist()
    assert (numbers - of_near).tolist() == [int(blend.weights[d]) * 10**15 for d in near]


def test_the_order_is_the_one_that_earlier_runs_saw() -> None:
    assert Blend([7, 2, 1]).at(np.arange(10))[0].tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2]
