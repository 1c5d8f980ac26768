"""Grouped-query attention of Qwen3, and of Llama and Qwen2. K = N is multi-head, K = 1 multi-query attention."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from vha_paddle.attention.base import RotaryTables, attend, check_config, norm_and_rotate, qk_norm
from vha_paddle.config import GroupedAttention
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.recompute import recomputed
from vha_paddle.parallel.scope import Scope


class SelfAttentionGrouped(nn.Layer):
    """q, k, v projections, QK-norm, RoPE, causal attention, output projection.

    With `config.output_gate`, sigmoid(x W_gate) multiplies each channel of the heads' outputs before the last of
    these. `config.qk_norm=False` leaves out the norm, `config.attention_bias` adds a bias to q, k, v and the output.
    `window` is the keys that a query sees, its own position included; None is all before it.

    Tensor parallel: query heads are split, and KV heads with them where the degree divides K. With fewer KV heads
    than ranks, every rank holds W_K and W_V whole and computes the one KV head its query heads read. The gate is
    split as the queries, and the biases of q, k and v as the columns of their weights; the output's is added after the
    ranks' sum.
    """

    def __init__(
        self,
        hidden_size: int,
        config: GroupedAttention,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        scope: Scope | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        check_config(config, GroupedAttention)
        scope = scope or Scope.standalone("self_attn")
        init = Normal(initializer_range)
        num_query, num_kv, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.mesh, self.head_dim, self.recompute = scope.mesh, head_dim, scope.recompute == "selective"
        self.window, self.output_gate, bias = window, config.output_gate, config.attention_bias
        self.q_proj = scope.child("q_proj").column_linear(hidden_size, num_query * head_dim, init, bias=bias)
        self.k_proj = scope.child("k_proj").key_value_linear(hidden_size, num_kv, head_dim, init, bias)
        self.v_proj = scope.child("v_proj").key_value_linear(hidden_size, num_kv, head_dim, init, bias)
        self.q_norm = qk_norm(scope.child("q_norm"), config, rms_norm_eps)
        self.k_norm = qk_norm(scope.child("k_norm"), config, rms_norm_eps)
        if config.output_gate:
            self.g_proj = scope.child("g_proj").column_linear(hidden_size, num_query * head_dim, init)
        self.o_proj = scope.child("o_proj").row_linear(num_query * head_dim, hidden_size, init, bias=bias)

    def forward(self, x_BSD: paddle.Tensor, rope: RotaryTables, starts_BS: np.ndarray | None = None) -> paddle.Tensor:
        x_BSD = self.mesh.enter_tensor_region(x_BSD)
        batch, sequence, _ = x_BSD.shape
        q_BSNH = self.q_proj(x_BSD).reshape([batch, sequence, -1, self.head_dim])
        k_BSKH = self.k_proj(x_BSD).reshape([batch, sequence, -1, self.head_dim])
        v_BSKH = self.v_proj(x_BSD).reshape([batch, sequence, -1, self.head_dim])

        def core(q_BSNH: paddle.Tensor, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor) -> paddle.Tensor:
            q_BSNH = norm_and_rotate(q_BSNH, self.q_norm, rope)
            k_BSKH = norm_and_rotate(k_BSKH, self.k_norm, rope)
            return attend(q_BSNH, k_BSKH, v_BSKH, self.mesh, self.window, starts_BS)

        y_BSNH = recomputed(core, q_BSNH, k_BSKH, v_BSKH) if self.recompute else core(q_BSNH, k_BSKH, v_BSKH)
        y_BSE = y_BSNH.reshape([batch, sequence, -1])
        if self.output_gate:
            y_BSE = y_BSE * F.sigmoid(self.g_proj(x_BSD))
        return self.o_proj(y_BSE)
