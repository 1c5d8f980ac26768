"""Rounding to a storage format, and how far it may take a number, against the numbers of each format written out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.oracles.fp8 import VALUES
from vha_paddle.export import fp8
from vha_paddle.proof.rounding import Format, departure, round_in_place

DTYPES: dict[Format, type] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SIGNIFICANT_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


def values(*shape: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape) * 10.0 ** generator.uniform(-3, 1, shape)


@pytest.mark.parametrize("format", DTYPES)
def test_rounding_is_within_half_a_step_and_the_next_number_is_not(format: Format) -> None:
    exact = values(70, 50)
    nearest = exact.astype(DTYPES[format])
    assert 0.99 < departure(nearest, exact, format) <= 1
    for direction in (np.inf, -np.inf):
        next_one = nearest.copy()
        next_one[3, 7] = np.nextafter(nearest[3, 7], DTYPES[format](direction))
        assert departure(next_one, exact, format) > 1.01


@pytest.mark.parametrize("format", DTYPES)
def test_the_step_below_a_power_of_two_is_half_of_that_above(format: Format) -> None:
    step = 2.0 ** -SIGNIFICANT_BITS[format]
    one = np.ones((1, 1))
    assert departure(one + 1.5 * step, one + step, format) == 0.5
    assert departure(one - 1.25 * step, one - step, format) == 0.5


@pytest.mark.parametrize(("format", "step"), [("bfloat16", 2.0**-133), ("float16", 2.0**-24)])
def test_the_smallest_numbers_have_one_step(format: Format, step: float) -> None:
    small = np.array([[0.0, 0.3 * step, 3.3 * step]])
    assert departure(small.astype(DTYPES[format]), small, format) == pytest.approx(0.6, rel=1e-6)
    assert departure(small + step, small, format) == pytest.approx(2, rel=1e-6)


def test_fp8_is_measured_in_steps_of_the_blocks_scale() -> None:
    """Of every weight the nearest E4M3 number times its block's scale is at most half a step away, the next is not."""
    exact = values(300, 200)
    stored = fp8.dequantise(*fp8.quantise(exact))
    assert 0.99 < departure(stored, exact, "fp8") <= 1.0001
    for row, column in ((5, 6), (140, 3), (299, 199)):
        block = exact[row // 128 * 128 : row // 128 * 128 + 128, column // 128 * 128 : column // 128 * 128 + 128]
        scale = np.abs(block).max() / 448
        code = int(np.abs(VALUES - abs(stored[row, column]) / scale).argmin())
        for other in (code - 1, code + 1):
            if 0 <= other < len(VALUES):
                wrong = stored.copy()
                wrong[row, column] = np.copysign(VALUES[other] * scale, exact[row, column])
                assert departure(wrong, exact, "fp8") > 1.01, (row, column, other)


def test_a_scale_that_is_not_the_blocks_shows() -> None:
    exact = values(256, 256)
    quantised, scales = fp8.quantise(exact)
    coarse = fp8.dequantise((quantised.astype(np.float32) / 16).astype(quantised.dtype), scales * 16)
    assert departure(coarse, exact, "fp8") > 1.01


@pytest.mark.parametrize("format", [*DTYPES, "fp8"])
def test_what_is_rounded_in_place_are_the_formats_numbers(format: Format) -> None:
    exact = values(3, 140, 150).astype(np.float32)
    rounded = exact.copy()
    round_in_place(rounded, format)
    if format == "fp8":
        expected = np.stack([fp8.dequantise(*fp8.quantise(matrix)) for matrix in exact])
        assert departure(rounded, exact, format) <= 1.0001
        assert np.abs(rounded - expected).max() <= 1e-6 * np.abs(expected).max()  # the scale is rounded, or is not
    else:
        assert np.array_equal(rounded, exact.astype(DTYPES[format]).astype(np.float32))


def test_a_block_of_zeros_is_exact() -> None:
    zeros = np.zeros((130, 140))
    assert departure(zeros, zeros, "fp8") == 0
    rounded = zeros.copy()
    round_in_place(rounded, "fp8")
    assert not rounded.any()


@pytest.mark.parametrize("format", [*DTYPES, "fp8"])
def test_a_value_that_is_no_number_is_no_small_departure(format: Format) -> None:
    stored = np.ones((200, 200))
    stored[150, 3] = np.nan
    assert not departure(stored, np.ones((200, 200)), format) <= 1e9


def test_a_vector_is_one_row() -> None:
    gain = np.array([1.0, 1.3, -0.7])
    assert departure(gain.astype(np.float16), gain, "float16") <= 1
