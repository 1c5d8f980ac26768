"""Multi-matrix factorization attention (MFA), arXiv 2412.19255, in the form of Step3 (arXiv 2507.19427).

Many wide query heads from one shared latent, and a single key and value head:

    q_n  = RoPE(rms_norm(x W_QA) W_QB[n])        N heads of width C
    k, v = RoPE(x W_K), x W_V                    one head: 2 C values per token, the cache
    y_n  = attention(q_n, k, v),  out = flatten(y) W_O

The paper's form is the factorisation without a norm, W_Q[n] = W_QA W_QB[n]; Step3 puts an RMSNorm on the latent, and
so does this. Neither norms queries or keys.

Tensor parallel: q_b_proj and o_proj are split by head; q_a_proj, its norm, k_proj and v_proj are whole on every
rank, their gradients partial.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from vha_paddle.attention.base import RotaryTables, attend, check_config
from vha_paddle.config import FactorizedAttention
from vha_paddle.ops.rope import apply_rope
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.recompute import recomputed
from vha_paddle.parallel.scope import RMSNorm, Scope


class SelfAttentionMFA(nn.Layer):
    """Multi-matrix factorization attention, `[B, S, D]` to `[B, S, D]`. Source: arXiv 2507.19427."""

    def __init__(
        self,
        hidden_size: int,
        config: FactorizedAttention,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        scope: Scope | None = None,
    ) -> None:
        super().__init__()
        check_config(config, FactorizedAttention)
        scope = scope or Scope.standalone("self_attn")
        init = Normal(initializer_range)
        N, C, Q = config.num_attention_heads, config.head_dim, config.q_lora_rank
        self.mesh, self.head_dim, self.recompute = scope.mesh, C, scope.recompute == "selective"
        self.q_a_proj = scope.child("q_a_proj").replicated_linear(hidden_size, Q, init)
        self.q_a_layernorm = RMSNorm(scope.child("q_a_layernorm"), Q, rms_norm_eps, inside_tensor_region=True)
        self.q_b_proj = scope.child("q_b_proj").column_linear(Q, N * C, init)
        self.k_proj = scope.child("k_proj").replicated_linear(hidden_size, C, init)
        self.v_proj = scope.child("v_proj").replicated_linear(hidden_size, C, init)
        self.o_proj = scope.child("o_proj").row_linear(N * C, hidden_size, init)

    def forward(self, x_BSD: paddle.Tensor, rope: RotaryTables, starts_BS: np.ndarray | None = None) -> paddle.Tensor:
        x_BSD = self.mesh.enter_tensor_region(x_BSD)
        batch, sequence, _ = x_BSD.shape
        q_BSNC = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD))).reshape([batch, sequence, -1, self.head_dim])
        k_BS1C, v_BS1C = self.k_proj(x_BSD).unsqueeze(2), self.v_proj(x_BSD).unsqueeze(2)

        def core(q_BSNC: paddle.Tensor, k_BS1C: paddle.Tensor, v_BS1C: paddle.Tensor) -> paddle.Tensor:
            cos_SC, sin_SC = rope.at(sequence, self.head_dim)
            q_BSNC, k_BS1C = (apply_rope(x, cos_SC, sin_SC) for x in (q_BSNC, k_BS1C))
            return attend(q_BSNC, k_BS1C, v_BS1C, self.mesh, None, starts_BS)

        y_BSNC = recomputed(core, q_BSNC, k_BS1C, v_BS1C) if self.recompute else core(q_BSNC, k_BS1C, v_BS1C)
        return self.o_proj(y_BSNC.reshape([batch, sequence, -1]))
