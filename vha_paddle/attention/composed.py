"""Dynamically composable multi-head attention (DCMHA) of DCFormer, arXiv 2405.08553.

Multi-head attention whose score matrices and weight matrices are mixed across the heads of a group, each pair of
query s and key t in its own way:

    A_n = q_n k_n^T / sqrt(H)                                 q, k after QK-norm and RoPE, as in Qwen3
    W   = softmax(mask(compose_pre(A))),  y = compose_post(W) v,  out = flatten(y) W_O

    compose(A)_n[s,t] = sum_m A_m[s,t] (Q[s] + K[t])[m,n]     over the M = N / G heads of a group
    Q[s] = I + C + sum_r a_r b_r^T + diag(d)                  of the query's token, C static
    K[t] =         sum_r a_r b_r^T + diag(d)                  of the key's

    a, b = split(gelu(x W_compose) F),  a normed over its heads,  d = tanh(x W_diagonal)

with C, and F and columns of W_compose and W_diagonal for the query and for the key, of their own before and after
softmax. This is the published code's function in full: the hidden layer of the factors is as wide as the factors
together, 2 R M, the norm of `a` has no gain, `b` has neither norm nor gate. The start is the published one too: C,
F and W_diagonal small enough that composition begins near the identity.

IT IS DENSE ATTENTION. Every score is needed for all heads of a group at once, which no flash attention kernel does,
so N x S x T scores are written out several times; `memory.recompute: selective` keeps none of them for backward.
It does not fold, and a decoder must keep the keys' K[t] beside keys and values.

Tensor parallel splits by group: heads, C, F and the columns of both projections with it. Context parallel gathers
the factors of K[t] along with the keys and values.
"""

from __future__ import annotations

import math

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from vha_paddle.attention.base import RotaryTables, check_config, from_every_position, norm_and_rotate
from vha_paddle.config import ComposedAttention
from vha_paddle.ops.attention_mask import seen_keys
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.placement import Placement
from vha_paddle.parallel.recompute import recomputed
from vha_paddle.parallel.scope import RMSNorm, Scope


class SelfAttentionDCMHA(nn.Layer):
    """Dynamically composable multi-head attention, `[B, S, D]` to `[B, S, D]`.

    Letters: G groups, M heads of a group, R compose_rank; U the four uses of a token's factors: as query and as key
    before softmax, as query and as key after it.

    Source: arXiv 2405.08553, Section 3, and github.com/Caiyun-AI/DCFormer for what the paper leaves open.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ComposedAttention,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        scope: Scope | None = None,
    ) -> None:
        super().__init__()
        check_config(config, ComposedAttention)
        scope = scope or Scope.standalone("self_attn")
        init = Normal(initializer_range)
        N, H, G, R = config.num_attention_heads, config.head_dim, config.num_groups, config.compose_rank
        M = N // G
        width = 2 * R * M  # of the factors of one use, and of their hidden layer
        self.mesh, self.head_dim, self.group_size, self.rank, self.eps = scope.mesh, H, M, R, rms_norm_eps
        self.recompute = scope.recompute == "selective"

        static = Placement.split((G, M, M), axis=0)
        self.pre_compose = scope.parameter(self, "pre_compose", static, Normal(0.1 * M**-0.5), "matrix")
        self.post_compose = scope.parameter(self, "post_compose", static, Normal(0.1 * M**-0.5), "matrix")
        small = Normal(0.02 / (M + R) * width**-0.5)
        factors = Placement.split((G, 4, width, width), axis=0)
        self.compose_factors = scope.parameter(self, "compose_factors", factors, small, "matrix")
        self.q_proj = scope.child("q_proj").column_linear(hidden_size, N * H, init)
        self.k_proj = scope.child("k_proj").column_linear(hidden_size, N * H, init)
        self.v_proj = scope.child("v_proj").column_linear(hidden_size, N * H, init)
        self.q_norm = RMSNorm(scope.child("q_norm"), H, rms_norm_eps, inside_tensor_region=True)
        self.k_norm = RMSNorm(scope.child("k_norm"), H, rms_norm_eps, inside_tensor_region=True)
        hidden_init = Normal(math.sqrt(2 / (hidden_size + width)))
        self.compose_proj = (
            scope.child("compose_proj").without_fp8().column_linear(hidden_size, G * 4 * width, hidden_init)
        )
        diagonal_init = Normal(0.005 * math.sqrt(2 / (hidden_size + M)))
        self.diagonal_proj = (
            scope.child("diagonal_proj").without_fp8().column_linear(hidden_size, G * 4 * M, diagonal_init)
        )
        self.o_proj = scope.child("o_proj").row_linear(N * H, hidden_size, init)

    def forward(self, x_BSD: paddle.Tensor, rope: RotaryTables, starts_BS: np.ndarray | None = None) -> paddle.Tensor:
        x_BSD = self.mesh.enter_tensor_region(x_BSD)
        batch, sequence, _ = x_BSD.shape
        by_head = [batch, sequence, -1, self.head_dim]
        inputs = [projection(x_BSD).reshape(by_head) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        inputs += [self.compose_proj(x_BSD), self.diagonal_proj(x_BSD)]

        def core(
            q_BSNH: paddle.Tensor,
            k_BSNH: paddle.Tensor,
            v_BSNH: paddle.Tensor,
            hidden_BSX: paddle.Tensor,
            diagonal_BSX: paddle.Tensor,
        ) -> paddle.Tensor:
            q_BSNH = norm_and_rotate(q_BSNH, self.q_norm, rope)
            k_BSNH = norm_and_rotate(k_BSNH, self.k_norm, rope)
            rows_BSGUXM = self._rows(hidden_BSX, diagonal_BSX)
            k_BTNH, v_BTNH, of_keys = from_every_position(self.mesh, k_BSNH, v_BSNH, rows_BSGUXM[:, :, :, 1::2])
            return self._attend(q_BSNH, k_BTNH, v_BTNH, rows_BSGUXM[:, :, :, 0::2], of_keys, starts_BS)

        y_BSX = recomputed(core, *inputs) if self.recompute else core(*inputs)
        return self.o_proj(y_BSX)

    def _rows(self, hidden_BSX: paddle.Tensor, diagonal_BSX: paddle.Tensor) -> paddle.Tensor:
        """What each token's matrices are made of, `[B, S, G, U, 2 R + 1, M]`: a's rows, b's rows, the diagonal."""
        batch, sequence, _ = hidden_BSX.shape
        groups, _, width, _ = self.compose_factors.shape
        hidden_GUTX = F.gelu(hidden_BSX).reshape([batch * sequence, groups, 4, width]).transpose([1, 2, 0, 3])
        factors_TGUX = paddle.matmul(hidden_GUTX, self.compose_factors).transpose([2, 0, 1, 3])
        factors = factors_TGUX.reshape([batch, sequence, groups, 4, 2 * self.rank, self.group_size])
        first, second = paddle.split(factors, 2, axis=4)
        first = first * paddle.rsqrt((first * first).mean(axis=-1, keepdim=True) + self.eps)
        diagonal = paddle.tanh(diagonal_BSX).reshape([batch, sequence, groups, 4, 1, self.group_size])
        return paddle.concat([first, second, diagonal], axis=4)

    def _attend(
        self,
        q_BSNH: paddle.Tensor,
        k_BTNH: paddle.Tensor,
        v_BTNH: paddle.Tensor,
        of_queries: paddle.Tensor,
        of_keys: paddle.Tensor,
        starts_BS: np.ndarray | None,
    ) -> paddle.Tensor:
        """Attention with both compositions, `[B, S, N * H]`; `of_queries` and `of_keys` are `_rows`, pre and post."""
        batch, sequence, _, head_dim = q_BSNH.shape
        num_keys = k_BTNH.shape[1]
        q_BGMSH, k_BGMTH, v_BGMTH = (
            x.reshape([batch, x.shape[1], -1, self.group_size, head_dim]).transpose([0, 2, 3, 1, 4])
            for x in (q_BSNH, k_BTNH, v_BTNH)
        )
        scores = paddle.matmul(q_BGMSH * head_dim**-0.5, k_BGMTH, transpose_y=True)
        scores = self._compose(scores, self.pre_compose, of_queries[:, :, :, 0], of_keys[:, :, :, 0])
        seen_B11ST = paddle.to_tensor(seen_keys(self.mesh.pieces(sequence), num_keys, None, starts_BS)[:, None, None])
        weights = F.softmax(paddle.where(seen_B11ST, scores, paddle.full([], -math.inf, scores.dtype)))
        weights = paddle.where(seen_B11ST, weights, paddle.zeros([], weights.dtype))  # Paddle's softmax leaves 1e-28
        weights = self._compose(weights, self.post_compose, of_queries[:, :, :, 1], of_keys[:, :, :, 1])
        y_BGMSH = paddle.matmul(weights, v_BGMTH)
        return y_BGMSH.transpose([0, 3, 1, 2, 4]).reshape([batch, sequence, -1])

    def _compose(
        self, scores_BGMST: paddle.Tensor, static_GMM: paddle.Tensor, query: paddle.Tensor, key: paddle.Tensor
    ) -> paddle.Tensor:
        """sum_m A_m[s,t] (Q[s] + K[t])[m,n]: a product for each query, over its keys, and one for each key."""
        identity = paddle.eye(self.group_size, dtype=static_GMM.dtype)
        query_BGSMM = (self._matrices(query) + static_GMM + identity).transpose([0, 2, 1, 3, 4])
        key_BGTMM = self._matrices(key).transpose([0, 2, 1, 3, 4])
        by_query = paddle.matmul(query_BGSMM, scores_BGMST.transpose([0, 1, 3, 2, 4]), transpose_x=True)
        by_key = paddle.matmul(key_BGTMM, scores_BGMST.transpose([0, 1, 4, 2, 3]), transpose_x=True)
        return by_query.transpose([0, 1, 3, 2, 4]) + by_key.transpose([0, 1, 3, 4, 2])

    def _matrices(self, rows_BSGXM: paddle.Tensor) -> paddle.Tensor:
        """sum_r a_r b_r^T + diag(d) of each token and group, `[B, S, G, M, M]`."""
        first, second, diagonal = paddle.split(rows_BSGXM, [self.rank, self.rank, 1], axis=3)
        identity = paddle.eye(self.group_size, dtype=diagonal.dtype)
        return paddle.matmul(first, second, transpose_x=True) + diagonal * identity
