"""Virtual head attention (VHA), arXiv 2610.17959.

P physical query heads become N = P * K virtual ones, P for each of the K key/value heads:

    q_i      = x W_Q[i]                      physical head i, 0 <= i < P
    q_(g,i)  = q_i W_premix[g]               Premix: head n = g * P + i reads KV head g
    y_n      = attention(RoPE(norm(q_n)), RoPE(norm(k_g)), v_g)
    y'       = M y,  M = I + B A^T           Postmix, on the head axis
    out      = flatten(y') W_O

Both maps are linear and stand next to a linear map, so after training they fold into W_Q and W_O (`fold.py`) and
what is left is grouped-query attention with N heads on K. QK-norm must come after Premix for that to hold.

Variants: without Premix W_Q makes all N heads, without Postmix y' = y; SiLU of the premixed query, or of Postmix's
z = A^T y; physical heads of another width, which Premix takes to H; a gate sigmoid(x W_gate) on each channel of y or
of y'; no QK-norm; a bias on q (of each physical head, so before Premix), k, v and out. What of them folds is in
docs/vha.md.

Tensor parallel over t ranks, t dividing P: a rank owns P/t *physical* heads and all K virtual heads made of each.
Every group needs every physical head, so a split by KV group would have to hold W_Q whole on each rank.

    q_proj        columns by physical head; without Premix as o_proj's rows
    k_proj v_proj whole (2 * K * H columns), gradient partial      premix, q_norm, k_norm   whole, partial
    postmix A, B  seen as [K, P, R], split on P: the gradients are local because z is summed both ways
    g_proj        columns [D, N*H] seen as [D, K, P, H], split on P
    o_proj        rows [N*H, D] seen as [K, P, H, D], split on P
    biases        of q, k and v as the columns of their weights; of out whole, added after the ranks' sum

The one communication VHA adds is z: R * H values per token, summed in forward and in backward, before any SiLU. In
weight space (`postmix_space`) Postmix acts on W_O instead: sum_n y'_n W_O[n] = sum_m y_m (W_O[m] + sum_r A[m,r] C[r])
with C = B^T W_O, and what is summed is C: R * H * D values, however many tokens there are.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from vha_paddle.attention.base import RotaryTables, attend, check_config, norm_and_rotate, qk_norm
from vha_paddle.config import VirtualHeadAttention
from vha_paddle.ops.linear import linear, with_bias
from vha_paddle.parallel.init import Constant, IdentityPlusNoise, Initializer, Normal, Orthogonal
from vha_paddle.parallel.placement import Placement
from vha_paddle.parallel.recompute import recomputed
from vha_paddle.parallel.scope import Scope


class SelfAttentionVHA(nn.Layer):
    """Virtual head attention of the Qwen3 architecture, `[B, S, D]` to `[B, S, D]`.

    Args:
        hidden_size: D.
        config: head counts, the maps and how they start, the gate.
        rms_norm_eps: epsilon of the QK-norms.
        initializer_range: standard deviation of the projections.
        scope: where the layer stands in a model of this package. Left out, the layer is built for one process with
            a seed from Paddle's generator, ready for a decoder of your own.
        window: keys that a query sees, its own position included; None is all before it.

    Source: arXiv 2610.17959; the tensor-parallel split is ours.
    """

    def __init__(
        self,
        hidden_size: int,
        config: VirtualHeadAttention,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        scope: Scope | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        check_config(config, VirtualHeadAttention)
        scope = scope or Scope.standalone("self_attn")
        init = Normal(initializer_range)
        D, P, K, H = hidden_size, config.num_physical_heads, config.num_key_value_heads, config.head_dim
        N, projected_dim, bias = config.num_attention_heads, config.projected_head_dim, config.attention_bias
        self.mesh, self.config, self.window = scope.mesh, config, window
        self.recompute = scope.recompute == "selective"

        if config.premix == "none":
            self.q_proj = scope.child("q_proj").column_linear(D, N * H, init, view=(D, K, P, H), axis=2, bias=bias)
        else:
            self.q_proj = scope.child("q_proj").column_linear(D, P * projected_dim, init, bias=bias)
            whole = Placement.replicated((K, projected_dim, H), partial_gradient=True)
            self.premix = scope.parameter(self, "premix", whole, _premix_init(config), "premix")
        self.k_proj = scope.child("k_proj").replicated_linear(D, K * H, init, bias)
        self.v_proj = scope.child("v_proj").replicated_linear(D, K * H, init, bias)
        self.q_norm = qk_norm(scope.child("q_norm"), config, rms_norm_eps)
        self.k_norm = qk_norm(scope.child("k_norm"), config, rms_norm_eps)
        if config.output_gate != "none":
            self.g_proj = scope.child("g_proj").column_linear(D, N * H, init, view=(D, K, P, H), axis=2)
        self.o_proj = scope.child("o_proj").row_linear(N * H, D, init, view=(K, P, H, D), axis=1, bias=bias)
        if config.postmix != "none":
            R = config.postmix_rank
            assert R is not None, "checked above"
            by_head = Placement.split((N, R), axis=1, view=(K, P, R))
            self.postmix_a = scope.parameter(self, "postmix_a", by_head, Normal(config.postmix_init_std), "postmix")
            self.postmix_b = scope.parameter(self, "postmix_b", by_head, Constant(0.0), "postmix")

    def forward(self, x_BSD: paddle.Tensor, rope: RotaryTables, starts_BS: np.ndarray | None = None) -> paddle.Tensor:
        """Attend causally; `rope` holds the rotary tables of all layers, `starts_BS` the starts of documents."""
        x_BSD = self.mesh.enter_tensor_region(x_BSD)
        batch, sequence, _ = x_BSD.shape
        H, gate = self.config.head_dim, self.config.output_gate
        heads = [self.q_proj(x_BSD).reshape([batch, sequence, -1, self.config.projected_head_dim])]
        projections = [self.k_proj, self.v_proj] + ([self.g_proj] if gate != "none" else [])
        heads += [projection(x_BSD).reshape([batch, sequence, -1, H]) for projection in projections]

        def core(
            q_BSPH: paddle.Tensor, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor, *g: paddle.Tensor
        ) -> paddle.Tensor:
            q_BSNH = norm_and_rotate(self._premix(q_BSPH), self.q_norm, rope)
            k_BSKH = norm_and_rotate(k_BSKH, self.k_norm, rope)
            y_BSNH = attend(q_BSNH, k_BSKH, v_BSKH, self.mesh, self.window, starts_BS)
            if gate == "before_postmix":
                y_BSNH = y_BSNH * F.sigmoid(*g)
            if self.config.postmix != "none" and self.config.postmix_space == "activation":
                y_BSNH = self._postmix(y_BSNH)
            if gate == "after_postmix":
                y_BSNH = y_BSNH * F.sigmoid(*g)
            return y_BSNH

        y_BSNH = recomputed(core, *heads) if self.recompute else core(*heads)
        y_BSE = y_BSNH.reshape([batch, sequence, -1])
        if self.config.postmix_space == "activation":
            return self.o_proj(y_BSE)
        out_BSD = self.mesh.leave_tensor_region(linear(y_BSE, self._mixed_output_weight(), self.o_proj.products))
        return with_bias(out_BSD, self.o_proj.bias)

    def _premix(self, q_BSPQ: paddle.Tensor) -> paddle.Tensor:
        """Every physical head, Q wide, through every group's matrix, in group-major order."""
        if self.config.premix == "none":
            return q_BSPQ
        batch, sequence, num_physical, width = q_BSPQ.shape
        rows = q_BSPQ.reshape([1, batch * sequence * num_physical, width])
        head_dim = self.config.head_dim
        # one product per group; swapping whole tokens' rows of P*H is much cheaper on CPU than swapping heads
        q_KTY = paddle.matmul(rows, self.premix).reshape([-1, batch * sequence, num_physical * head_dim])
        q_BSNH = q_KTY.transpose([1, 0, 2]).reshape([batch, sequence, -1, head_dim])
        return F.silu(q_BSNH) if self.config.premix == "silu" else q_BSNH

    def _postmix(self, y_BSNH: paddle.Tensor) -> paddle.Tensor:
        """y + B z on the head axis; z = A^T y is summed over the tensor ranks' heads, then SiLU where it is asked."""
        z_BSRH = self.mesh.sum_over_tensor(paddle.matmul(self.postmix_a, y_BSNH, transpose_x=True))
        if self.config.postmix == "silu":
            z_BSRH = F.silu(z_BSRH)
        return y_BSNH + paddle.matmul(self.postmix_b, z_BSRH)

    def _mixed_output_weight(self) -> paddle.Tensor:
        """W_O + A (B^T W_O) on the head axis, for this rank's heads; B^T W_O is summed over the tensor ranks'."""
        by_head = self.o_proj.weight.reshape([self.postmix_a.shape[0], -1])
        c_RX = self.mesh.sum_over_tensor(paddle.matmul(self.postmix_b, by_head, transpose_x=True))
        return (by_head + paddle.matmul(self.postmix_a, c_RX)).reshape(self.o_proj.weight.shape)


def _premix_init(config: VirtualHeadAttention) -> Initializer:
    if config.premix_init == "orthogonal":
        return Orthogonal((config.head_dim / config.projected_head_dim) ** 0.5)
    if config.premix_init == "scaled":
        return IdentityPlusNoise.scaled(config.premix_init_noise, config.head_dim)
    return IdentityPlusNoise(config.premix_init_noise)
