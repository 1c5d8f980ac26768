"""One block of the decoder, and what all blocks of a model share."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from vha_paddle.attention import REGISTRY
from vha_paddle.attention.base import RotaryTables
from vha_paddle.config import Model
from vha_paddle.model.balance import Balance
from vha_paddle.model.microbatch import Microbatch
from vha_paddle.model.mlp import MLP
from vha_paddle.model.moe import MoE
from vha_paddle.ops.dropout import dropout, dropout_key
from vha_paddle.parallel.recompute import recomputed
from vha_paddle.parallel.scope import RMSNorm, Scope


class BatchContext:
    """What the blocks of a model share: rotary tables, the sequences that are being run, the balance of experts."""

    def __init__(self, config: Model, scope: Scope) -> None:
        self.rope = {
            attention.rope_dim: RotaryTables(attention.rope_dim, config.rope_theta, scope.dtype, scope.mesh)
            for attention in config.attentions
        }
        """By the number of channels that they turn."""
        self.samples_B = np.zeros(0, np.int64)
        """Indices of the microbatch's sequences among all of the run; dropout is a function of them."""
        self.starts_BS: np.ndarray | None = None
        """Where the documents of the microbatch's tokens start; None is no mask of documents."""
        self.balance: Balance | None = None
        if config.experts is not None:
            self.balance = Balance(config.experts, config.num_hidden_layers, scope.mesh)

    def enter(self, microbatch: Microbatch) -> None:
        """The blocks run `microbatch` from now on."""
        self.samples_B, self.starts_BS = microbatch.samples_B, microbatch.starts_BS

    def leave(self) -> None:
        """What is run next are tokens alone, without documents."""
        self.starts_BS = None


def _feed_forward(config: Model, layer: int, scope: Scope, balance: Balance | None) -> MLP | MoE:
    width, spread = config.hidden_size, config.initializer_range
    if config.experts is not None and balance is not None:
        return MoE(width, config.experts, spread, scope, balance, layer)
    assert config.intermediate_size is not None, "checked with the recipe"
    return MLP(width, config.intermediate_size, spread, scope)


class Block(nn.Layer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Model, layer: int, scope: Scope, context: BatchContext) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        attention = config.attention_of(layer)
        self.rope = context.rope[attention.rope_dim]
        self.context, self.mesh = context, scope.mesh
        self.input_layernorm = RMSNorm(scope.child("input_layernorm"), width, eps)
        window = config.window_of(layer)
        sliding = {} if window is None else {"window": window}  # the kinds that cannot slide take none
        self.self_attn = REGISTRY[attention.kind](
            width, attention, eps, config.initializer_range, scope.child("self_attn"), **sliding
        )
        self.post_attention_layernorm = RMSNorm(scope.child("post_attention_layernorm"), width, eps)
        self.mlp = _feed_forward(config, layer, scope.child("mlp"), context.balance)
        self.dropout_rate = config.hidden_dropout
        self.dropout_keys = tuple(dropout_key(scope.seed, f"{scope.path}.{name}") for name in ("self_attn", "mlp"))
        self.recompute = scope.recompute == "full"

    def forward(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        # held by the closure: backward may come when other samples are being run
        samples_B, starts_BS = self.context.samples_B, self.context.starts_BS

        def run(x_BSD: paddle.Tensor) -> paddle.Tensor:
            attended_BSD = self.self_attn(self.input_layernorm(x_BSD), self.rope, starts_BS)
            x_BSD = x_BSD + self._dropout(attended_BSD, self.dropout_keys[0], samples_B)
            mixed_BSD = self.mlp(self.post_attention_layernorm(x_BSD))
            return x_BSD + self._dropout(mixed_BSD, self.dropout_keys[1], samples_B)

        return recomputed(run, x_BSD) if self.recompute else run(x_BSD)

    def _dropout(self, x_BSD: paddle.Tensor, key: int, samples_B: np.ndarray) -> paddle.Tensor:
        if not self.training or self.dropout_rate == 0:
            return x_BSD
        return dropout(x_BSD, self.dropout_rate, key, samples_B, self.mesh.outer_positions(x_BSD.shape[1]))
