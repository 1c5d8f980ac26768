"""Multi-head latent attention (MLA) of DeepSeek-V2, arXiv 2405.04434.

Keys and values of all N heads are made from one latent of width C, and position comes by a rotary part of its own:

    q_n      = [q_n^A ; RoPE(q_n^R)]                 from x W_Q, or rms_norm(x W_QA) W_QB     (A content, R rotary)
    c ; r    = x W_KVA,  c = rms_norm(c)             C + R values per token: the cache
    k_n      = [c W_UK[n] ; RoPE(r)]                 the rotary key is one for all heads
    v_n      = c W_UV[n]                             W_UK[n] and W_UV[n] lie side by side in kv_b_proj
    y_n      = attention(q_n, k_n, v_n), scaled by 1 / sqrt(A + R)
    out      = flatten(y) W_O

Names and layouts are Hugging Face's (DeepseekV2, DeepseekV3). RoPE turns channel j with channel j + R/2, as in all of
this package; DeepSeek's checkpoints interleave, channel 2j with 2j + 1, so their rotary columns have another order.

Training expands keys and values, N heads of widths A + R and V. A decoder step need not: `absorbed_attention` moves
W_UK to the query and W_UV behind the attention, which then runs over the cache as it is, one head of width C + R.

Tensor parallel: q_b_proj (or q_proj), kv_b_proj and o_proj are split by head; the down-projections and the norms of
the latents are whole on every rank, their gradients partial, so each rank has the whole latent. Context parallel
gathers the latent and the rotary key, the cache's C + R values per token, and expands them on each rank.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from vha_paddle.attention.base import RotaryTables, attend_to_all, check_config, from_every_position, map_heads
from vha_paddle.config import LatentAttention
from vha_paddle.ops.attention import causal_attention
from vha_paddle.ops.rope import apply_rope
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.recompute import recomputed
from vha_paddle.parallel.scope import RMSNorm, Scope


class SelfAttentionMLA(nn.Layer):
    """Multi-head latent attention, `[B, S, D]` to `[B, S, D]`. Source: arXiv 2405.04434, Section 2.1."""

    def __init__(
        self,
        hidden_size: int,
        config: LatentAttention,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        scope: Scope | None = None,
    ) -> None:
        super().__init__()
        check_config(config, LatentAttention)
        scope = scope or Scope.standalone("self_attn")
        init = Normal(initializer_range)
        N, C, Q = config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
        self.mesh, self.recompute = scope.mesh, scope.recompute == "selective"
        self.widths = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        self.latent_widths = [C, config.qk_rope_head_dim]
        self.expanded_widths = [config.qk_nope_head_dim, config.v_head_dim]
        self.has_query_latent = Q is not None
        if Q is None:
            self.q_proj = scope.child("q_proj").column_linear(hidden_size, N * sum(self.widths), init)
        else:
            self.q_a_proj = scope.child("q_a_proj").replicated_linear(hidden_size, Q, init)
            self.q_a_layernorm = RMSNorm(scope.child("q_a_layernorm"), Q, rms_norm_eps, inside_tensor_region=True)
            self.q_b_proj = scope.child("q_b_proj").column_linear(Q, N * sum(self.widths), init)
        down = scope.child("kv_a_proj_with_mqa")
        self.kv_a_proj_with_mqa = down.replicated_linear(hidden_size, sum(self.latent_widths), init)
        self.kv_a_layernorm = RMSNorm(scope.child("kv_a_layernorm"), C, rms_norm_eps, inside_tensor_region=True)
        self.kv_b_proj = scope.child("kv_b_proj").column_linear(C, N * sum(self.expanded_widths), init)
        self.o_proj = scope.child("o_proj").row_linear(N * config.v_head_dim, hidden_size, init)

    def forward(self, x_BSD: paddle.Tensor, rope: RotaryTables, starts_BS: np.ndarray | None = None) -> paddle.Tensor:
        x_BSD = self.mesh.enter_tensor_region(x_BSD)
        batch, sequence, _ = x_BSD.shape
        q_BSNE = self.queries(x_BSD)
        down_BSE = self.kv_a_proj_with_mqa(x_BSD)

        def core(q_BSNE: paddle.Tensor, down_BSE: paddle.Tensor) -> paddle.Tensor:
            tables = rope.at(sequence, self.widths[1])
            latent_BTC, k_rope_BTR = from_every_position(self.mesh, *self.cached(down_BSE, *tables))
            k_BTNE, v_BTNV = self._expanded(latent_BTC, k_rope_BTR)
            return attend_to_all(self.rotated(q_BSNE, *tables), k_BTNE, v_BTNV, self.mesh, None, starts_BS)

        y_BSNV = recomputed(core, q_BSNE, down_BSE) if self.recompute else core(q_BSNE, down_BSE)
        return self.o_proj(y_BSNV.reshape([batch, sequence, -1]))

    def queries(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        """This rank's heads, not yet rotated: `[B, S, N, A + R]`."""
        if self.has_query_latent:
            x_BSD = self.q_a_layernorm(self.q_a_proj(x_BSD))
        q_BSX = self.q_b_proj(x_BSD) if self.has_query_latent else self.q_proj(x_BSD)
        return q_BSX.reshape([*q_BSX.shape[:2], -1, sum(self.widths)])

    def rotated(self, q_BSNE: paddle.Tensor, cos_SR: paddle.Tensor, sin_SR: paddle.Tensor) -> paddle.Tensor:
        """Queries with their rotary part turned."""
        content_BSNA, rotary_BSNR = paddle.split(q_BSNE, self.widths, axis=-1)
        return paddle.concat([content_BSNA, apply_rope(rotary_BSNR, cos_SR, sin_SR)], axis=-1)

    def cached(
        self, down_BSE: paddle.Tensor, cos_SR: paddle.Tensor, sin_SR: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """What a decoder keeps of each token, from kv_a_proj_with_mqa: the normed latent and the rotated key."""
        latent_BSC, k_rope_BSR = paddle.split(down_BSE, self.latent_widths, axis=-1)
        return self.kv_a_layernorm(latent_BSC), apply_rope(k_rope_BSR.unsqueeze(2), cos_SR, sin_SR).squeeze(2)

    def _expanded(self, latent_BTC: paddle.Tensor, k_rope_BTR: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Keys and values of this rank's heads."""
        both_BTX = self.kv_b_proj(latent_BTC)
        both_BTNX = both_BTX.reshape([*both_BTX.shape[:2], -1, sum(self.expanded_widths)])
        content_BTNA, v_BTNV = paddle.split(both_BTNX, self.expanded_widths, axis=-1)
        k_rope_BTNR = k_rope_BTR.unsqueeze(2).expand([-1, -1, content_BTNA.shape[2], -1])
        return paddle.concat([content_BTNA, k_rope_BTNR], axis=-1), v_BTNV


def absorbed_attention(
    q_BSNE: paddle.Tensor,
    latent_BTC: paddle.Tensor,
    k_rope_BTR: paddle.Tensor,
    kv_b_weight: paddle.Tensor,
    pieces: list[tuple[int, int]] | None = None,
) -> paddle.Tensor:
    """MLA over its cache as it is: the attention's output y_BSNV, to go into W_O.

        score = q^A (c W_UK)^T + q^R r^T = (q^A W_UK^T) c^T + q^R r^T        y = sum p (c W_UV) = (sum p c) W_UV

    A decoder step reads C + R values of each token instead of making N keys and values of it; in training the scores
    of width C + R and values of width C would cost more than the expansion.

    Args:
        q_BSNE: queries `[B, S, N, A + R]`, the rotary part turned (`SelfAttentionMLA.rotated`).
        latent_BTC, k_rope_BTR: the cache of positions 0 to T - 1 (`SelfAttentionMLA.cached`).
        kv_b_weight: of kv_b_proj, `[C, N * (A + V)]`.
        pieces: (start, stop) positions of the queries; None is all of T.
    """
    heads, width = q_BSNE.shape[2:]
    content_BSNA, rotary_BSNR = paddle.split(q_BSNE, [width - k_rope_BTR.shape[-1], k_rope_BTR.shape[-1]], axis=-1)
    up_NCX = kv_b_weight.reshape([latent_BTC.shape[-1], heads, -1]).transpose([1, 0, 2])
    content_dim = content_BSNA.shape[-1]
    q_BSNC = map_heads(content_BSNA, up_NCX[:, :, :content_dim], transpose=True)
    y_BSNC = causal_attention(
        paddle.concat([q_BSNC, rotary_BSNR], axis=-1),
        paddle.concat([latent_BTC, k_rope_BTR], axis=-1).unsqueeze(2),
        latent_BTC.unsqueeze(2),
        pieces,
        scale=width**-0.5,
    )
    return map_heads(y_BSNC, up_NCX[:, :, content_dim:])
