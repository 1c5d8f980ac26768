"""Rotary position embedding, in Hugging Face's half-split convention.

Channel c of the first half and channel c + H/2 of the second are the two coordinates of one plane, turned at
position s by the angle s * theta^(-2c/H). A turn is orthogonal, so its backward is the turn by minus the angle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from vha_paddle.ops.backend import for_each_share, host_view, on_gpu, row_blocks


def rope_tables(head_dim: int, theta: float, num_positions: int, dtype: str) -> tuple[Tensor, Tensor]:
    """cos_SH and sin_SH for positions 0 to num_positions - 1, both halves of H alike.

    Computed in float64 and rounded once: float32 angles are wrong by 1e-4 at position 10^4 already.
    """
    frequency_h = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle_Sh = np.arange(num_positions, dtype=np.float64)[:, None] * frequency_h
    angle_SH = np.concatenate([angle_Sh, angle_Sh], axis=-1)
    cos_SH, sin_SH = (paddle.to_tensor(f(angle_SH), dtype="float64").astype(dtype) for f in (np.cos, np.sin))
    return cos_SH, sin_SH


def _rotate(x: Tensor, cos_SH: Tensor, sin_SH: Tensor, sign: int) -> Tensor:
    """Turn `x` [B, S, N, H] by `sign` times the tables' angles."""
    x, cos_SH, sin_SH = x.contiguous(), cos_SH.contiguous(), sin_SH.contiguous()
    B, S, N, H = x.shape
    half = H // 2
    out = paddle.empty_like(x)
    x_RNH, y_RNH = (host_view(t).reshape(B * S, N, H) for t in (x, out))
    cos_S1H, sin_S1h = host_view(cos_SH)[:, None], host_view(sin_SH)[:, None, :half]

    def work(start: int, stop: int) -> None:
        for rows in row_blocks(start, stop, x_RNH[0]):
            positions = np.arange(rows.start, rows.stop) % S
            cos, sin = cos_S1H[positions], sin_S1h[positions] * sign
            x, y = x_RNH[rows], y_RNH[rows]
            np.multiply(x, cos, out=y)
            t = x[..., half:] * sin
            y[..., :half] -= t
            np.multiply(x[..., :half], sin, out=t)
            y[..., half:] += t

    for_each_share(B * S, work)
    return out


class _Rope(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SH, sin_SH)
        return _rotate(x, cos_SH, sin_SH, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos_SH, sin_SH = ctx.saved_tensor()
        return _rotate(grad, cos_SH, sin_SH, -1), None, None


def _rotate_with_paddle(x: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """The same in Paddle's operations."""
    cos_S1H, sin_S1H = cos_SH.unsqueeze(1), sin_SH.unsqueeze(1)
    first, second = x.chunk(2, axis=-1)
    return x * cos_S1H + paddle.concat([-second, first], axis=-1) * sin_S1H


def apply_rope(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Turn each head of position s by row s of the tables; the tables get no gradient.

    Args:
        x_BSNH: queries or keys; N is whatever count of heads they have.
        cos_SH, sin_SH: rows of `rope_tables` for these S positions, in the dtype of x.
    """
    S, H = x_BSNH.shape[1], x_BSNH.shape[3]
    if cos_SH.shape != [S, H] or sin_SH.shape != [S, H]:
        raise ValueError(f"tables of shapes {cos_SH.shape} and {sin_SH.shape} do not fit x of {x_BSNH.shape}")
    if on_gpu(x_BSNH):  # not run on a GPU in this project's tests
        return _rotate_with_paddle(x_BSNH, cos_SH, sin_SH)
    return _Rope.apply(x_BSNH, cos_SH, sin_SH)
