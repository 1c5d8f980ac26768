"""Bytes on every rank: exact for parameters, gradients and optimizer state, estimated for activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vha_paddle.config import Attention, Recipe
from vha_paddle.counts import BYTES
from vha_paddle.plan import activations
from vha_paddle.plan.schedule import schedule_of
from vha_paddle.plan.stages import REST, chunks_of, owned_sizes, stage_tensors, tensor_owners
from vha_paddle.plan.terms import GRADIENT_BYTES, MLP

RESERVE = 0.1
"""Share of a GPU's memory left to what is not modelled: CUDA's context, NCCL's buffers, workspaces, fragmentation."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank at its fullest, during a backward pass. Bytes but for the counts of parameters."""

    stage: int
    """Pipeline stage, from 0."""
    sharding_rank: int
    parameters: int
    """Parameters of the rank's part of the model."""
    owned: int
    """Those whose optimizer state it holds."""
    weights: int
    """Under sharding stage 3 those it owns, experts, and of the others what is gathered at one time."""
    gradients: int
    """In float32. From sharding stage 2 on of what it owns and of experts, and the largest one on its way to its
    owner."""
    optimizer: int
    """AdamW's two float32 moments, and a float32 master copy where the weights are bfloat16."""
    activations_per_microbatch: int
    """What all layers of the rank keep for one microbatch."""
    microbatches_kept: float
    """Most microbatches in flight, in passes through all layers of the rank."""
    activations: int
    """What the layers keep at most."""
    loss: int
    """Final norm, logits and loss of the last stage."""
    block: int
    """What the backward pass of one block adds: what it recomputes, and gradients of activations."""

    @property
    def total(self) -> int:
        # the loss is gone when the first block's backward pass begins
        return self.weights + self.gradients + self.optimizer + self.activations + max(self.loss, self.block)


def rank_memory(recipe: Recipe, stage: int, sharding_rank: int) -> RankMemory:
    """One rank of a pipeline stage; ranks along tensor, context and data are alike."""
    model, parallel = recipe.model, recipe.parallel
    width = BYTES[recipe.precision.compute]
    owned = owned_sizes(model, parallel, stage)[sharding_rank]
    schedule = schedule_of(parallel, recipe.num_microbatches)
    is_last = stage == parallel.pipeline - 1
    passes = schedule.chunks_kept(stage)
    kept_by_chunk = _kept_by_chunk(recipe, stage)
    handed_on = 0 if is_last and parallel.virtual_pipeline == 1 else activations.boundary(recipe)
    loss = 0
    if is_last:
        loss = schedule.losses_kept * activations.end_kept(recipe) + activations.end_working(recipe)
    return RankMemory(
        stage=stage,
        sharding_rank=sharding_rank,
        parameters=sum(tensor.size for tensor in stage_tensors(model, parallel, stage)),
        owned=owned,
        weights=_weights_held(recipe, stage, sharding_rank) * width,
        gradients=_gradients_held(recipe, stage, sharding_rank) * GRADIENT_BYTES,
        optimizer=owned * (8 if width == 4 else 12),
        activations_per_microbatch=sum(kept_by_chunk),
        microbatches_kept=passes / parallel.virtual_pipeline,
        activations=passes * (max(kept_by_chunk) + handed_on),
        loss=loss,
        block=max(_block_working(recipe, attention) for attention in model.attentions),
    )


def _kept_by_chunk(recipe: Recipe, stage: int) -> list[int]:
    """Bytes that the layers of each model chunk of a stage keep for one microbatch."""
    model = recipe.model
    kept = {attention: activations.layer_kept(recipe, attention) for attention in model.attentions}
    chunks = chunks_of(model.num_hidden_layers, recipe.parallel, stage)
    return [sum(kept[model.attention_of(layer)] for layer in chunk) for chunk in chunks]


def _block_working(recipe: Recipe, attention: Attention) -> int:
    """Bytes that a block's backward pass adds: what comes back, and the gradients of the feed-forward's channels."""
    return activations.layer_recomputed(recipe, attention) + activations.layer_terms(recipe, attention)[MLP]


def _gradients_held(recipe: Recipe, stage: int, sharding_rank: int) -> int:
    """Parameters whose gradients a rank has at one time, at most."""
    model, parallel = recipe.model, recipe.parallel
    tensors = stage_tensors(model, parallel, stage)
    owners = tensor_owners(model, parallel, stage, sharding_rank)
    if parallel.sharding_stage == 1:
        return sum(tensor.size for tensor in tensors)
    divided = [tensor.size for tensor in tensors if not tensor.is_expert]
    pairs = zip(tensors, owners, strict=True)
    kept = sum(tensor.size for tensor, owner in pairs if tensor.is_expert or owner == sharding_rank)
    return kept + max(divided)  # the largest one, on its way to its owner


def _weights_held(recipe: Recipe, stage: int, sharding_rank: int) -> int:
    """Parameters whose values a rank has at one time, at most."""
    model, parallel = recipe.model, recipe.parallel
    tensors = stage_tensors(model, parallel, stage)
    owners = tensor_owners(model, parallel, stage, sharding_rank)
    if parallel.sharding_stage < 3:
        return sum(tensor.size for tensor in tensors)
    kept, gathered = 0, Counter[str]()
    for tensor, owner in zip(tensors, owners, strict=True):
        if tensor.is_expert or owner == sharding_rank:
            kept += tensor.size
        else:
            gathered[tensor.unit] += tensor.size
    rest = gathered.pop(REST, 0)
    return kept + rest + max(gathered.values(), default=0)


def all_ranks(recipe: Recipe) -> list[RankMemory]:
    """Of every stage the sharding ranks that own most and least (one rank where they are the same)."""
    found = []
    for stage in range(recipe.parallel.pipeline):
        owned = owned_sizes(recipe.model, recipe.parallel, stage)
        for rank in sorted({owned.index(max(owned)), owned.index(min(owned))}):
            found.append(rank_memory(recipe, stage, rank))
    return found


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.total)


def best(ranks: Sequence[RankMemory]) -> RankMemory:
    return min(ranks, key=lambda rank: rank.total)
