"""The decoder of the Qwen3 architecture. The tree of layers spells the canonical parameter names."""

from __future__ import annotations

import paddle
from paddle import nn

from vha_paddle.attention import REGISTRY
from vha_paddle.attention.base import RotaryTables
from vha_paddle.config import Model
from vha_paddle.model.mlp import MLP
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.scope import RMSNorm, Scope


class Block(nn.Layer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Model, scope: Scope) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(scope.child("input_layernorm"), width, eps)
        self.self_attn = REGISTRY[config.attention.kind](
            width, config.attention, eps, config.initializer_range, scope.child("self_attn")
        )
        self.post_attention_layernorm = RMSNorm(scope.child("post_attention_layernorm"), width, eps)
        self.mlp = MLP(width, config.intermediate_size, config.initializer_range, scope.child("mlp"))

    def forward(self, x_BSD: paddle.Tensor, rope: RotaryTables) -> paddle.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Decoder(nn.Layer):
    """Token ids to logits, and to the loss of the next token."""

    def __init__(self, config: Model, scope: Scope) -> None:
        super().__init__()
        init = Normal(config.initializer_range)
        inner = scope.child("model")
        self.mesh, self.vocab_size = scope.mesh, config.vocab_size
        self.rope = RotaryTables(config.attention.head_dim, config.rope_theta, scope.dtype)
        self.embed_tokens = inner.child("embed_tokens").vocab_embedding(config.vocab_size, config.hidden_size, init)
        self.layers = nn.LayerList(
            [Block(config, inner.child("layers").child(index)) for index in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(inner.child("norm"), config.hidden_size, config.rms_norm_eps)
        self.lm_head: nn.Layer | None = None
        if not config.tie_word_embeddings:
            self.lm_head = scope.child("lm_head").column_linear(config.hidden_size, config.vocab_size, init)

    def forward(self, tokens_BS: paddle.Tensor) -> paddle.Tensor:
        """Logits `[B, S, V]`; under tensor parallelism V is this rank's share of the vocabulary."""
        x_BSD = self.embed_tokens(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, self.rope)
        return self.head(x_BSD)

    def head(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        """Logits of what the last block gave, for the positions handed in."""
        x_BSD = self.mesh.enter_tensor_region(self.norm(x_BSD))
        if self.lm_head is not None:
            return self.lm_head(x_BSD)
        return paddle.matmul(x_BSD, self.embed_tokens.weight, transpose_y=True)

    def loss(self, tokens_BS: paddle.Tensor, labels_BS: paddle.Tensor) -> paddle.Tensor:
        """Cross-entropy of each label, `[B, S]`, in nats."""
        return self.mesh.cross_entropy(self(tokens_BS), labels_BS)

    def named_tensors(self) -> dict[str, paddle.Tensor]:
        """This rank's parameters by canonical name, in the order of the layers."""
        return {info_of(parameter).name: parameter for parameter in self.parameters()}


def build_decoder(config: Model, mesh: Mesh, seed: int, dtype: str = "float32") -> Decoder:
    """A decoder initialised from `seed`; the values do not depend on the mesh."""
    outer = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)  # fleet's layers take their dtype from here alone
    try:
        return Decoder(config, Scope(mesh, dtype, seed, path=""))
    finally:
        paddle.set_default_dtype(outer)
