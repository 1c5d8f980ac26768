"""What every attention kind is to the decoder: a layer from `[B, S, D]` to `[B, S, D]`, causal in S.

Shapes, here and in each kind: B batch, S sequence, D hidden, N query heads (virtual ones under VHA), P physical
heads, K key/value heads, H head dim, R Postmix rank. Names carry logical sizes; under tensor parallelism a rank
sees its share of P or N.
"""

from __future__ import annotations

from typing import Protocol

import paddle

from vha_paddle.ops.rope import apply_rope, rope_tables
from vha_paddle.parallel.scope import RMSNorm


class Attention(Protocol):
    """The contract: input `[B, S, D]` outside the tensor region, the same on every tensor rank; so is the output."""

    def __call__(self, x_BSD: paddle.Tensor, rope: RotaryTables) -> paddle.Tensor: ...


class RotaryTables:
    """cos and sin of the rotary positions, `[S, H]` each, made once and grown when a longer sequence comes."""

    def __init__(self, head_dim: int, theta: float, dtype: str) -> None:
        self.head_dim, self.theta, self.dtype = head_dim, theta, dtype
        self._tables: tuple[paddle.Tensor, paddle.Tensor] | None = None

    def at(self, sequence_length: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """The tables of positions 0 .. sequence_length - 1."""
        if self._tables is None or self._tables[0].shape[0] < sequence_length:
            self._tables = rope_tables(self.head_dim, self.theta, sequence_length, self.dtype)
        cos, sin = self._tables
        return cos[:sequence_length], sin[:sequence_length]


def norm_and_rotate(x_BSXH: paddle.Tensor, norm: RMSNorm, rope: RotaryTables) -> paddle.Tensor:
    """QK-norm of each head, then RoPE: what Qwen3 does to queries and keys before the attention core."""
    cos_SH, sin_SH = rope.at(x_BSXH.shape[1])
    return apply_rope(norm(x_BSXH), cos_SH, sin_SH)
