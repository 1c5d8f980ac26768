"""Grouped value attention (GVA), arXiv 2609.13285: the cache holds values, and keys are made of them.

    q_n      = [q_n^H ; RoPE(q_n^R)]             N heads from x W_Q: content of width H, rotary of width R
    v_g      = x W_V                             K heads of width H
    r        = RoPE(x W_R)                       one rotary key for all heads: K H + R values per token are the cache
    k_n      = [v_g M_n ; r],  g = n // (N / K)  M = key_map, [N, H, H]
    y_n      = attention(q_n, k_n, v_g), scaled by 1 / sqrt(H + R)
    out      = flatten(y) W_O

No content key is ever made. Between q_n and v_g there are linear maps only, so the map moves to the query,

    q_n^H (v_g M_n)^T = (q_n^H M_n^T) v_g^T,

and attention runs with K key heads [v_g ; r] instead of N, in training as in decoding. That is why there is no
QK-norm: a norm of the key would stand between M_n and the scores and would have to see each key written out.

Tensor parallel: query heads are split, and key_map with them; value heads too where the degree divides K. With fewer
value heads than ranks, every rank holds W_V whole and computes the one head its query heads read, as in `grouped.py`.
W_R is whole on every rank, its gradient partial. Context parallel gathers the cache.

Written from the paper's abstract, which fixes what is cached, the linear map and its absorption, and the shared rotary
key. One map per query head, the scale and the absence of norms are assumed.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from vha_paddle.attention.base import RotaryTables, attend_to_all, check_config, from_every_position, map_heads
from vha_paddle.config import GroupedValueAttention
from vha_paddle.ops.rope import apply_rope
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.placement import Placement
from vha_paddle.parallel.recompute import recomputed
from vha_paddle.parallel.scope import Scope


class SelfAttentionGVA(nn.Layer):
    """Grouped value attention, `[B, S, D]` to `[B, S, D]`. Source: arXiv 2609.13285, and see the module."""

    def __init__(
        self,
        hidden_size: int,
        config: GroupedValueAttention,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        scope: Scope | None = None,
    ) -> None:
        del rms_norm_eps  # every kind is built alike; this one has no norm
        super().__init__()
        check_config(config, GroupedValueAttention)
        scope = scope or Scope.standalone("self_attn")
        init = Normal(initializer_range)
        N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.mesh, self.head_dim, self.recompute = scope.mesh, H, scope.recompute == "selective"
        self.widths = [H, config.qk_rope_head_dim]
        # content keys start at the scale of the values
        self.key_map = scope.parameter(self, "key_map", Placement.split((N, H, H), axis=0), Normal(H**-0.5), "matrix")
        self.q_proj = scope.child("q_proj").column_linear(hidden_size, N * sum(self.widths), init)
        self.v_proj = scope.child("v_proj").key_value_linear(hidden_size, K, H, init)
        self.k_rope_proj = scope.child("k_rope_proj").replicated_linear(hidden_size, config.qk_rope_head_dim, init)
        self.o_proj = scope.child("o_proj").row_linear(N * H, hidden_size, init)

    def forward(self, x_BSD: paddle.Tensor, rope: RotaryTables, starts_BS: np.ndarray | None = None) -> paddle.Tensor:
        x_BSD = self.mesh.enter_tensor_region(x_BSD)
        batch, sequence, _ = x_BSD.shape
        q_BSNE = self.q_proj(x_BSD).reshape([batch, sequence, -1, sum(self.widths)])
        v_BSKH = self.v_proj(x_BSD).reshape([batch, sequence, -1, self.head_dim])
        k_rope_BS1R = self.k_rope_proj(x_BSD).unsqueeze(2)

        def core(q_BSNE: paddle.Tensor, v_BSKH: paddle.Tensor, k_rope_BS1R: paddle.Tensor) -> paddle.Tensor:
            cos_SR, sin_SR = rope.at(sequence, self.widths[1])
            content_BSNH, rotary_BSNR = paddle.split(q_BSNE, self.widths, axis=-1)
            absorbed_BSNH = map_heads(content_BSNH, self.key_map, transpose=True)
            q_BSNE = paddle.concat([absorbed_BSNH, apply_rope(rotary_BSNR, cos_SR, sin_SR)], axis=-1)
            v_BTKH, k_rope_BT1R = from_every_position(self.mesh, v_BSKH, apply_rope(k_rope_BS1R, cos_SR, sin_SR))
            k_rope_BTKR = k_rope_BT1R.expand([-1, -1, v_BTKH.shape[2], -1])
            return attend_to_all(
                q_BSNE, paddle.concat([v_BTKH, k_rope_BTKR], axis=-1), v_BTKH, self.mesh, None, starts_BS
            )

        inputs = (q_BSNE, v_BSKH, k_rope_BS1R)
        y_BSNH = recomputed(core, *inputs) if self.recompute else core(*inputs)
        return self.o_proj(y_BSNH.reshape([batch, sequence, -1]))
