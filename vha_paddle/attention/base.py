"""What every attention kind is to the decoder: a layer from `[B, S, D]` to `[B, S, D]`, causal in S.

Shapes, here and in each kind: B batch, S sequence, D hidden, N query heads (virtual ones under VHA), P physical
heads, K key/value heads, H head dim, R Postmix rank. Names carry logical sizes; under tensor parallelism a rank
sees its share of P or N.
"""

from __future__ import annotations

from typing import Protocol

import paddle

from vha_paddle.ops.attention import causal_attention
from vha_paddle.ops.rope import apply_rope, rope_tables
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.scope import RMSNorm


class Attention(Protocol):
    """The contract: input `[B, S, D]` outside the tensor region, the same on every tensor rank; so is the output."""

    def __call__(self, x_BSD: paddle.Tensor, rope: RotaryTables) -> paddle.Tensor: ...


class RotaryTables:
    """cos and sin of the rotary positions, `[S, H]` each, made once and grown when a longer sequence comes."""

    def __init__(self, head_dim: int, theta: float, dtype: str, mesh: Mesh | None = None) -> None:
        self.head_dim, self.theta, self.dtype, self.mesh = head_dim, theta, dtype, mesh or Mesh()
        self._tables: list[paddle.Tensor] | None = None

    def at(self, share: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """The tables of the `share` positions that this rank holds: 0 .. share - 1 without context parallelism."""
        if self.mesh.context_degree > 1:
            if self._tables is None or self._tables[0].shape[0] != share:
                tables = rope_tables(self.head_dim, self.theta, share * self.mesh.context_degree, self.dtype)
                self._tables = [
                    paddle.concat([table[start:stop] for start, stop in self.mesh.pieces(share)]) for table in tables
                ]
        elif self._tables is None or self._tables[0].shape[0] < share:
            self._tables = list(rope_tables(self.head_dim, self.theta, share, self.dtype))
        cos, sin = self._tables
        return cos[:share], sin[:share]


def norm_and_rotate(x_BSXH: paddle.Tensor, norm: RMSNorm, rope: RotaryTables) -> paddle.Tensor:
    """QK-norm of each head, then RoPE: what Qwen3 does to queries and keys before the attention core."""
    cos_SH, sin_SH = rope.at(x_BSXH.shape[1])
    return apply_rope(norm(x_BSXH), cos_SH, sin_SH)


def attend(q_BSNH: paddle.Tensor, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor, mesh: Mesh) -> paddle.Tensor:
    """Causal attention of the queries at this rank's positions over the keys and values of all: y_BSNH.

    Under context parallelism the keys and values are gathered: with few KV heads they are far smaller than the
    queries, and gathering is one communication where a ring takes one per rank.
    """
    if mesh.context_degree == 1:
        return causal_attention(q_BSNH, k_BSKH, v_BSKH)
    together = mesh.gather_context(paddle.concat([k_BSKH, v_BSKH], axis=2))
    k_BTKH, v_BTKH = (half.contiguous() for half in paddle.split(together, 2, axis=2))
    return causal_attention(q_BSNH, k_BTKH, v_BTKH, mesh.pieces(q_BSNH.shape[1]))
