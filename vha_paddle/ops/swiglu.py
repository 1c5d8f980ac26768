"""SwiGLU's elementwise part, one operation with its own backward.

s = sigmoid(g)      y = g s u      du = dy g s      dg = dy u (s + g s (1 - s))
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


def _one_over_sigmoid(g: np.ndarray) -> np.ndarray:
    """1 + exp(-g). For very negative g it overflows to infinity, and what is divided by it to the right 0."""
    t = np.negative(g)
    with np.errstate(over="ignore"):
        np.exp(t, out=t)
    t += 1
    return t


class _Swiglu(PyLayer):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.wanted = gradients_wanted(gate, up)
        gate, up = gate.contiguous(), up.contiguous()
        out = paddle.empty_like(gate)
        g_RF, u_RF, y_RF = _rows(gate), _rows(up), _rows(out)

        def work(start: int, stop: int) -> None:
            for rows in row_blocks(start, stop, g_RF[0]):
                y = y_RF[rows]
                np.divide(g_RF[rows], _one_over_sigmoid(g_RF[rows]), out=y)
                y *= u_RF[rows]

        for_each_share(len(g_RF), work)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensor()
        grad_gate, grad_up = paddle.empty_like(gate), paddle.empty_like(up)
        g_RF, u_RF, dy_RF, dg_RF, du_RF = map(_rows, (gate, up, grad.contiguous(), grad_gate, grad_up))

        def work(start: int, stop: int) -> None:
            for rows in row_blocks(start, stop, g_RF[0]):
                dy, dg, du = dy_RF[rows], dg_RF[rows], du_RF[rows]
                s = _one_over_sigmoid(g_RF[rows])
                np.reciprocal(s, out=s)
                silu = g_RF[rows] * s
                np.multiply(dy, silu, out=du)
                np.subtract(1, s, out=dg)
                dg *= silu
                dg += s
                dg *= dy
                dg *= u_RF[rows]

        for_each_share(len(g_RF), work)
        return only_wanted(ctx.wanted, grad_gate, grad_up)


def _rows(x: Tensor) -> np.ndarray:
    return host_view(x).reshape(-1, x.shape[-1])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, elementwise; both [..., F]."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {gate.shape} and up {up.shape} differ in shape")
    if on_gpu(gate):  # not run on a GPU in this project's tests
        return paddle.nn.functional.swiglu(gate, up)
    return _Swiglu.apply(gate, up)
