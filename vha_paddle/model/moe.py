"""Mixture of experts as in Qwen3-MoE: each token passes through a few of many feed-forwards.

    p = softmax(x W_gate)                     in float32 at least, whatever the compute dtype
    y = sum over the chosen e of w_e down_e(silu(gate_e(x)) * up_e(x))        + the shared expert's, where there is one

Tokens' copies are put in the order of the experts, so that each projection is one operation over all of them, and no
token is dropped unless the recipe sets a capacity. How experts are kept balanced: `balance.py`.

Tensor parallel as the MLP: every rank routes the same tokens and holds a part of each expert's channels F, so what
it computes is summed on leaving the region; the router's gradient comes through its part, and is partial.
Expert parallel: `parallel/expert.py`. Letters: T tokens, D hidden, E experts, k experts of a token, F width of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import paddle
from paddle import nn

from vha_paddle.config import MixtureOfExperts
from vha_paddle.model.balance import Balance
from vha_paddle.model.mlp import MLP
from vha_paddle.ops.grouped_linear import grouped_linear
from vha_paddle.ops.linear import linear
from vha_paddle.ops.routing import combine, gather_rows, sort_by_expert, within_capacity
from vha_paddle.ops.swiglu import swiglu
from vha_paddle.parallel.expert import Delivery
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.placement import Placement
from vha_paddle.parallel.scope import Scope


class Experts(nn.Layer):
    """The feed-forwards that this rank holds, stacked."""

    def __init__(self, hidden_size: int, config: MixtureOfExperts, init: Normal, scope: Scope) -> None:
        super().__init__()
        E, D, F = config.num_experts, hidden_size, config.moe_intermediate_size
        by_column, by_row = Placement.experts((E, D, F), axis=2), Placement.experts((E, F, D), axis=1)
        self.products = scope.expert_products
        self.gate_proj = scope.parameter(self, "gate_proj", by_column, init, "matrix")
        self.up_proj = scope.parameter(self, "up_proj", by_column, init, "matrix")
        self.down_proj = scope.parameter(self, "down_proj", by_row, init, "matrix")

    def forward(self, x_RD: paddle.Tensor, counts: Sequence[int]) -> paddle.Tensor:
        """Rows sorted by expert, `counts` of each; partial over the tensor ranks."""
        gate_RF = grouped_linear(x_RD, self.gate_proj, counts, self.products)
        up_RF = grouped_linear(x_RD, self.up_proj, counts, self.products)
        return grouped_linear(swiglu(gate_RF, up_RF), self.down_proj, counts, self.products)


class MoE(nn.Layer):
    """Router, experts and, if the model has one, a shared expert: `[B, S, D]` to `[B, S, D]`.

    Args:
        scope: where the layer stands.
        balance: of the model; its row `layer` is this layer's.
    """

    def __init__(
        self,
        hidden_size: int,
        config: MixtureOfExperts,
        initializer_range: float,
        scope: Scope,
        balance: Balance,
        layer: int,
    ) -> None:
        super().__init__()
        init = Normal(initializer_range)
        self.config, self.mesh, self.balance, self.layer = config, scope.mesh, balance, layer
        self.gate = scope.child("gate").without_fp8().replicated_linear(hidden_size, config.num_experts, init)
        self.experts = Experts(hidden_size, config, init, scope.child("experts"))
        self.shared_expert: MLP | None = None
        if width := config.shared_expert_intermediate_size:
            self.shared_expert = MLP(hidden_size, width, initializer_range, scope.child("shared_expert"))

    def forward(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        inside_BSD = self.mesh.enter_tensor_region(x_BSD)
        y_BSD = self.mesh.leave_tensor_region(self._routed(inside_BSD))
        return y_BSD if self.shared_expert is None else y_BSD + self.shared_expert(x_BSD)

    def _routed(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        """What the chosen experts make of each token."""
        batch, sequence, width = x_BSD.shape
        x_TD = x_BSD.reshape([-1, width])
        # recompute runs this twice, without gradients at first: a token counts where backward will pass
        counted = self.training and paddle.is_grad_enabled()
        routing = self.balance.route(self.layer, self._logits(x_TD), counted)
        kept_Tk = None
        if self.config.capacity_factor is not None:
            capacity = self._capacity(self.config.capacity_factor, sequence)
            kept_Tk = within_capacity(routing.experts_Tk, batch, self.config.num_experts, capacity)
            if counted:
                self.balance.count_dropped(self.layer, int((~kept_Tk).sum()))
        rows, counts_E = sort_by_expert(routing.experts_Tk, self.config.num_experts, kept_Tk)
        delivery = Delivery(counts_E, self.mesh)
        y_RD = delivery.bring_back(self.experts(delivery.send(gather_rows(x_TD, rows)), delivery.counts))
        return combine(y_RD, _cast(routing.weights_Tk, y_RD.dtype), rows).reshape(x_BSD.shape)

    def _logits(self, x_TD: paddle.Tensor) -> paddle.Tensor:
        dtype = paddle.float64 if x_TD.dtype == paddle.float64 else paddle.float32
        return linear(_cast(x_TD, dtype), _cast(self.gate.weight, dtype))

    def _capacity(self, factor: float, sequence: int) -> int:
        """Copies that an expert takes of one sequence."""
        return math.ceil(factor * sequence * self.config.num_experts_per_tok / self.config.num_experts)


def _cast(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    return x if x.dtype == dtype else x.astype(dtype)
