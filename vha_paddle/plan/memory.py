"""Bytes on every rank: exact for parameters, gradients and optimizer state, estimated for activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vha_paddle.config import Recipe
from vha_paddle.counts import BYTES
from vha_paddle.plan import activations
from vha_paddle.plan.schedule import schedule_of
from vha_paddle.plan.stages import REST, chunks_of, owned_sizes, stage_tensors, tensor_owners

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
    """Under sharding stage 3 those it owns, and of the others what is gathered at one time."""
    gradients: int
    """From sharding stage 2 on of what it owns, and the largest one on its way to its owner."""
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
    tensors = stage_tensors(model, parallel, stage)
    local = sum(tensor.size for tensor in tensors)
    owned = owned_sizes(model, parallel, stage)[sharding_rank]
    gradients = local
    if parallel.sharding_stage > 1:
        gradients = owned + max(tensor.size for tensor in tensors)

    schedule = schedule_of(parallel, recipe.num_microbatches)
    chunks = chunks_of(model.num_hidden_layers, parallel, stage)
    is_last = stage == parallel.pipeline - 1
    kept_by_layer = activations.layer_kept(recipe)
    passes = schedule.chunks_kept(stage)
    per_chunk = len(chunks[0]) * kept_by_layer
    handed_on = 0 if is_last and parallel.virtual_pipeline == 1 else activations.boundary(recipe)
    loss = 0
    if is_last:
        loss = schedule.losses_kept * activations.end_kept(recipe) + activations.end_working(recipe)
    mlp = activations.layer_terms(recipe)["gate, up and their product"]
    return RankMemory(
        stage=stage,
        sharding_rank=sharding_rank,
        parameters=local,
        owned=owned,
        weights=_weights_held(recipe, stage, sharding_rank) * width,
        gradients=gradients * width,
        optimizer=owned * (8 if width == 4 else 12),
        activations_per_microbatch=per_chunk * len(chunks),
        microbatches_kept=passes / parallel.virtual_pipeline,
        activations=passes * (per_chunk + handed_on),
        loss=loss,
        block=activations.layer_recomputed(recipe) + mlp,
    )


def _weights_held(recipe: Recipe, stage: int, sharding_rank: int) -> int:
    """Parameters whose values a rank has at one time, at most."""
    model, parallel = recipe.model, recipe.parallel
    tensors, owners = stage_tensors(model, parallel, stage), tensor_owners(model, parallel, stage)
    if parallel.sharding_stage < 3:
        return sum(tensor.size for tensor in tensors)
    gathered: Counter[str] = Counter()
    for tensor, owner in zip(tensors, owners, strict=True):
        gathered[tensor.unit] += tensor.size * (owner != sharding_rank)
    rest = gathered.pop(REST)
    return owned_sizes(model, parallel, stage)[sharding_rank] + rest + max(gathered.values())


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
