"""The decoder over pipeline stages: the same parts and names as in one piece, each rank holding some."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from vha_paddle.config import Recipe
from vha_paddle.model.block import BatchContext, Block
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.model.microbatch import Microbatch
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.main_gradients import accumulate_in_float32
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.scope import RMSNorm, Scope, building


class PipelinedDecoder(nn.Layer):
    """This rank's stages of a decoder. Trains as `Decoder` does; has no logits to give."""

    def __init__(self, recipe: Recipe, scope: Scope) -> None:
        super().__init__()
        from vha_paddle.parallel.pipeline import Part, Pipeline  # fleet takes a second to import

        config, mesh = recipe.model, scope.mesh
        init = Normal(config.initializer_range)
        inner = scope.child("model")
        self.context = BatchContext(config, scope)
        self.balance = self.context.balance

        def embedding(is_tied_copy: bool) -> nn.Layer:
            place = inner.child("embed_tokens")
            return place.vocab_embedding(config.vocab_size, config.hidden_size, init, is_tied_copy)

        def tied_head(table: nn.Layer, x_BSD: paddle.Tensor) -> paddle.Tensor:
            return paddle.matmul(mesh.enter_tensor_region(x_BSD), table.weight, transpose_y=True)

        tied = config.tie_word_embeddings
        parts = [Part(functools.partial(embedding, False), tied=tied)]
        for index in range(config.num_hidden_layers):
            build = functools.partial(Block, config, index, inner.child("layers").child(index), self.context)
            parts.append(Part(build, is_block=True))
        parts.append(Part(functools.partial(RMSNorm, inner.child("norm"), config.hidden_size, config.rms_norm_eps)))
        if tied:
            parts.append(Part(functools.partial(embedding, True), tied=True, call=tied_head))
        else:
            parts.append(Part(functools.partial(_Head, config.hidden_size, config.vocab_size, init, scope)))
        self.pipeline = Pipeline(parts, mesh.cross_entropy, recipe.data.micro_batch_size, recipe.num_microbatches, mesh)
        accumulate_in_float32(self.parameters())

    def forward_backward(
        self, microbatches: Sequence[Microbatch], scale: float, enter: Callable[[str], None] = lambda phase: None
    ) -> float:
        """As `Decoder.forward_backward`; the sum is on the last stage, and 0 on the others. The stages' forward and
        backward passes alternate, and are one phase."""
        enter("pipeline")
        self.pipeline.stages.announce = self._announcing(microbatches)
        if self.balance is not None:
            self.balance.scale = scale
        return float(self.pipeline.forward_backward(*_columns(microbatches), scale).sum())

    def sequence_losses(self, microbatches: Sequence[Microbatch]) -> np.ndarray[Any, Any]:
        """As `Decoder.sequence_losses`, of microbatches of one size; empty on other stages than the last."""
        self.pipeline.stages.announce = self._announcing(microbatches)
        losses = self.pipeline.losses(*_columns(microbatches))
        self.train()
        return losses

    def named_tensors(self) -> dict[str, paddle.Tensor]:
        """This rank's parameters by canonical name."""
        return {info_of(parameter).name: parameter for parameter in self.parameters()}

    def _announcing(self, microbatches: Sequence[Microbatch]) -> Callable[[int], None]:
        def announce(index: int) -> None:
            self.context.enter(microbatches[min(index, len(microbatches) - 1)])  # an evaluation may repeat the last

        return announce


class _Head(nn.Layer):
    """The output projection of an untied model."""

    def __init__(self, hidden_size: int, vocab_size: int, init: Normal, scope: Scope) -> None:
        super().__init__()
        self.mesh = scope.mesh
        self.lm_head = scope.child("lm_head").without_fp8().column_linear(hidden_size, vocab_size, init)

    def forward(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        return self.lm_head(self.mesh.enter_tensor_region(x_BSD))


def _columns(microbatches: Sequence[Microbatch]) -> tuple[list[paddle.Tensor], list[paddle.Tensor]]:
    return [batch.tokens_BS for batch in microbatches], [batch.labels_BS for batch in microbatches]


def build_model(recipe: Recipe, mesh: Mesh, dtype: str) -> Decoder | PipelinedDecoder:
    """The recipe's decoder as this rank holds it, initialised from run.seed alike in every layout."""
    if mesh.pipeline_degree == 1:
        return build_decoder(recipe.model, mesh, recipe.run.seed, dtype, recipe.memory, recipe.precision.fp8)
    with building(mesh, dtype, recipe.run.seed, recipe.memory.recompute, recipe.precision.fp8) as scope:
        return PipelinedDecoder(recipe, scope)
