"""The mask is read from what dropout does to ones. Its statistics are those of one fixed key, so they do not vary.

A bound of five standard deviations is broken by chance once in two million.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import paddle
import pytest

from tests.ops.conftest import TOLERANCES
from tests.tolerances import assert_close
from vha_paddle.ops import dropout as module
from vha_paddle.ops.dropout import dropout, dropout_key

B, S, D = 8, 128, 1024  # 2^20 elements
SAMPLES, POSITIONS = np.arange(B), np.arange(S)
KEY = dropout_key(1, "model.layers.0.mlp")
RATES = [0.1, 0.5]
SIGMAS = 5.0


def dropped(
    rate: float, key: int = KEY, samples: np.ndarray = SAMPLES, positions: np.ndarray = POSITIONS, channels: int = D
) -> np.ndarray:
    """The mask [B, S, D], True where dropped."""
    ones = paddle.ones([len(samples), len(positions), channels])
    return dropout(ones, rate, key, samples, positions).numpy() == 0


def deviations(successes: int, trials: int, rate: float) -> float:
    """How many standard deviations a binomial count is from its mean."""
    return (successes - trials * rate) / math.sqrt(trials * rate * (1 - rate))


def assert_independent(first: np.ndarray, second: np.ndarray, rate: float) -> None:
    """The count of places where both masks drop is that of two unrelated masks."""
    assert abs(deviations(int((first & second).sum()), first.size, rate**2)) < SIGMAS


@pytest.mark.parametrize("rate", [1e-3, *RATES, 0.99])
def test_the_rate_of_elements_is_dropped(rate: float) -> None:
    mask = dropped(rate)
    assert abs(deviations(int(mask.sum()), mask.size, rate)) < SIGMAS


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["sample", "position", "channel"])
@pytest.mark.parametrize("rate", RATES)
def test_every_sample_position_and_channel_has_the_rate(rate: float, axis: int) -> None:
    mask = dropped(rate)
    others = tuple(i for i in range(3) if i != axis)
    count, trials = mask.sum(axis=others), mask.size // mask.shape[axis]
    chi_square = float(((count - trials * rate) ** 2).sum() / (trials * rate * (1 - rate)))
    assert abs(chi_square - len(count)) < SIGMAS * math.sqrt(2 * len(count))


@pytest.mark.parametrize("lag", [1, 2, 3, 64])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["sample", "position", "channel"])
@pytest.mark.parametrize("rate", RATES)
def test_neighbours_are_dropped_independently(rate: float, axis: int, lag: int) -> None:
    mask = dropped(rate)
    moved, lag = np.moveaxis(mask, axis, 0), min(lag, mask.shape[axis] // 2)
    assert_independent(moved[lag:], moved[:-lag], rate)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_a_later_position_is_not_an_earlier_one_moved(channels: int) -> None:
    mask = dropped(0.5)
    assert_independent(mask[:, 1:, :-channels], mask[:, :-1, channels:], 0.5)
    assert_independent(mask[1:, :, :-channels], mask[:-1, :, channels:], 0.5)


def test_a_later_sample_is_not_an_earlier_one_moved() -> None:
    mask = dropped(0.5)
    assert_independent(mask[1:, :-1], mask[:-1, 1:], 0.5)
    square = mask[:, :B]
    assert_independent(square[np.triu_indices(B, 1)], square.transpose(1, 0, 2)[np.triu_indices(B, 1)], 0.5)


@pytest.mark.parametrize("other", [KEY + 1, KEY ^ (1 << 63), dropout_key(2, "model.layers.0.mlp")])
def test_masks_of_two_keys_are_independent(other: int) -> None:
    assert_independent(dropped(0.5), dropped(0.5, other), 0.5)


def test_masks_far_along_in_a_run_are_independent() -> None:
    far = dropped(0.5, samples=SAMPLES + 10**12)
    assert_independent(dropped(0.5), far, 0.5)
    assert abs(deviations(int(far.sum()), far.size, 0.5)) < SIGMAS


def test_a_larger_rate_drops_what_a_smaller_one_drops_and_more() -> None:
    small, large = dropped(0.1), dropped(0.2)
    assert large[small].all() and large.sum() > small.sum()


@pytest.mark.parametrize("channels", [16, 15], ids=["even", "odd"])
def test_a_part_of_batch_and_sequence_has_the_mask_of_the_whole(
    channels: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dropped(0.3, channels=channels)
    monkeypatch.setattr("vha_paddle.ops.backend._BLOCK_BYTES", 5 * channels * 4)
    samples, positions = np.array([1, 6, 7]), np.r_[2:4, 12:14, 100]
    part = dropped(0.3, samples=samples, positions=positions, channels=channels)
    np.testing.assert_array_equal(part, whole[np.ix_(samples, positions)])


def test_the_mixer_is_splitmix64() -> None:
    state = module._steps(3)  # of a generator that starts at 0
    module._mix(state)
    assert [int(x) for x in state] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_the_mask_is_the_hash_of_key_sample_position_and_channel() -> None:
    def split_mix(state: int, count: int) -> int:
        z = (state + count * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    samples, positions, channels = np.array([0, 5, 2**40]), np.array([0, 1, 131_071]), 5
    expected = np.empty((3, 3, channels), bool)
    for b, sample in enumerate(samples.tolist()):
        for s, position in enumerate(positions.tolist()):
            state = split_mix(split_mix(KEY, sample + 1), position + 1)
            for d in range(channels):
                bits = split_mix(state, d // 2 + 1) >> (32 * (d % 2)) & 0xFFFFFFFF
                expected[b, s, d] = bits / 2**32 < 0.4
    np.testing.assert_array_equal(dropped(0.4, KEY, samples, positions, channels), expected)


@pytest.mark.parametrize("channels", [8, 7], ids=["even", "odd"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1 - 2**-33])
def test_the_form_in_paddle_operations_has_the_same_mask(rate: float, channels: int, dtype: str) -> None:
    samples, positions = np.array([0, 3, 2**50]), np.arange(40)
    x = np.random.default_rng(1).normal(size=(3, 40, channels))
    x_BSD = paddle.to_tensor(x.astype(dtype))
    mask = module._Mask(rate, module._row_states(KEY, samples, positions))
    y, expected = (f(x_BSD, mask).numpy() for f in (module._apply_with_paddle, module._apply_on_cpu))
    np.testing.assert_array_equal(y == 0, expected == 0)
    assert_close(y, expected, TOLERANCES[dtype], "output")


@pytest.mark.parametrize("rate", RATES)
def test_what_is_kept_and_its_gradient_are_scaled_alike(rate: float, dtype: str, threads: int) -> None:
    rng = np.random.default_rng(2)
    x, dy = (rng.normal(size=(3, 7, 9)).astype(dtype) for _ in range(2))
    x_BSD = paddle.to_tensor(x, stop_gradient=False)
    y_BSD = dropout(x_BSD, rate, KEY, np.arange(3), np.arange(7))
    y_BSD.backward(paddle.to_tensor(dy))
    kept = ~dropped(rate, KEY, np.arange(3), np.arange(7), 9)
    assert 0 < kept.sum() < kept.size
    assert y_BSD.dtype == x_BSD.grad.dtype == x_BSD.dtype
    assert_close(y_BSD.numpy(), kept * x / (1 - rate), TOLERANCES[dtype], "output")
    assert_close(x_BSD.grad.numpy(), kept * dy / (1 - rate), TOLERANCES[dtype], "gradient")
    np.testing.assert_array_equal(x_BSD.grad.numpy() == 0, ~kept)


def test_backward_has_forwards_mask_when_the_caller_reuses_its_arrays() -> None:
    samples, positions = np.arange(2), np.arange(6)
    x_BSD = paddle.ones([2, 6, 8])
    x_BSD.stop_gradient = False
    y_BSD = dropout(x_BSD, 0.5, KEY, samples, positions)
    samples += 2
    positions += 6
    y_BSD.sum().backward()
    np.testing.assert_array_equal(x_BSD.grad.numpy(), y_BSD.numpy())


@pytest.mark.parametrize("form", [module._apply_on_cpu, module._apply_with_paddle], ids=["numpy", "Paddle"])
def test_what_is_dropped_is_zero_even_when_it_is_not_finite(form: Callable[..., paddle.Tensor], dtype: str) -> None:
    mask = module._Mask(0.5, module._row_states(KEY, np.arange(1), np.arange(4)))
    y_BSD = form(paddle.full([1, 4, 8], math.inf, dtype), mask)
    assert set(np.unique(y_BSD.numpy())) == {0.0, math.inf}


def test_rate_zero_gives_the_tensor_itself() -> None:
    x_BSD = paddle.ones([B, S, 2])
    assert dropout(x_BSD, 0.0, KEY, SAMPLES, POSITIONS) is x_BSD


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    assert dropout_key(0, "model.layers.0.mlp") == 0xA289A862C31D8D47


def test_seeds_and_names_have_keys_of_their_own() -> None:
    keys = {dropout_key(seed, f"model.layers.{i}.{part}") for seed in range(5) for i in range(9) for part in "ab"}
    assert len(keys) == 5 * 9 * 2
    assert all(0 <= key < 2**64 for key in keys) and max(keys) > 2**62


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"not in \[0, 1\)"):
        dropped(rate)


@pytest.mark.parametrize("key", [-1, 2**64])
def test_a_key_of_more_than_64_bits_is_refused(key: int) -> None:
    with pytest.raises(ValueError, match="key"):
        dropped(0.1, key)


@pytest.mark.parametrize(
    ("samples", "positions", "message"),
    [
        (SAMPLES[:-1], POSITIONS, "do not fit"),
        (SAMPLES, POSITIONS[:-1], "do not fit"),
        (SAMPLES[:, None], POSITIONS, "do not fit"),
        (SAMPLES.astype(np.int32), POSITIONS, "int64"),
        (SAMPLES, POSITIONS.astype(np.float64), "int64"),
    ],
)
def test_samples_and_positions_that_do_not_fit_are_refused(
    samples: np.ndarray, positions: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dropout(paddle.ones([B, S, 2]), 0.1, KEY, samples, positions)
