"""Virtual head attention (VHA), arXiv 2610.17959.

P physical query heads become N = P * K virtual ones, P for each of the K key/value heads:

    q_i      = x W_Q[i]                      physical head i, 0 <= i < P
    q_(g,i)  = q_i W_premix[g]               Premix: head n = g * P + i reads KV head g
    y_n      = attention(RoPE(norm(q_n)), RoPE(norm(k_g)), v_g)
    y'       = M y,  M = I + B A^T           Postmix, on the head axis
    out      = flatten(y') W_O

Both maps are linear and stand next to a linear map, so after training they fold into W_Q and W_O (`fold.py`) and
what is left is grouped-query attention with N heads on K. QK-norm must come after Premix for that to hold.

Tensor parallel over t ranks, t dividing P: a rank owns P/t *physical* heads and all K virtual heads made of each.
Every group needs every physical head, so a split by KV group would have to hold W_Q whole on each rank.

    q_proj        columns by physical head
    k_proj v_proj whole (2 * K * H columns), gradient partial      premix, q_norm, k_norm   whole, partial
    postmix A, B  seen as [K, P, R], split on P: the gradients are local because z below is summed both ways
    o_proj        rows [N*H, D] seen as [K, P, H, D], split on P

The one communication VHA adds is z = A^T y: R * H values per token, summed in forward and in backward. In weight
space (`postmix_space`) Postmix acts on W_O instead: sum_n y'_n W_O[n] = sum_m y_m (W_O[m] + sum_r A[m,r] C[r]) with
C = B^T W_O, and what is summed is C: R * H * D values, however many tokens there are.
"""

from __future__ import annotations

import paddle
from paddle import nn

from vha_paddle.attention.base import RotaryTables, attend, norm_and_rotate
from vha_paddle.config import VirtualHeadAttention
from vha_paddle.ops.linear import linear
from vha_paddle.parallel.init import Constant, IdentityPlusNoise, Normal
from vha_paddle.parallel.placement import Placement
from vha_paddle.parallel.recompute import recomputed
from vha_paddle.parallel.scope import RMSNorm, Scope


class SelfAttentionVHA(nn.Layer):
    """Virtual head attention of the Qwen3 architecture, `[B, S, D]` to `[B, S, D]`.

    Args:
        hidden_size: D.
        config: head counts, Postmix rank and how the maps start.
        rms_norm_eps: epsilon of the QK-norms.
        initializer_range: standard deviation of the four projections.
        scope: where the layer stands in a model of this package. Left out, the layer is built for one process with
            a seed from Paddle's generator, ready for a decoder of your own.

    Source: arXiv 2610.17959; the tensor-parallel split is ours.
    """

    def __init__(
        self,
        hidden_size: int,
        config: VirtualHeadAttention,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        scope: Scope | None = None,
    ) -> None:
        super().__init__()
        scope = scope or Scope.standalone("self_attn")
        init = Normal(initializer_range)
        P, K, H, R = config.num_physical_heads, config.num_key_value_heads, config.head_dim, config.postmix_rank
        N = config.num_attention_heads
        self.mesh, self.head_dim, self.postmix_space = scope.mesh, H, config.postmix_space
        self.recompute = scope.recompute == "selective"

        self.q_proj = scope.child("q_proj").column_linear(hidden_size, P * H, init)
        self.k_proj = scope.child("k_proj").replicated_linear(hidden_size, K * H, init)
        self.v_proj = scope.child("v_proj").replicated_linear(hidden_size, K * H, init)
        self.q_norm = RMSNorm(scope.child("q_norm"), H, rms_norm_eps, inside_tensor_region=True)
        self.k_norm = RMSNorm(scope.child("k_norm"), H, rms_norm_eps, inside_tensor_region=True)
        self.o_proj = scope.child("o_proj").row_linear(N * H, hidden_size, init, view=(K, P, H, hidden_size), axis=1)

        self.premix = scope.parameter(
            self, "premix", Placement.replicated((K, H, H), partial_gradient=True), _premix_init(config), "premix"
        )
        by_physical_head = Placement.split((N, R), axis=1, view=(K, P, R))
        self.postmix_a = scope.parameter(
            self, "postmix_a", by_physical_head, Normal(config.postmix_init_std), "postmix"
        )
        self.postmix_b = scope.parameter(self, "postmix_b", by_physical_head, Constant(0.0), "postmix")

    def forward(self, x_BSD: paddle.Tensor, rope: RotaryTables) -> paddle.Tensor:
        """Attend causally; `rope` holds the rotary tables, shared by all layers."""
        x_BSD = self.mesh.enter_tensor_region(x_BSD)
        batch, sequence, _ = x_BSD.shape
        q_BSPH = self.q_proj(x_BSD).reshape([batch, sequence, -1, self.head_dim])
        k_BSKH = self.k_proj(x_BSD).reshape([batch, sequence, -1, self.head_dim])
        v_BSKH = self.v_proj(x_BSD).reshape([batch, sequence, -1, self.head_dim])

        def core(q_BSPH: paddle.Tensor, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor) -> paddle.Tensor:
            q_BSNH = norm_and_rotate(self._premix(q_BSPH), self.q_norm, rope)
            k_BSKH = norm_and_rotate(k_BSKH, self.k_norm, rope)
            y_BSNH = attend(q_BSNH, k_BSKH, v_BSKH, self.mesh)
            return self._postmix(y_BSNH) if self.postmix_space == "activation" else y_BSNH

        y_BSNH = recomputed(core, q_BSPH, k_BSKH, v_BSKH) if self.recompute else core(q_BSPH, k_BSKH, v_BSKH)
        y_BSE = y_BSNH.reshape([batch, sequence, -1])
        if self.postmix_space == "activation":
            return self.o_proj(y_BSE)
        return self.mesh.leave_tensor_region(linear(y_BSE, self._mixed_output_weight()))

    def _premix(self, q_BSPH: paddle.Tensor) -> paddle.Tensor:
        """Every physical head through every group's matrix, in group-major order."""
        batch, sequence, num_physical, head_dim = q_BSPH.shape
        rows = q_BSPH.reshape([1, batch * sequence * num_physical, head_dim])
        # one product per group; swapping whole tokens' rows of P*H is much cheaper on CPU than swapping heads
        q_KTX = paddle.matmul(rows, self.premix).reshape([-1, batch * sequence, num_physical * head_dim])
        return q_KTX.transpose([1, 0, 2]).reshape([batch, sequence, -1, head_dim])

    def _postmix(self, y_BSNH: paddle.Tensor) -> paddle.Tensor:
        """y + B (A^T y) on the head axis; A^T y is summed over the tensor ranks' heads."""
        z_BSRH = self.mesh.sum_over_tensor(paddle.matmul(self.postmix_a, y_BSNH, transpose_x=True))
        return y_BSNH + paddle.matmul(self.postmix_b, z_BSRH)

    def _mixed_output_weight(self) -> paddle.Tensor:
        """W_O + A (B^T W_O) on the head axis, for this rank's heads; B^T W_O is summed over the tensor ranks'."""
        by_head = self.o_proj.weight.reshape([self.postmix_a.shape[0], -1])
        c_RX = self.mesh.sum_over_tensor(paddle.matmul(self.postmix_b, by_head, transpose_x=True))
        return (by_head + paddle.matmul(self.postmix_a, c_RX)).reshape(self.o_proj.weight.shape)


def _premix_init(config: VirtualHeadAttention) -> IdentityPlusNoise:
    if config.premix_init == "scaled":
        return IdentityPlusNoise.scaled(config.premix_init_noise, config.head_dim)
    return IdentityPlusNoise(config.premix_init_noise)
