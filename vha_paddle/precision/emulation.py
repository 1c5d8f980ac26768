"""The products of an FP8 linear map on a CPU: the factors rounded to E4M3, the sums in the tensors' own dtype."""

from __future__ import annotations

from paddle import Tensor

from vha_paddle.ops.linear import Products, matmul, matmul_with_transpose, transposed_matmul
from vha_paddle.precision.fp8 import quantize_blocks, quantize_rows


def _output(x: Tensor, weight: Tensor) -> Tensor:
    return matmul(quantize_rows(x, axis=1), quantize_blocks(weight))


def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    return matmul_with_transpose(quantize_rows(dy, axis=1), quantize_blocks(weight))


def _weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    return transposed_matmul(quantize_rows(x, axis=0), quantize_rows(dy, axis=0))


EMULATED = Products(_output, _input_gradient, _weight_gradient)
"""float32 and float64."""
