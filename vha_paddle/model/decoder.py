"""The decoder of the Qwen3 architecture, in one piece. The tree of layers spells the canonical parameter names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from vha_paddle.config import Memory, Model
from vha_paddle.model.block import BatchContext, Block
from vha_paddle.model.microbatch import Microbatch
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.scope import RMSNorm, Scope, building
from vha_paddle.parallel.sharding import Sharding
from vha_paddle.precision.policy import Fp8


class Decoder(nn.Layer):
    """Token ids to logits, and to the loss of the next token."""

    def __init__(self, config: Model, scope: Scope) -> None:
        super().__init__()
        init = Normal(config.initializer_range)
        inner = scope.child("model")
        self.mesh, self.vocab_size = scope.mesh, config.vocab_size
        self.context = BatchContext(config, scope)
        self.balance = self.context.balance
        """Of a mixture of experts."""
        self.embed_tokens = inner.child("embed_tokens").vocab_embedding(config.vocab_size, config.hidden_size, init)
        self.layers = nn.LayerList(
            Block(config, index, inner.child("layers").child(index), self.context)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(inner.child("norm"), config.hidden_size, config.rms_norm_eps)
        self.lm_head: nn.Layer | None = None
        if not config.tie_word_embeddings:
            self.lm_head = (
                scope.child("lm_head").without_fp8().column_linear(config.hidden_size, config.vocab_size, init)
            )
        # a tied table is used at both ends, so it is no unit
        ends = [self.embed_tokens, self.lm_head] if self.lm_head is not None else []
        self.sharding = Sharding(self, [*self.layers, *ends], scope.mesh)

    def forward(self, tokens_BS: paddle.Tensor) -> paddle.Tensor:
        """Logits `[B, S, V]`; under tensor parallelism V is this rank's share of the vocabulary."""
        x_BSD = self.embed_tokens(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD)
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

    def _loss_of(self, microbatch: Microbatch) -> paddle.Tensor:
        self.context.enter(microbatch)
        loss_BS = self.loss(microbatch.tokens_BS, microbatch.labels_BS)
        self.context.leave()
        return loss_BS

    def forward_backward(
        self, microbatches: Sequence[Microbatch], scale: float, enter: Callable[[str], None] = lambda phase: None
    ) -> float:
        """Add the gradients of `scale` times the summed cross-entropy; returns that sum, unscaled. `enter` is told the
        phase that begins.

        Under context parallelism it covers the positions that this rank holds. The losses that balance experts add to
        the gradients and not to the sum.
        """
        total = 0.0
        if self.balance is not None:
            self.balance.scale = scale
        for microbatch in microbatches:
            enter("forward")
            loss = self._loss_of(microbatch).sum()
            enter("backward")
            (loss * scale).backward()
            total += float(loss.numpy())
        self.sharding.finish_backward()
        return total

    def sequence_losses(self, microbatches: Sequence[Microbatch]) -> np.ndarray[Any, Any]:
        """Summed cross-entropy of each sequence, in order, without gradients and without dropout."""
        was_training = self.training
        self.eval()
        with paddle.no_grad():
            losses = [self._loss_of(microbatch).sum(axis=1).astype("float64").numpy() for microbatch in microbatches]
        if was_training:
            self.train()
        return np.concatenate(losses)

    def named_tensors(self) -> dict[str, paddle.Tensor]:
        """This rank's parameters by canonical name, in the order of the layers."""
        return {info_of(parameter).name: parameter for parameter in self.parameters()}


def build_decoder(
    config: Model,
    mesh: Mesh,
    seed: int,
    dtype: str = "float32",
    memory: Memory | None = None,
    fp8: Fp8 = "none",
) -> Decoder:
    """A decoder in one piece, initialised from `seed`; the values do not depend on the mesh."""
    with building(mesh, dtype, seed, (memory or Memory()).recompute, fp8) as scope:
        return Decoder(config, scope)
