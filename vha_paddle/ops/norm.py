"""RMSNorm over the last axis, one operation with its own backward.

    r = (mean_d x_d^2 + eps)^(-1/2)        y_d = x_d r w_d

With t_d = dy_d x_d r:   dw_d = sum over rows of t_d
                         dx_d = r dy_d w_d - x_d r^2 (sum_d t_d w_d) / D
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from vha_paddle.ops.backend import (
    for_each_share,
    gradients_wanted,
    host_view,
    on_gpu,
    only_wanted,
    row_blocks,
)


class _RMSNorm(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.wanted = gradients_wanted(x, weight)
        x, weight = x.contiguous(), weight.contiguous()
        width = x.shape[-1]
        out = paddle.empty_like(x)
        x_RD, y_RD, w_D = _rows(x), _rows(out), host_view(weight)
        r_R1 = np.empty((len(x_RD), 1), x_RD.dtype)

        def work(start: int, stop: int) -> None:
            for rows in row_blocks(start, stop, x_RD[0]):
                x, y, r = x_RD[rows], y_RD[rows], r_R1[rows]
                np.einsum("rd,rd->r", x, x, out=r[:, 0])
                r /= width
                r += eps
                np.sqrt(r, out=r)
                np.reciprocal(r, out=r)
                np.multiply(x, r, out=y)
                y *= w_D

        for_each_share(len(x_RD), work)
        ctx.save_for_backward(x, weight)
        ctx.r_R1 = r_R1
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensor()
        width = x.shape[-1]
        grad_x = paddle.empty_like(x)
        x_RD, dy_RD, dx_RD = _rows(x), _rows(grad.contiguous()), _rows(grad_x)
        w_D, r_R1 = host_view(weight), ctx.r_R1
        partial_dw: dict[int, np.ndarray] = {}

        def work(start: int, stop: int) -> None:
            dw_D = partial_dw[start] = np.zeros_like(w_D)
            for rows in row_blocks(start, stop, x_RD[0]):
                x, dy, dx, r = x_RD[rows], dy_RD[rows], dx_RD[rows], r_R1[rows]
                t = dy * x
                t *= r
                dw_D += t.sum(axis=0)
                along_x = np.einsum("rd,d->r", t, w_D)[:, None] * (r * r / width)
                np.multiply(dy, w_D, out=dx)
                dx *= r
                np.multiply(x, along_x, out=t)
                dx -= t

        for_each_share(len(x_RD), work)
        grad_weight = paddle.empty_like(weight)
        # In the order of the rows, so that a run with as many threads gives the same bits.
        host_view(grad_weight)[:] = sum(partial_dw[start] for start in sorted(partial_dw))
        return only_wanted(ctx.wanted, grad_x, grad_weight)


def _rows(x: Tensor) -> np.ndarray:
    return host_view(x).reshape(-1, x.shape[-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Args:
        x: [..., D]; the residual stream [B, S, D], or heads [B, S, N, H].
        weight: [D].
        eps: added to the mean square.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"weight of shape {weight.shape} does not fit the last axis of {x.shape}")
    if on_gpu(x):  # not run in this project's tests; the kernel accumulates in float32
        return paddle.nn.functional.rms_norm(x, weight.shape, weight.astype(x.dtype), eps)[0]
    return _RMSNorm.apply(x, weight, eps)
