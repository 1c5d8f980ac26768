"""Rounding, once and to nearest, against every bfloat16 number and the middles between them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from vha_paddle.rounding import BFLOAT16, all_finite, rounded

# Every number from 0 on, and the power of two behind the largest, where rounding to infinity begins.
NUMBERS = np.append(np.arange(0x7F80, dtype=np.uint16).view(BFLOAT16).astype(np.float64), 2.0**128)
MIDDLES = (NUMBERS[:-1] + NUMBERS[1:]) / 2


def nearest(values: np.ndarray) -> np.ndarray:
    """The nearest of NUMBERS, of two the one with an even last bit; at the end infinity."""
    below = np.searchsorted(NUMBERS, values, side="right") - 1
    above = below + 1
    to_above = np.where(values == MIDDLES[below], below % 2 == 1, values > MIDDLES[below])
    result = NUMBERS[np.where(to_above, above, below)]
    return np.where(result == 2.0**128, np.inf, result)


@pytest.mark.parametrize(
    "values",
    [
        NUMBERS[:-1],
        MIDDLES,
        np.nextafter(MIDDLES, 0),
        np.nextafter(MIDDLES, np.inf),
        MIDDLES * (1 + 2.0**-35),
        MIDDLES * (1 - 2.0**-35),
        np.exp(np.random.default_rng(0).uniform(-95, 88, 100_000)),
    ],
    ids=["numbers", "middles", "below", "above", "a little above", "a little below", "random"],
)
def test_float64_becomes_the_nearest_bfloat16(values: np.ndarray) -> None:
    for sign in (1.0, -1.0):
        np.testing.assert_array_equal(rounded(sign * values, BFLOAT16).astype(np.float64), sign * nearest(values))


def test_float32_becomes_the_nearest_bfloat16() -> None:
    values = MIDDLES.astype(np.float32)
    for each in (values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))):
        np.testing.assert_array_equal(rounded(each, BFLOAT16).astype(np.float64), nearest(each.astype(np.float64)))


def test_the_data_can_see_a_value_that_is_rounded_twice() -> None:
    above = np.nextafter(MIDDLES, np.inf)
    assert (above.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) != nearest(above)).mean() > 0.4


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_other_dtypes_are_numpys(dtype: Any) -> None:
    values = np.random.default_rng(0).standard_normal((300, 400))
    np.testing.assert_array_equal(rounded(values, dtype), values.astype(dtype))


def test_an_array_of_the_dtype_is_returned_itself() -> None:
    values = np.zeros(3, np.float32)
    assert rounded(values, np.float32) is values


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("place", [0, 65_535, 65_536, 199_999])
def test_one_value_that_is_not_finite_is_found(dtype: Any, value: float, place: int) -> None:
    values = np.full((2, 100_000), -1.5).astype(dtype)
    assert all_finite(values)
    values.reshape(-1)[place] = value
    assert not all_finite(values)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
def test_the_largest_numbers_are_finite(dtype: Any) -> None:
    largest = np.array([ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min, 0.0, -0.0], dtype)
    assert all_finite(largest) and all_finite(largest[::2]) and all_finite(np.empty(0, dtype))
