"""The products of an FP8 linear map on a GPU, by Paddle's kernels. Not run on a GPU in this project's tests.

`fp8_gemm_blockwise` computes A B^T for A [M, K] and B [N, K], of which each is quantized along K: in tiles of 1x128
(`1d`) or in blocks of 128x128. It sums in float32.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.incubate.nn.functional import fp8

from vha_paddle.ops.linear import Products

CAPABILITY = 9
"""Least major compute capability of a GPU that has these products (Hopper)."""
_MULTIPLE = 512  # cuBLAS reads the scales of tiles in rows of four


def _padded(x: Tensor) -> Tensor:
    """With zeros at the ends, which change neither the other tiles nor the products."""
    rows, columns = (-size % _MULTIPLE for size in x.shape)
    return F.pad(x, [0, rows, 0, columns]) if rows or columns else x


def _tiles(x: Tensor, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [M, K], or of its transpose, in tiles of 1x128 along the rows of what is given."""
    codes, scales = fp8.fp8_quant_blockwise(
        _padded(x), quant_method="1x128", input_transpose=transpose, return_transpose_only=transpose
    )
    return codes, scales


def _blocks(weight: Tensor, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight, or of its transpose, in blocks of 128x128."""
    codes, scales = fp8.fp8_quant_blockwise(
        _padded(weight),
        quant_method="128x128",
        output_scale_transpose=False,
        input_transpose=transpose,
        return_transpose_only=transpose,
    )
    return codes, scales


def _output(x: Tensor, weight: Tensor) -> Tensor:
    y = fp8.fp8_gemm_blockwise(*_tiles(x), *_blocks(weight, transpose=True), x.dtype, is_b_1d_scaled=False)
    return y[: x.shape[0], : weight.shape[1]]


def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    dx = fp8.fp8_gemm_blockwise(*_tiles(dy), *_blocks(weight), dy.dtype, is_b_1d_scaled=False)
    return dx[: dy.shape[0], : weight.shape[0]]


def _weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    dw = fp8.fp8_gemm_blockwise(*_tiles(x, transpose=True), *_tiles(dy, transpose=True), paddle.float32)
    return dw[: x.shape[1], : dy.shape[1]].astype(x.dtype)


KERNELS = Products(_output, _input_gradient, _weight_gradient)
"""bfloat16."""
