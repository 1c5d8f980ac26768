"""What a rank communicates in one optimizer step, by axis of the mesh.

Two figures stand for each collective. `payload` is the whole tensor that it is about: what is summed (all-reduce),
what is gathered (all-gather: the result), what is summed and cut (reduce-scatter: the input), what is sent. `ring` is
what a rank sends when g ranks work in a ring: 2 (g - 1) / g of the payload for an all-reduce, (g - 1) / g for an
all-gather or a reduce-scatter, all of it for a broadcast (each rank but the last passes it on) and a send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vha_paddle.config import Recipe, VirtualHeadAttention
from vha_paddle.counts import BYTES, heads_per_rank
from vha_paddle.plan.activations import Sizes
from vha_paddle.plan.stages import REST, LocalTensor, chunks_of, owned_tensors, stage_tensors

Axis = Literal["tensor", "pipeline", "context", "data", "sharding"]
Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "send"]
Phase = Literal["forward", "backward", "step"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """All collectives of one kind and purpose that a rank takes part in during an optimizer step."""

    axis: Axis
    kind: Kind
    phase: Phase
    """`step` is once per optimizer step; the others are summed over the microbatches."""
    purpose: str
    ranks: int
    """Size of the group."""
    payload: int
    """Bytes."""

    @property
    def ring(self) -> int:
        """Bytes that a rank sends in a ring."""
        if self.kind == "all-reduce":
            return 2 * self.payload * (self.ranks - 1) // self.ranks
        if self.kind in ("all-gather", "reduce-scatter"):
            return self.payload * (self.ranks - 1) // self.ranks
        return self.payload


def transfers(recipe: Recipe, stage: int, sharding_rank: int = 0) -> list[Transfer]:
    """Everything a rank of a pipeline stage communicates, apart from single numbers (the loss, the norm)."""
    parallel = recipe.parallel
    reduced = stage_tensors(recipe.model, parallel, stage)
    if parallel.sharding_stage > 1:  # the others' gradients have gone to their owners in backward
        reduced = tuple(owned_tensors(recipe.model, parallel, stage, sharding_rank))
    found = [*_tensor(recipe, stage), *_pipeline(recipe, stage), *_context(recipe, stage), *_sharding(recipe, stage)]
    found += _gradients(recipe, reduced)
    return [transfer for transfer in found if transfer.payload and transfer.ranks > 1]


def _passes(recipe: Recipe) -> int:
    """Forward passes of a block for each backward pass."""
    return 2 if recipe.memory.recompute == "full" else 1


def _core_passes(recipe: Recipe) -> int:
    """Forward passes of what lies between the projections of attention."""
    return 1 if recipe.memory.recompute == "none" else 2


def _num_layers(recipe: Recipe, stage: int) -> int:
    return sum(map(len, chunks_of(recipe.model.num_hidden_layers, recipe.parallel, stage)))


def _tensor(recipe: Recipe, stage: int) -> Iterator[Transfer]:
    parallel, model, sizes = recipe.parallel, recipe.model, Sizes.of(recipe)
    microbatches, layers = recipe.num_microbatches, _num_layers(recipe, stage)
    stream = microbatches * sizes.tokens * model.hidden_size * sizes.width
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1

    def of(kind: Kind, phase: Phase, purpose: str, payload: int) -> Transfer:
        return Transfer(axis="tensor", kind=kind, phase=phase, purpose=purpose, ranks=parallel.tensor, payload=payload)

    # a block enters and leaves the tensor region twice, for attention and for the MLP
    outputs, inputs = "outputs of o_proj and down_proj", "inputs of attention and MLP"
    per_block = 2 * layers * stream
    if parallel.sequence:
        yield of("reduce-scatter", "forward", outputs, per_block * _passes(recipe) + is_first * stream)
        yield of("all-gather", "forward", inputs, per_block * _passes(recipe) + is_last * stream)
        yield of("reduce-scatter", "backward", inputs, per_block + is_last * stream)
        yield of("all-gather", "backward", outputs, per_block + is_first * stream)
    else:
        yield of("all-reduce", "forward", outputs, per_block * _passes(recipe) + is_first * stream)
        yield of("all-reduce", "backward", inputs, per_block + is_last * stream)
    extra = postmix_values(recipe)
    if extra is not None:
        # in activation space Postmix lies between the projections, in weight space beside o_proj
        again = _passes(recipe) if extra.per_token == 0 else _core_passes(recipe)
        once = layers * microbatches * (sizes.tokens * extra.per_token + extra.per_pass) * sizes.width
        yield of("all-reduce", "forward", "Postmix", again * once)
        yield of("all-reduce", "backward", "Postmix", once)
    if is_last:
        # the largest logit, the sum of exponentials and the label's logit of each token, in float32
        yield of("all-reduce", "forward", LOSS, microbatches * sizes.tokens * 3 * 4)


LOSS = "softmax of the loss"


@dataclass(frozen=True, kw_only=True)
class PostmixValues:
    """Values that one layer sums over the tensor ranks for Postmix, in a forward pass and again in a backward pass."""

    per_token: int
    per_pass: int
    """Whatever the number of tokens."""


def postmix_values(recipe: Recipe) -> PostmixValues | None:
    """What VHA adds to a pass over grouped attention of as many query and KV heads; Premix adds nothing."""
    attention = recipe.model.attention
    if not isinstance(attention, VirtualHeadAttention):
        return None
    channels = attention.postmix_rank * attention.head_dim
    if attention.postmix_space == "activation":
        return PostmixValues(per_token=channels, per_pass=0)
    return PostmixValues(per_token=0, per_pass=channels * recipe.model.hidden_size)


def _pipeline(recipe: Recipe, stage: int) -> Iterator[Transfer]:
    parallel, model, sizes = recipe.parallel, recipe.model, Sizes.of(recipe)
    pipeline, chunks = parallel.pipeline, parallel.virtual_pipeline
    if pipeline == 1:
        return
    is_first, is_last = stage == 0, stage == pipeline - 1
    boundary = recipe.num_microbatches * sizes.outer_tokens * model.hidden_size * sizes.width

    def of(kind: Kind, phase: Phase, purpose: str, payload: int, ranks: int) -> Transfer:
        return Transfer(axis="pipeline", kind=kind, phase=phase, purpose=purpose, ranks=ranks, payload=payload)

    yield of("send", "forward", "activations to the next stage", (chunks - is_last) * boundary, pipeline)
    yield of("send", "backward", "gradients to the stage before", (chunks - is_first) * boundary, pipeline)
    if model.tie_word_embeddings and (is_first or is_last):
        table = model.vocab_size // parallel.tensor * model.hidden_size * sizes.width
        yield of("all-reduce", "step", "gradient of the tied embedding", table, 2)


def _context(recipe: Recipe, stage: int) -> Iterator[Transfer]:
    parallel, sizes, attention = recipe.parallel, Sizes.of(recipe), recipe.model.attention
    heads = heads_per_rank(attention, parallel.tensor).key_value
    whole_sequence = recipe.num_microbatches * sizes.tokens * parallel.context
    payload = _num_layers(recipe, stage) * whole_sequence * 2 * heads * attention.head_dim * sizes.width

    def of(kind: Kind, phase: Phase, purpose: str, payload: int) -> Transfer:
        return Transfer(
            axis="context", kind=kind, phase=phase, purpose=purpose, ranks=parallel.context, payload=payload
        )

    yield of("all-gather", "forward", "keys and values", _core_passes(recipe) * payload)
    yield of("reduce-scatter", "backward", "gradients of keys and values", payload)


def _gradients(recipe: Recipe, tensors: Sequence[LocalTensor]) -> Iterator[Transfer]:
    """Sums once per optimizer step: of what every tensor rank holds whole, and of all over ranks with other tokens."""
    parallel, width = recipe.parallel, BYTES[recipe.precision.compute]
    size = sum(tensor.size for tensor in tensors)
    partial = sum(tensor.size for tensor in tensors if tensor.partial_gradient)

    def of(axis: Axis, ranks: int, purpose: str, values: int) -> Transfer:
        payload = values * width
        return Transfer(axis=axis, kind="all-reduce", phase="step", purpose=purpose, ranks=ranks, payload=payload)

    yield of("tensor", parallel.tensor, "gradients of tensors held whole", partial)
    yield of("context", parallel.context, "gradients", size)
    yield of("data", parallel.data, "gradients", size)
    if parallel.sharding_stage == 1:
        yield of("sharding", parallel.sharding, "gradients", size)


def _sharding(recipe: Recipe, stage: int) -> Iterator[Transfer]:
    """Owners send the weights; from stage 2 on every gradient goes to its owner in every microbatch."""
    parallel, width, microbatches = recipe.parallel, BYTES[recipe.precision.compute], recipe.num_microbatches
    units: Counter[str] = Counter()
    for tensor in stage_tensors(recipe.model, parallel, stage):
        units[tensor.unit] += tensor.size * width
    size = units.total()

    def of(kind: Kind, phase: Phase, purpose: str, payload: int) -> Transfer:
        return Transfer(
            axis="sharding", kind=kind, phase=phase, purpose=purpose, ranks=parallel.sharding, payload=payload
        )

    weights = "weights from their owners"
    if parallel.sharding_stage > 1:
        yield of("reduce", "backward", "gradients to their owners", microbatches * size)
    if parallel.sharding_stage < 3:
        yield of("broadcast", "step", weights, size)
        return
    yield of("broadcast", "step", weights + ", once", units.pop(REST))
    yield of("broadcast", "forward", weights, microbatches * units.total())
    del units["embedding"]  # the gradient of a table does not need its values
    yield of("broadcast", "backward", weights, microbatches * units.total())
