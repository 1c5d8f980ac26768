"""The parameters each rank holds, tensor by tensor in the model's own order, and who owns them under sharding."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from vha_paddle.config import Model, Parallel
from vha_paddle.errors import UserError
from vha_paddle.tensors import TensorSpec, embedding_tensor, end_tensors, layer_tensors

REST = "rest"
"""Unit of what is in no layer that is gathered by itself: under sharding stage 3 it is gathered once per step."""


@dataclass(frozen=True)
class LocalTensor:
    """A tensor-parallel rank's part of one parameter."""

    name: str
    """Canonical name."""
    size: int
    unit: str
    """What sharding stage 3 gathers together: a block (`layers.3`), an untied `embedding` or `head`, or the `rest`."""
    partial_gradient: bool
    """Whole on every tensor rank, used by each on part of the work: the gradient is summed over them."""
    is_expert: bool = False
    """Of the experts that this rank holds: owned among the ranks that hold the same ones, and never divided further."""


def chunks_of(num_layers: int, parallel: Parallel, stage: int) -> list[range]:
    """Layers of each model chunk of a pipeline stage: chunks stage, stage + p, ... of the p * v in all.

    Raises:
        UserError: the layers do not divide equally.
    """
    pipeline, virtual = parallel.pipeline, parallel.virtual_pipeline
    if num_layers % (pipeline * virtual):
        raise UserError(
            f"parallel.pipeline={pipeline} with virtual_pipeline={virtual}: their product must divide "
            f"model.num_hidden_layers={num_layers}; use a divisor"
        )
    size = num_layers // (pipeline * virtual)
    return [range(start * size, (start + 1) * size) for start in range(stage, pipeline * virtual, pipeline)]


@functools.lru_cache(maxsize=4096)
def stage_tensors(model: Model, parallel: Parallel, stage: int) -> tuple[LocalTensor, ...]:
    """The parameters of a rank of a pipeline stage, in the order of the built model's `parameters()`.

    The embedding is with the first stage; final norm and head are with the last, which holds a tied embedding again.
    """
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1
    tensors = []
    if is_first or (is_last and model.tie_word_embeddings):
        # a shared layer comes first in fleet's pipeline too; a tied table is used at both ends, so it is no unit
        unit = REST if model.tie_word_embeddings else "embedding"
        tensors.append(_local(embedding_tensor(model), unit, parallel))
    for chunk in chunks_of(model.num_hidden_layers, parallel, stage):
        for layer in chunk:
            specs = layer_tensors(model, layer, parallel.tensor)
            tensors += [_local(spec, f"layers.{layer}", parallel) for spec in specs]
    if is_last:
        norm, *heads = end_tensors(model)
        tensors += [_local(norm, REST, parallel), *(_local(head, "head", parallel) for head in heads)]
    return tuple(tensors)


def _local(spec: TensorSpec, unit: str, parallel: Parallel) -> LocalTensor:
    is_partial = parallel.sequence if spec.held == "stream" else spec.held == "partial" and parallel.tensor > 1
    size = spec.local_size(parallel.tensor, parallel.expert)
    return LocalTensor(spec.name, size, unit, is_partial, spec.is_expert)


def assign_owners(sizes: Sequence[int], degree: int) -> list[int]:
    """Which of `degree` sharding ranks owns each tensor: largest first to the least loaded."""
    load = [(0, rank) for rank in range(degree)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):  # stable: ties keep their order
        held, rank = load[0]
        owners[index] = rank
        heapq.heapreplace(load, (held + sizes[index], rank))
    return owners


@functools.lru_cache(maxsize=4096)
def tensor_owners(model: Model, parallel: Parallel, stage: int, sharding_rank: int = 0) -> tuple[int, ...]:
    """The sharding rank that owns each tensor of a stage as `sharding_rank` holds it.

    Ranks with other experts divide nothing of them among each other: experts are owned within the ranks that hold
    the same ones, every `parallel.expert`-th of the axis.
    """
    tensors, apart = stage_tensors(model, parallel, stage), parallel.expert
    dense = iter(assign_owners([t.size for t in tensors if not t.is_expert], parallel.sharding))
    experts = iter(assign_owners([t.size for t in tensors if t.is_expert], parallel.sharding // apart))
    return tuple(next(experts) * apart + sharding_rank % apart if t.is_expert else next(dense) for t in tensors)


def owned_tensors(model: Model, parallel: Parallel, stage: int, sharding_rank: int) -> list[LocalTensor]:
    """Those of a stage's tensors that a sharding rank owns."""
    owners = tensor_owners(model, parallel, stage, sharding_rank)
    pairs = zip(stage_tensors(model, parallel, stage), owners, strict=True)
    return [tensor for tensor, owner in pairs if owner == sharding_rank]


@functools.lru_cache(maxsize=4096)
def owned_sizes(model: Model, parallel: Parallel, stage: int) -> tuple[int, ...]:
    """Parameters that each sharding rank of a stage owns."""
    totals = [0] * parallel.sharding
    for tensor, owner in zip(stage_tensors(model, parallel, stage), tensor_owners(model, parallel, stage), strict=True):
        # seen from rank 0; the ranks next to it own as much of other experts
        for rank in range(owner, owner + parallel.expert) if tensor.is_expert else (owner,):
            totals[rank] += tensor.size
    return tuple(totals)
