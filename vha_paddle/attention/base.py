"""What every attention kind is to the decoder: a layer from `[B, S, D]` to `[B, S, D]`, causal in S.

Shapes, here and in each kind: B batch, S sequence, D hidden, N query heads (virtual ones under VHA), P physical
heads, K key/value heads, H head dim, R Postmix rank. Names carry logical sizes; under tensor parallelism a rank
sees its share of P or N.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import paddle
from paddle import nn

from vha_paddle.config import Attention as AttentionConfig
from vha_paddle.config import GroupedAttention, VirtualHeadAttention
from vha_paddle.config.check_model import check_attention
from vha_paddle.ops.attention import causal_attention
from vha_paddle.ops.rope import apply_rope, rope_tables
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.scope import RMSNorm, Scope


class Attention(Protocol):
    """The contract: input `[B, S, D]` outside the tensor region, the same on every tensor rank; so is the output.

    `starts_BS` are the starts of documents at the positions that this rank's queries have (`causal_attention`'s); None
    is no mask of documents.
    """

    def __call__(
        self, x_BSD: paddle.Tensor, rope: RotaryTables, starts_BS: np.ndarray | None = None
    ) -> paddle.Tensor: ...


def check_config(config: Any, expected: type[AttentionConfig]) -> None:
    """What every kind asks of its config before it builds anything: the rules that a recipe is held to.

    Raises:
        TypeError: it is of another class.
        UserError: it breaks a rule.
    """
    if not isinstance(config, expected):
        raise TypeError(f"config: must be a vha_paddle.{expected.__name__}, not {type(config).__name__}")
    check_attention(config, where="config")


class RotaryTables:
    """cos and sin of the rotary positions, `[S, H]` each, made once and grown when a longer sequence comes.

    `head_dim` is the channels H that RoPE turns: the config's `rope_dim`, which is less than a head under MLA and GVA.
    """

    def __init__(self, head_dim: int, theta: float, dtype: str, mesh: Mesh | None = None) -> None:
        self.head_dim, self.theta, self.dtype, self.mesh = head_dim, theta, dtype, mesh or Mesh()
        self._tables: list[paddle.Tensor] | None = None

    def at(self, share: int, width: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """The tables of the `share` positions that this rank holds: 0 .. share - 1 without context parallelism.

        Raises:
            ValueError: they are not `width` channels wide.
        """
        if width != self.head_dim:
            raise ValueError(
                f"RotaryTables(head_dim={self.head_dim}): must be the config's rope_dim; use head_dim={width}"
            )
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


def qk_norm(scope: Scope, config: GroupedAttention | VirtualHeadAttention, eps: float) -> nn.Layer:
    """The norm of each query or key head, or with `qk_norm=false` the identity."""
    return RMSNorm(scope, config.head_dim, eps, inside_tensor_region=True) if config.qk_norm else nn.Identity()


def norm_and_rotate(x_BSXH: paddle.Tensor, norm: nn.Layer, rope: RotaryTables) -> paddle.Tensor:
    """QK-norm of each head, then RoPE: what Qwen3 does to queries and keys before the attention core."""
    cos_SH, sin_SH = rope.at(x_BSXH.shape[1], x_BSXH.shape[3])
    return apply_rope(norm(x_BSXH), cos_SH, sin_SH)


def map_heads(x_BSNX: paddle.Tensor, map_NXY: paddle.Tensor, transpose: bool = False) -> paddle.Tensor:
    """Each head through a matrix of its own, or its transpose: `[B, S, N, Y]`."""
    batch, sequence, heads, width = x_BSNX.shape
    x_NTX = x_BSNX.transpose([2, 0, 1, 3]).reshape([heads, batch * sequence, width])
    y_NTY = paddle.matmul(x_NTX, map_NXY, transpose_y=transpose)
    return y_NTY.reshape([heads, batch, sequence, -1]).transpose([1, 2, 0, 3])


def from_every_position(mesh: Mesh, *tensors: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
    """Tensors `[B, S, ...]` of this rank's positions as `[B, T, ...]` of all, gathered in one communication.

    Under context parallelism this is what a decoder would cache of a token: with few KV heads, or a latent, far less
    than its queries.
    """
    if mesh.context_degree == 1:
        return tensors
    flat = [x.reshape([*x.shape[:2], 1, -1]) for x in tensors]
    together = mesh.gather_context(paddle.concat(flat, axis=3))
    parts = paddle.split(together, [x.shape[3] for x in flat], axis=3)
    return tuple(part.reshape([*part.shape[:2], *x.shape[2:]]) for part, x in zip(parts, tensors, strict=True))


def attend(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKV: paddle.Tensor,
    mesh: Mesh,
    window: int | None = None,
    starts_BS: np.ndarray | None = None,
) -> paddle.Tensor:
    """Causal attention of the queries at this rank's positions over the keys and values of all: y_BSNV.

    `window` and `starts_BS` are `causal_attention`'s. Under context parallelism the keys and values are gathered, one
    communication where a ring takes one per rank.
    """
    k_BTKH, v_BTKV = from_every_position(mesh, k_BSKH, v_BSKV)
    return attend_to_all(q_BSNH, k_BTKH, v_BTKV, mesh, window, starts_BS)


def attend_to_all(
    q_BSNH: paddle.Tensor,
    k_BTKH: paddle.Tensor,
    v_BTKV: paddle.Tensor,
    mesh: Mesh,
    window: int | None = None,
    starts_BS: np.ndarray | None = None,
) -> paddle.Tensor:
    """`attend` where the keys and values of every position are at hand."""
    pieces = mesh.pieces(q_BSNH.shape[1]) if mesh.context_degree > 1 else None
    return causal_attention(q_BSNH, k_BTKH, v_BTKV, pieces, window=window, starts_BS=starts_BS)
