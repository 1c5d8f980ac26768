"""E4M3 with a scale per tile, and the products of a linear map with such factors, from their definitions."""

from __future__ import annotations

from typing import Literal

import numpy as np

TILE = 128
# 0 and the numbers below 2^-6, then 8 per power of two; the last, 480, is the code of NaN
VALUES = np.array([m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1])

Tiles = Literal["along rows", "down columns", "blocks"]


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest of the E4M3 numbers, ties to the even code; |x| is at most 448."""
    size = np.abs(x)
    above = np.searchsorted(VALUES, size).clip(1, len(VALUES) - 1)
    below = above - 1
    down, up = size - VALUES[below], VALUES[above] - size
    takes_upper = (up < down) | ((up == down) & (above % 2 == 0))
    return np.copysign(VALUES[np.where(takes_upper, above, below)], x)


def scale_of(tile: np.ndarray) -> float:
    """The smallest power of two s with |tile| <= 448 s; 1 for zeros."""
    largest, scale = float(np.abs(tile).max()), 1.0
    if largest == 0:
        return scale
    while largest > 448 * scale:
        scale *= 2
    while largest <= 224 * scale:
        scale /= 2
    return scale


def quantized(x: np.ndarray, tiles: Tiles) -> np.ndarray:
    """[rows, columns] rounded tile by tile, in float64."""
    x = np.asarray(x, np.float64)
    height, width = {"along rows": (1, TILE), "down columns": (TILE, 1), "blocks": (TILE, TILE)}[tiles]
    out = np.empty_like(x)
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], width):
            part = np.s_[row : row + height, column : column + width]
            scale = scale_of(x[part])
            out[part] = e4m3(x[part] / scale) * scale
    return out


def fp8_linear(x: np.ndarray, weight: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, dx and dW of [rows, in], [in, out] and [rows, out]: factors in tiles along what each product sums over."""
    rounded_weight = quantized(weight, "blocks")
    y = quantized(x, "along rows") @ rounded_weight
    dx = quantized(dy, "along rows") @ rounded_weight.T
    dweight = quantized(x, "down columns").T @ quantized(dy, "down columns")
    return y, dx, dweight
