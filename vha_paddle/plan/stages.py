"""The parameters each rank holds, tensor by tensor in the model's own order, and who owns them under sharding."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vha_paddle.config import Model, Parallel, VirtualHeadAttention
from vha_paddle.counts import attention_parameters, heads_per_rank, parameters
from vha_paddle.errors import UserError

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
    tensor, sequence = parallel.tensor, parallel.sequence
    whole = parameters(model, tensor)
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1
    tensors = []
    if is_first or (is_last and model.tie_word_embeddings):
        # a shared layer comes first in fleet's pipeline too; a tied table is used at both ends, so it is no unit
        unit = REST if model.tie_word_embeddings else "embedding"
        tensors.append(LocalTensor("model.embed_tokens.weight", whole.embedding, unit, False))
    for chunk in chunks_of(model.num_hidden_layers, parallel, stage):
        for layer in chunk:
            tensors += _block(model, tensor, sequence, layer)
    if is_last:
        tensors.append(LocalTensor("model.norm.weight", whole.final_norm, REST, sequence))
        if not model.tie_word_embeddings:
            tensors.append(LocalTensor("lm_head.weight", whole.lm_head, "head", False))
    return tuple(tensors)


def _block(model: Model, tensor: int, sequence: bool, layer: int) -> Iterator[LocalTensor]:
    prefix, unit = f"model.layers.{layer}", f"layers.{layer}"
    attention = attention_parameters(model, tensor)
    partial = {"q_norm", "k_norm", "premix"} if tensor > 1 else set()
    held = heads_per_rank(model.attention, tensor).key_value_held
    if tensor > 1 and held == model.attention.num_key_value_heads:
        partial |= {"k_proj", "v_proj"}
    yield LocalTensor(f"{prefix}.input_layernorm.weight", model.hidden_size, unit, sequence)
    maps = ["premix", "postmix_a", "postmix_b"] if isinstance(model.attention, VirtualHeadAttention) else []
    for name in maps:  # attributes of the layer itself come before those of its parts
        yield LocalTensor(f"{prefix}.self_attn.{name}", attention[name], unit, name in partial)
    for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj"):
        yield LocalTensor(f"{prefix}.self_attn.{name}.weight", attention[name], unit, name in partial)
    yield LocalTensor(f"{prefix}.post_attention_layernorm.weight", model.hidden_size, unit, sequence)
    for name in ("gate_proj", "up_proj", "down_proj"):
        size = model.hidden_size * model.intermediate_size // tensor
        yield LocalTensor(f"{prefix}.mlp.{name}.weight", size, unit, False)


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
def tensor_owners(model: Model, parallel: Parallel, stage: int) -> tuple[int, ...]:
    """The sharding rank that owns each of a stage's tensors."""
    sizes = [tensor.size for tensor in stage_tensors(model, parallel, stage)]
    return tuple(assign_owners(sizes, parallel.sharding))


def owned_tensors(model: Model, parallel: Parallel, stage: int, sharding_rank: int) -> list[LocalTensor]:
    """Those of a stage's tensors that a sharding rank owns."""
    pairs = zip(stage_tensors(model, parallel, stage), tensor_owners(model, parallel, stage), strict=True)
    return [tensor for tensor, owner in pairs if owner == sharding_rank]


@functools.lru_cache(maxsize=4096)
def owned_sizes(model: Model, parallel: Parallel, stage: int) -> tuple[int, ...]:
    """Parameters that each sharding rank of a stage owns."""
    totals = [0] * parallel.sharding
    pairs = zip(stage_tensors(model, parallel, stage), tensor_owners(model, parallel, stage), strict=True)
    for tensor, owner in pairs:
        totals[owner] += tensor.size
    return tuple(totals)
