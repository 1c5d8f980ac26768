"""SwiGLU feed-forward."""

from __future__ import annotations

import paddle
from paddle import nn

from vha_paddle.ops.swiglu import swiglu
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.scope import Scope


class MLP(nn.Layer):
    """down(silu(gate(x)) * up(x)); tensor parallel splits the intermediate channels."""

    def __init__(self, hidden_size: int, intermediate_size: int, initializer_range: float, scope: Scope) -> None:
        super().__init__()
        init = Normal(initializer_range)
        self.mesh = scope.mesh
        self.gate_proj = scope.child("gate_proj").column_linear(hidden_size, intermediate_size, init)
        self.up_proj = scope.child("up_proj").column_linear(hidden_size, intermediate_size, init)
        self.down_proj = scope.child("down_proj").row_linear(intermediate_size, hidden_size, init)

    def forward(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        x_BSD = self.mesh.enter_tensor_region(x_BSD)
        return self.down_proj(swiglu(self.gate_proj(x_BSD), self.up_proj(x_BSD)))
