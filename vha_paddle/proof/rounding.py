"""Storage formats: the numbers that weights are rounded to, and how far rounding takes one.

A number with exponent e, 2^(e-1) <= |w| < 2^e, lies between two of a format with p significant bits that are
2^(e-p) apart, so the nearest is at most half of that away; below the smallest normal number steps are all alike.

    format        p    half the smallest step
    float32       24   2^-150
    bfloat16      8    2^-134
    float16       11   2^-25
    E4M3          4    2^-10

FP8 has a scale for each block of 128x128, s = max |w| / 448, and what is rounded to E4M3 is w / s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import ml_dtypes
import numpy as np

from vha_paddle.export.fp8 import BLOCK, LARGEST

Array = np.ndarray[Any, Any]
Format = Literal["float32", "bfloat16", "float16", "fp8"]

_DTYPES: dict[Format, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
_SIGNIFICANT: dict[Format, int] = {"float32": 24, "bfloat16": 8, "float16": 11, "fp8": 4}
_LEAST: dict[Format, int] = {"float32": -150, "bfloat16": -134, "float16": -25, "fp8": -10}
"""Exponent of half the smallest step."""
_VALUES_AT_ONCE = 1 << 17


def round_in_place(values: Array, format: Format) -> None:
    """Round an array, float32 or wider, to the numbers of a format."""
    if values.dtype == _DTYPES[format]:
        return
    for part in _parts(values, format):
        if format == "fp8":
            scale = _scales(part)
            part[...] = (part / scale).astype(_DTYPES[format]).astype(part.dtype) * scale
        else:
            part[...] = part.astype(_DTYPES[format])


def departure(stored: Array, exact: Array, format: Format) -> float:
    """Of all values the largest |stored - exact|, over the most that rounding `exact` to the format makes of it; NaN
    where a value is not finite."""
    largest = 0.0
    for part, true in zip(_parts(stored, format), _parts(exact, format), strict=True):
        true = true.astype(np.float64)
        error = np.abs(part.astype(np.float64) - true) / _half_step(true, format)
        if not (most := float(error.max())) <= largest:
            largest = most
    return largest


def _half_step(values: Array, format: Format) -> Array:
    scale = _scales(values) if format == "fp8" else np.ones(1)
    _, exponent = np.frexp(values / scale)
    return np.ldexp(scale, np.maximum(exponent - _SIGNIFICANT[format] - 1, _LEAST[format]))


def _scales(strip: Array) -> Array:
    """The scale of each value's block; `strip` is one block high. A block of zeros has any."""
    columns = strip.shape[1]
    padded = np.zeros((len(strip), -(-columns // BLOCK) * BLOCK), strip.dtype)
    np.abs(strip, out=padded[:, :columns])
    largest = padded.reshape(len(strip), -1, BLOCK).max(axis=(0, 2))
    scale = np.where(largest > 0, largest, 1) / np.asarray(LARGEST, strip.dtype)
    return np.repeat(scale, BLOCK)[:columns][None]


def _parts(array: Array, format: Format) -> Iterator[Array]:
    """Views of an array that cover it: strips of rows, one block high where blocks have scales."""
    if format != "fp8":
        rows = array.reshape(-1, array.shape[-1])
        step = max(1, _VALUES_AT_ONCE // array.shape[-1])
        yield from (rows[start : start + step] for start in range(0, len(rows), step))
        return
    for matrix in array.reshape(-1, *array.shape[-2:]):
        yield from (matrix[start : start + BLOCK] for start in range(0, len(matrix), BLOCK))
