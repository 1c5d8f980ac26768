"""Rounding to E4M3 in tiles that have a scale each: what FP8 training does to the factors of a matrix product.

E4M3 has 3 mantissa bits, a smallest normal number of 2^-6, steps of 2^-9 below it, and 448 as its largest value. A
tile with largest magnitude a is divided by its scale s, rounded to the nearest value (ties to even) and multiplied
by s again:

    s = the smallest power of two with a <= 448 s

A power of two loses nothing against the exact a / 448, as floating-point numbers are as precise at every magnitude
(but for values below 2^-13 a): what is rounded does not depend on the scale, and no rounding is added by the scaling
itself. Nothing exceeds 448, so nothing is clipped.

The results are ordinary numbers of the input's dtype, so products and sums of them are computed in that dtype: the
emulation differs from FP8 kernels only in the order of the sums. Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
from paddle import Tensor

from vha_paddle.ops.backend import for_each_share, host_view, row_blocks

TILE = 128
"""Elements along the side of a tile."""
_MANTISSA_BITS = 3
_SMALLEST_NORMAL = -6  # exponent
_SMALLEST_SCALE = -117  # exponent; the step 2^-9 of a smaller one would be no normal float32
_LARGEST = 2.0**100  # of a tile; float32 has no room for the rounding of larger ones


def quantize_rows(x: Tensor, axis: int) -> Tensor:
    """`x` rounded in tiles of 1x128: activations and gradients.

    Args:
        x: [rows, columns], float32 or float64.
        axis: of the tiles' 128 elements, the one that the product sums over: 1 along a row, 0 down a column. The
            last tile may be shorter.

    A tile that holds NaN, infinity or a magnitude above 2^100 becomes NaN.
    """
    return _rounded(x, (TILE, 1) if axis == 0 else (1, TILE))


def quantize_blocks(weight: Tensor) -> Tensor:
    """`weight` [in, out] rounded in blocks of 128x128, for the products with it and with its transpose.

    Blocks at the ends may be smaller. One that holds NaN, infinity or a magnitude above 2^100 becomes NaN.
    """
    return _rounded(weight, (TILE, TILE))


def _rounded(x: Tensor, tile: tuple[int, int]) -> Tensor:
    x = x.detach().contiguous()
    out = paddle.empty_like(x)
    source, target = host_view(x), host_view(out)
    height = tile[0]
    # a share is whole rows of tiles; several fit in a block of memory where the tiles are flat
    whole = len(source) // height * height

    def work(start: int, stop: int) -> None:
        for strips in row_blocks(start, stop, source[:height]):
            rows = slice(strips.start * height, strips.stop * height)
            _round_strips(source[rows], target[rows], height, tile[1])

    if whole:
        for_each_share(whole // height, work)
    if whole < len(source):
        _round_strips(source[whole:], target[whole:], len(source) - whole, tile[1])
    return out


def _round_strips(x: np.ndarray, out: np.ndarray, height: int, width: int) -> None:
    """Round rows that are whole tiles high."""
    for columns, own in _whole_and_rest(x.shape[1], width):
        shape = (len(x) // height, height, -1, own)
        _round_tiles(x[:, columns].reshape(shape), out[:, columns].reshape(shape))


def _whole_and_rest(size: int, width: int) -> Iterator[tuple[slice, int]]:
    """The columns in whole tiles, then those of a shorter last one; each with the width of its tiles."""
    whole = size // width * width
    if whole:
        yield slice(0, whole), width
    if whole < size:
        yield slice(whole, size), size - whole


def _round_tiles(x: np.ndarray, out: np.ndarray) -> None:
    """Round each tile `[i, :, j, :]`; `out` is a view that is written to.

    Adding 1.5 * 2^(m - 3 + e), for m the mantissa bits of the dtype, leaves room for 3 bits behind the leading one of
    a number with exponent e, so the addition itself rounds, to nearest and ties to even; subtracting it is exact.
    """
    integer, mantissa = (np.int32, 23) if x.dtype == np.float32 else (np.int64, 52)
    exponent_mask = np.array(np.inf, x.dtype).view(integer)
    largest = np.maximum(x.max(axis=(1, 3), keepdims=True), -x.min(axis=(1, 3), keepdims=True))
    unusable = ~(largest <= _LARGEST)  # also NaN
    lowest = np.ldexp(np.ones_like(largest), _scale_exponent(largest) + _SMALLEST_NORMAL)
    bits = np.bitwise_and(x.view(integer), exponent_mask)
    np.maximum(bits, lowest.view(integer), out=bits)
    bits += integer(((mantissa - _MANTISSA_BITS) << mantissa) | 1 << (mantissa - 1))
    room = bits.view(x.dtype)
    np.add(x, room, out=out)
    out -= room
    if unusable.any():
        np.copyto(out, np.nan, where=unusable)


def _scale_exponent(largest: np.ndarray) -> np.ndarray:
    """e of the smallest 2^e with largest <= 448 * 2^e; 448 is 0.875 * 2^9."""
    fraction, exponent = np.frexp(largest)
    return np.maximum(exponent - 9 + (fraction > 0.875), _SMALLEST_SCALE)
