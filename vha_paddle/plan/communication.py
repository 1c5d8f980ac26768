"""What a rank communicates in one optimizer step, by axis of the mesh.

Two figures stand for each collective. `payload` is the whole tensor that it is about: what is summed (all-reduce),
what is gathered (all-gather: the result), what is summed and cut (reduce-scatter: the input), what is sent. `ring` is
what a rank sends when g ranks work in a ring: 2 (g - 1) / g of the payload for an all-reduce, (g - 1) / g for an
all-gather or a reduce-scatter, all of it for a broadcast (each rank but the last passes it on) and a send. An
all-to-all's payload is what a rank hands over, of which it keeps 1 / g.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vha_paddle.config import Attention, Recipe, VirtualHeadAttention
from vha_paddle.counts import BYTES, kv_cache_values
from vha_paddle.plan.stages import REST, LocalTensor, chunks_of, owned_tensors, stage_tensors
from vha_paddle.plan.terms import GRADIENT_BYTES, Sizes

Axis = Literal["tensor", "pipeline", "context", "data", "sharding", "expert"]
Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "send", "all-to-all"]
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
        if self.kind in ("all-gather", "reduce-scatter", "all-to-all"):
            return self.payload * (self.ranks - 1) // self.ranks
        return self.payload


def transfers(recipe: Recipe, stage: int, sharding_rank: int = 0) -> list[Transfer]:
    """Everything a rank of a pipeline stage communicates, apart from single numbers (the loss, the norm)."""
    found = [*_tensor(recipe, stage), *_pipeline(recipe, stage), *_context(recipe, stage), *_expert(recipe, stage)]
    found += [*_sharding(recipe, stage), *_gradients(recipe, stage, sharding_rank)]
    return [transfer for transfer in found if transfer.payload and transfer.ranks > 1]


def _passes(recipe: Recipe) -> int:
    """Forward passes of a block for each backward pass."""
    return 2 if recipe.memory.recompute == "full" else 1


def _core_passes(recipe: Recipe) -> int:
    """Forward passes of what lies between the projections of attention."""
    return 1 if recipe.memory.recompute == "none" else 2


def _attentions(recipe: Recipe, stage: int) -> Counter[Attention]:
    """The attentions of a stage's layers, and how many layers have each."""
    chunks = chunks_of(recipe.model.num_hidden_layers, recipe.parallel, stage)
    return Counter(recipe.model.attention_of(layer) for chunk in chunks for layer in chunk)


def _tensor(recipe: Recipe, stage: int) -> Iterator[Transfer]:
    parallel, model, sizes = recipe.parallel, recipe.model, Sizes.of(recipe)
    microbatches, attentions = recipe.num_microbatches, _attentions(recipe, stage)
    stream = microbatches * sizes.tokens * model.hidden_size * sizes.width
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1

    def of(kind: Kind, phase: Phase, purpose: str, payload: int) -> Transfer:
        return Transfer(axis="tensor", kind=kind, phase=phase, purpose=purpose, ranks=parallel.tensor, payload=payload)

    # a block enters and leaves the tensor region for attention, for the MLP or experts, and for a shared expert
    outputs, inputs = "outputs of o_proj and down_proj", "inputs of attention and MLP"
    has_shared_expert = model.experts is not None and model.experts.shared_expert_intermediate_size > 0
    per_block = (3 if has_shared_expert else 2) * attentions.total() * stream
    if parallel.sequence:
        yield of("reduce-scatter", "forward", outputs, per_block * _passes(recipe) + is_first * stream)
        yield of("all-gather", "forward", inputs, per_block * _passes(recipe) + is_last * stream)
        yield of("reduce-scatter", "backward", inputs, per_block + is_last * stream)
        yield of("all-gather", "backward", outputs, per_block + is_first * stream)
    else:
        yield of("all-reduce", "forward", outputs, per_block * _passes(recipe) + is_first * stream)
        yield of("all-reduce", "backward", inputs, per_block + is_last * stream)
    for attention, layers in attentions.items():
        extra = _postmix_values(attention, model.hidden_size)
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
    if not recipe.model.has_maps:
        return None
    return _postmix_values(recipe.model.attention, recipe.model.hidden_size)


def _postmix_values(attention: Attention, hidden_size: int) -> PostmixValues:
    if not isinstance(attention, VirtualHeadAttention) or attention.postmix_rank is None:
        return PostmixValues(per_token=0, per_pass=0)
    channels = attention.postmix_rank * attention.head_dim
    if attention.postmix_space == "activation":
        return PostmixValues(per_token=channels, per_pass=0)
    return PostmixValues(per_token=0, per_pass=channels * hidden_size)


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
        table = model.vocab_size // parallel.tensor * model.hidden_size * GRADIENT_BYTES
        yield of("all-reduce", "step", "gradient of the tied embedding", table, 2)


def _context(recipe: Recipe, stage: int) -> Iterator[Transfer]:
    """What a decoder would cache of each token is gathered for every layer, of a tensor rank's heads."""
    parallel, sizes = recipe.parallel, Sizes.of(recipe)
    per_token = sum(
        layers * kv_cache_values(attention, parallel.tensor) for attention, layers in _attentions(recipe, stage).items()
    )
    payload = recipe.num_microbatches * sizes.tokens * parallel.context * per_token * sizes.width

    def of(kind: Kind, phase: Phase, purpose: str, payload: int) -> Transfer:
        return Transfer(
            axis="context", kind=kind, phase=phase, purpose=purpose, ranks=parallel.context, payload=payload
        )

    yield of("all-gather", "forward", "keys and values", _core_passes(recipe) * payload)
    yield of("reduce-scatter", "backward", "gradients of keys and values", payload)


def _expert(recipe: Recipe, stage: int) -> Iterator[Transfer]:
    """Tokens go to the ranks of their experts and come back, k rows of D values each; gradients the same ways."""
    experts, parallel, sizes = recipe.model.experts, recipe.parallel, Sizes.of(recipe)
    if experts is None:
        return
    rows = recipe.num_microbatches * sizes.tokens * experts.num_experts_per_tok * _attentions(recipe, stage).total()
    payload = 2 * rows * recipe.model.hidden_size * sizes.width

    def of(phase: Phase, purpose: str, payload: int) -> Transfer:
        return Transfer(
            axis="expert", kind="all-to-all", phase=phase, purpose=purpose, ranks=parallel.expert, payload=payload
        )

    yield of("forward", "rows to experts and back", _passes(recipe) * payload)
    yield of("backward", "gradients of rows", payload)


def _gradients(recipe: Recipe, stage: int, sharding_rank: int) -> Iterator[Transfer]:
    """Sums once per optimizer step: of what every tensor rank holds whole, and of all over ranks with other tokens."""
    parallel = recipe.parallel
    tensors: Sequence[LocalTensor] = stage_tensors(recipe.model, parallel, stage)
    if parallel.sharding_stage > 1:  # the others' gradients have gone to their owners in backward; experts' stay
        owned = set(owned_tensors(recipe.model, parallel, stage, sharding_rank))
        tensors = [tensor for tensor in tensors if tensor.is_expert or tensor in owned]
    dense = sum(tensor.size for tensor in tensors if not tensor.is_expert)
    experts = sum(tensor.size for tensor in tensors if tensor.is_expert)
    partial = sum(tensor.size for tensor in tensors if tensor.partial_gradient)

    def of(axis: Axis, ranks: int, purpose: str, values: int) -> Transfer:
        payload = values * GRADIENT_BYTES
        return Transfer(axis=axis, kind="all-reduce", phase="step", purpose=purpose, ranks=ranks, payload=payload)

    yield of("tensor", parallel.tensor, "gradients of tensors held whole", partial)
    yield of("context", parallel.context, "gradients", dense + experts)
    yield of("data", parallel.data, "gradients", dense + experts)
    if parallel.sharding_stage == 1:
        yield of("sharding", parallel.sharding, "gradients", dense)
    yield of("sharding", parallel.sharding // parallel.expert, "gradients of experts", experts)


def _sharding(recipe: Recipe, stage: int) -> Iterator[Transfer]:
    """Owners send the weights; from stage 2 on every gradient goes to its owner in every microbatch.

    Experts stay at stage 1, among the ranks that hold the same ones.
    """
    parallel, width, microbatches = recipe.parallel, BYTES[recipe.precision.compute], recipe.num_microbatches
    units: Counter[str] = Counter()
    experts = 0
    for tensor in stage_tensors(recipe.model, parallel, stage):
        if tensor.is_expert:
            experts += tensor.size
        else:
            units[tensor.unit] += tensor.size
    dense = units.total()

    def of(kind: Kind, phase: Phase, purpose: str, payload: int, ranks: int = parallel.sharding) -> Transfer:
        return Transfer(axis="sharding", kind=kind, phase=phase, purpose=purpose, ranks=ranks, payload=payload)

    weights = "weights from their owners"
    yield of("broadcast", "step", "experts from their owners", experts * width, parallel.sharding // parallel.expert)
    if parallel.sharding_stage > 1:
        yield of("reduce", "backward", "gradients to their owners", microbatches * dense * GRADIENT_BYTES)
    if parallel.sharding_stage < 3:
        yield of("broadcast", "step", weights, dense * width)
        return
    yield of("broadcast", "step", weights + ", once", units.pop(REST) * width)
    yield of("broadcast", "forward", weights, microbatches * units.total() * width)
    del units["embedding"]  # the gradient of a table does not need its values
    yield of("broadcast", "backward", weights, microbatches * units.total() * width)
