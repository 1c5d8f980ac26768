"""A linear map per expert, over rows that are sorted by expert: one operation with its own backward.

    y_r = x_r W_e        dx_r = dy_r W_e^T        dW_e = sum of x_r^T dy_r        for the rows r of expert e

The rows of one expert follow one another, so each is a matrix product on a run of rows, and on a CPU nothing is
padded; on a GPU one batched product takes all experts (`grouped_batched.py`).

On a CPU the work is shared out so that one expert with most of the rows keeps no thread waiting: y and dx by rows,
whosever they are; dW by its own rows, of which every thread makes the same ones of every expert.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from vha_paddle.ops import grouped_batched
from vha_paddle.ops.backend import for_each_share, gradients_wanted, host_view, on_gpu
from vha_paddle.ops.linear import PLAIN, Products


def _segments(counts_E: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Expert, first and last row (exclusive) of each run of rows within `start:stop`."""
    bounds = [0, *itertools.accumulate(counts_E)]
    for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
        first, last = max(first, start), min(last, stop)
        if first < last:
            yield expert, first, last


def _products(x_RD: Tensor, weight_EDF: Tensor, counts_E: Sequence[int], transposed: bool = False) -> Tensor:
    """Each row times the matrix of its expert, or times the transpose."""
    out = paddle.empty([len(x_RD), weight_EDF.shape[1 if transposed else 2]], x_RD.dtype)

    def work(start: int, stop: int) -> None:
        for expert, first, last in _segments(counts_E, start, stop):
            paddle.matmul(x_RD[first:last], weight_EDF[expert], transpose_y=transposed, out=out[first:last])

    for_each_share(len(x_RD), work)
    return out


def _weight_gradient(x_RD: Tensor, dy_RF: Tensor, counts_E: Sequence[int]) -> Tensor:
    """Sum of x_r^T dy_r over the rows of each expert; zero for one without rows."""
    out = paddle.zeros([len(counts_E), x_RD.shape[1], dy_RF.shape[1]], x_RD.dtype)
    segments = list(_segments(counts_E, 0, len(x_RD)))

    def work(start: int, stop: int) -> None:
        columns = _columns(x_RD, start, stop)
        for expert, first, last in segments:
            paddle.matmul(columns[first:last], dy_RF[first:last], transpose_x=True, out=out[expert, start:stop])

    if segments:
        for_each_share(x_RD.shape[1], work)
    return out


def _columns(x_RD: Tensor, start: int, stop: int) -> Tensor:
    if stop - start == x_RD.shape[1]:
        return x_RD
    own = paddle.empty([len(x_RD), stop - start], x_RD.dtype)
    np.copyto(host_view(own), host_view(x_RD)[:, start:stop])  # Paddle's copy of a strided tensor is 10 times slower
    return own


@dataclass(frozen=True)
class _GroupedProducts:
    """The three products, each from two factors and the rows of each expert."""

    output: Callable[[Tensor, Tensor, Sequence[int]], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Sequence[int]], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Sequence[int]], Tensor]


_PLAIN = _GroupedProducts(_products, functools.partial(_products, transposed=True), _weight_gradient)
_BATCHED = _GroupedProducts(grouped_batched.output, grouped_batched.input_gradient, grouped_batched.weight_gradient)


@functools.cache
def _one_by_one(products: Products) -> _GroupedProducts:
    """Those of each expert in turn, by products that share out their own work."""

    def of_rows(product: Callable[[Tensor, Tensor], Tensor], axis: int) -> Callable[..., Tensor]:
        def compute(rows: Tensor, weight_EDF: Tensor, counts_E: Sequence[int]) -> Tensor:
            out = paddle.empty([len(rows), weight_EDF.shape[axis]], rows.dtype)
            for expert, first, last in _segments(counts_E, 0, len(rows)):
                out[first:last] = product(rows[first:last], weight_EDF[expert])
            return out

        return compute

    def weight_gradient(x_RD: Tensor, dy_RF: Tensor, counts_E: Sequence[int]) -> Tensor:
        out = paddle.zeros([len(counts_E), x_RD.shape[1], dy_RF.shape[1]], x_RD.dtype)
        for expert, first, last in _segments(counts_E, 0, len(x_RD)):
            out[expert] = products.weight_gradient(x_RD[first:last], dy_RF[first:last])
        return out

    return _GroupedProducts(of_rows(products.output, 2), of_rows(products.input_gradient, 1), weight_gradient)


class _GroupedLinear(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_EDF: Tensor, counts_E: Sequence[int], products: _GroupedProducts
    ) -> Tensor:
        ctx.wanted, ctx.counts_E, ctx.products = gradients_wanted(x_RD, weight_EDF), counts_E, products
        x_RD, weight_EDF = x_RD.contiguous(), weight_EDF.contiguous()
        ctx.save_for_backward(x_RD, weight_EDF)
        return products.output(x_RD, weight_EDF, counts_E)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_RD, weight_EDF = ctx.saved_tensor()
        dy_RF, products = grad.contiguous(), ctx.products
        x_wanted, weight_wanted = ctx.wanted
        return (
            products.input_gradient(dy_RF, weight_EDF, ctx.counts_E) if x_wanted else None,
            products.weight_gradient(x_RD, dy_RF, ctx.counts_E) if weight_wanted else None,
        )


def grouped_linear(x_RD: Tensor, weight_EDF: Tensor, counts_E: Sequence[int], products: Products = PLAIN) -> Tensor:
    """Each row of x times the matrix of its expert: y_RF.

    Args:
        x_RD: rows sorted by expert; there may be none.
        weight_EDF: one matrix per expert.
        counts_E: how many rows each expert has, on the host.
        products: how each expert's three products are computed.
    """
    if len(counts_E) != len(weight_EDF) or sum(counts_E) != len(x_RD) or x_RD.shape[1] != weight_EDF.shape[1]:
        raise ValueError(f"{list(counts_E)} rows of {x_RD.shape} do not fit weights {weight_EDF.shape}")
    if products is not PLAIN:
        grouped = _one_by_one(products)
    else:  # the form for a GPU has not been run on one; on a CPU it is tested
        grouped = _BATCHED if on_gpu(x_RD) else _PLAIN
    return _GroupedLinear.apply(x_RD, weight_EDF, counts_E, grouped)
