"""A linear map: three matrix products, here split over threads by rows of their results. A bias is added apart.

    y = x W        dx = dy W^T        dW = x^T dy

MKL's own threads wait for each other inside a product, spinning. Whenever another program takes one of the
cores that wait costs more than the product; threads with a share each are only joined at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from vha_paddle.ops.backend import for_each_share, gradients_wanted, host_view, num_threads, on_gpu

_MIN_ROWS = 128  # of a share: below, reading all of the other factor costs more than the waits


def matmul(left: Tensor, right: Tensor, transpose_right: bool = False) -> Tensor:
    """left [M, K] times right [K, N], or its transpose [N, K]."""
    if len(left) < _MIN_ROWS * num_threads():
        return paddle.matmul(left, right, transpose_y=transpose_right)
    out = paddle.empty([len(left), right.shape[0 if transpose_right else 1]], left.dtype)

    def work(start: int, stop: int) -> None:
        paddle.matmul(left[start:stop], right, transpose_y=transpose_right, out=out[start:stop])

    for_each_share(len(left), work)
    return out


def transposed_matmul(left: Tensor, right: Tensor) -> Tensor:
    """left^T right for left [M, K] and right [M, N]: [K, N]."""
    M, K = left.shape
    if K < _MIN_ROWS * num_threads():
        return paddle.matmul(left, right, transpose_x=True)
    out = paddle.empty([K, right.shape[1]], left.dtype)
    columns = host_view(left)

    def work(start: int, stop: int) -> None:
        own = paddle.empty([M, stop - start], left.dtype)
        np.copyto(host_view(own), columns[:, start:stop])  # Paddle's copy of a strided tensor is 10 times slower
        paddle.matmul(own, right, transpose_x=True, out=out[start:stop])

    for_each_share(K, work)
    return out


def matmul_with_transpose(left: Tensor, right: Tensor) -> Tensor:
    """left right^T for left [M, K] and right [N, K]: [M, N]."""
    return matmul(left, right, transpose_right=True)


@dataclass(frozen=True)
class Products:
    """How the three products of a linear map are computed, from x [rows, in], dy [rows, out] and W [in, out]."""

    output: Callable[[Tensor, Tensor], Tensor]
    """x, W to y = x W."""
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    """dy, W to dx = dy W^T."""
    weight_gradient: Callable[[Tensor, Tensor], Tensor]
    """x, dy to dW = x^T dy."""


PLAIN = Products(matmul, matmul_with_transpose, transposed_matmul)
"""In the dtype of the tensors."""


class _Linear(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Products) -> Tensor:
        ctx.wanted, ctx.products = gradients_wanted(x, weight), products
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return products.output(x.reshape([-1, x.shape[-1]]), weight).reshape([*x.shape[:-1], weight.shape[1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensor()
        products: Products = ctx.products
        dy = grad.contiguous().reshape([-1, weight.shape[1]])
        x_wanted, weight_wanted = ctx.wanted
        return (
            products.input_gradient(dy, weight).reshape(x.shape) if x_wanted else None,
            products.weight_gradient(x.reshape([-1, x.shape[-1]]), dy) if weight_wanted else None,
        )


def linear(x: Tensor, weight: Tensor, products: Products = PLAIN) -> Tensor:
    """x W, for x [..., in] and W [in, out]."""
    if weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"weight of shape {weight.shape} does not fit the last axis of {x.shape}")
    if products is PLAIN and on_gpu(x):  # not run on a GPU in this project's tests
        return paddle.nn.functional.linear(x, weight)
    return _Linear.apply(x, weight, products)


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + b, for y [..., out] and b [out], in the dtype of the tensors; y itself where there is no bias."""
    return y if bias is None else y + bias
