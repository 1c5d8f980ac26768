"""The tolerances of this project, written once. They are policy: a test that fails is never cured here."""

from __future__ import annotations

import numpy as np

FLOAT64 = 1e-10  # an implementation against its oracle
FLOAT64_FOLD = 1e-12  # folded against unfolded: the same products, reassociated
FLOAT32 = 1e-5


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """max |actual - expected| over max |expected|, in float64 (absolute where `expected` is all zero).

    The scale is the largest entry of the tensor, not each entry's own, so that entries near zero are not
    judged by their round-off.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shapes differ: {actual.shape} and {expected.shape}"
    assert np.isfinite(actual).all(), "not finite"
    difference = float(np.abs(actual - expected).max(initial=0.0))
    scale = float(np.abs(expected).max(initial=0.0))
    return difference / scale if scale > 0 else difference


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, name: str) -> None:
    """Fail with the tensor's name and both figures where the relative error exceeds the tolerance."""
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{name}: relative error {error:.3e} exceeds {tolerance:.0e}"
