"""What one layer keeps of a microbatch for its backward pass, in bytes by term, for every attention kind.

Of a GPU with a flash attention kernel, which keeps one float32 per query and no scores; everything else keeps what
the operations of `ops`, `attention` and `model` keep on a GPU. docs/planning.md has the terms in letters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vha_paddle.config import (
    Attention,
    ComposedAttention,
    FactorizedAttention,
    GroupedAttention,
    GroupedValueAttention,
    LatentAttention,
    Model,
    Parallel,
    Recipe,
    VirtualHeadAttention,
)
from vha_paddle.counts import BYTES, heads_per_rank

STATISTIC = 4
"""Bytes of the float32 that a norm keeps per row, and flash attention per query."""

GRADIENT_BYTES = 4
"""Gradients are summed over microbatches and ranks in float32, whatever dtype the weights have."""

MLP = "gate, up and their product"
OUTER = "inputs of the two norms"
PROJECTED = "inputs of q, k, v and of gate, up"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a microbatch on one rank."""

    tokens: int
    """Tokens T inside the tensor region: B * S / c."""
    outer_tokens: int
    """Tokens outside it: T, or T / t where the sequence is cut."""
    width: int
    """Bytes of a value."""
    sequence_length: int
    parallel: Parallel

    @classmethod
    def of(cls, recipe: Recipe) -> Sizes:
        parallel = recipe.parallel
        tokens = recipe.data.micro_batch_size * recipe.data.sequence_length // parallel.context
        outer = tokens // parallel.tensor if parallel.sequence else tokens
        return cls(tokens, outer, BYTES[recipe.precision.compute], recipe.data.sequence_length, parallel)

    def values(self, per_token: int) -> int:
        """Bytes of so many values of each token inside the tensor region."""
        return self.tokens * per_token * self.width

    def rows(self, per_token: int, size: int) -> int:
        """The same for rows of `size` values that a norm or flash attention keeps with a float32 each."""
        return self.tokens * per_token * (size * self.width + STATISTIC)


def stream_terms(model: Model, sizes: Sizes) -> dict[str, int]:
    """What lies on the residual stream, and the inputs that enter the tensor region."""
    outer = sizes.outer_tokens * (model.hidden_size * sizes.width + STATISTIC)
    return {OUTER: 2 * outer, PROJECTED: sizes.values(2 * model.hidden_size)}


def mlp_terms(model: Model, sizes: Sizes) -> dict[str, int]:
    """The feed-forward. Of experts, rows are counted as if every rank got its equal share of them."""
    tensor = sizes.parallel.tensor
    if model.experts is None:
        assert model.intermediate_size is not None, "checked with the recipe"
        return {MLP: sizes.values(3 * model.intermediate_size // tensor)}
    experts = model.experts
    rows = experts.num_experts_per_tok
    widths = rows * experts.moe_intermediate_size + experts.shared_expert_intermediate_size
    router = experts.num_experts + (model.hidden_size if sizes.width < STATISTIC else 0)
    return {
        "router: its input and probabilities in float32": sizes.tokens * router * STATISTIC,
        "rows into the experts": sizes.values(rows * model.hidden_size),
        MLP: sizes.values(3 * widths // tensor),
        "rows out of the experts, to be weighted": sizes.values(rows * model.hidden_size),
    }


@dataclass(frozen=True, kw_only=True)
class AttentionTerms:
    """What attention keeps beside the inputs of its first projections."""

    core: dict[str, int]
    """Between the projections: what `memory.recompute: selective` makes again."""
    outside: dict[str, int]
    """The rest."""
    ends: int
    """Bytes of the core's inputs and output, which `selective` keeps in its place."""


def attention_terms(attention: Attention, model: Model, sizes: Sizes) -> AttentionTerms:
    return _TERMS[attention.kind](attention, model, sizes)


def _flash(sizes: Sizes, *, query: int, key: int, value: int, output: int, num_query: int) -> dict[str, int]:
    """Flash attention: values of a token's queries, keys, values and outputs, and its query heads."""
    terms = {
        "queries into attention": sizes.values(query),
        "keys and values into attention": sizes.values(key + value) * sizes.parallel.context,
        "output of attention": sizes.values(output) + sizes.tokens * num_query * STATISTIC,
    }
    if sizes.parallel.context > 1:
        terms["output of attention, its pieces joined"] = sizes.values(output)
    return terms


def _qwen3(attention: GroupedAttention | VirtualHeadAttention, sizes: Sizes) -> dict[str, int]:
    """QK-norm, if there is one, RoPE and attention of grouped heads. To add a bias keeps nothing."""
    heads, size = heads_per_rank(attention, sizes.parallel.tensor), attention.head_dim
    turned, query, key = heads.query + heads.key_value, heads.query * size, heads.key_value * size
    return {
        **({"heads into QK-norm": sizes.rows(turned, size)} if attention.qk_norm else {}),
        "heads inside RoPE": sizes.values(2 * turned * size),
        **_flash(sizes, query=query, key=key, value=key, output=query, num_query=heads.query),
    }


GATE = "gate, and the gated output"


def _grouped(attention: GroupedAttention, model: Model, sizes: Sizes) -> AttentionTerms:
    heads = heads_per_rank(attention, sizes.parallel.tensor)
    query = heads.query * attention.head_dim
    ends = query + 2 * heads.key_value * attention.head_dim + query
    outside = {GATE: sizes.values(2 * query)} if attention.output_gate else {}
    return AttentionTerms(core=_qwen3(attention, sizes), outside=outside, ends=sizes.values(ends))


def _vha(attention: VirtualHeadAttention, model: Model, sizes: Sizes) -> AttentionTerms:
    heads, size = heads_per_rank(attention, sizes.parallel.tensor), attention.head_dim
    projected, query = heads.projected * attention.projected_head_dim, heads.query * size
    core, outside = _qwen3(attention, sizes), {}
    if attention.premix != "none":
        core["heads into Premix"] = sizes.values(projected)
    if attention.premix == "silu":
        core["Premix before SiLU"] = sizes.values(query)
    if attention.postmix != "none":
        assert attention.postmix_rank is not None, "checked with the recipe"
        mixed = attention.postmix_rank * size + query
        if attention.postmix_space == "weight":
            outside["Postmix: C and the mixed W_O"] = mixed * model.hidden_size * sizes.width
        else:
            core["Postmix: z and its output"] = sizes.values(mixed)
    if attention.postmix == "silu":
        assert attention.postmix_rank is not None, "checked with the recipe"
        core["Postmix: z before SiLU"] = sizes.values(attention.postmix_rank * size)
    ends = projected + 2 * heads.key_value * size + query
    if attention.output_gate != "none":
        core[GATE] = sizes.values(2 * query)
        ends += query
    return AttentionTerms(core=core, outside=outside, ends=sizes.values(ends))


def _mla(attention: LatentAttention, model: Model, sizes: Sizes) -> AttentionTerms:
    heads = heads_per_rank(attention, sizes.parallel.tensor).query
    latent, rotary, value = attention.kv_lora_rank, attention.qk_rope_head_dim, heads * attention.v_head_dim
    query = heads * (attention.qk_nope_head_dim + rotary)
    core = {
        "latent of keys and values, into its norm": sizes.rows(1, latent),
        "the same, normed": sizes.values(latent) * sizes.parallel.context,
        "heads inside RoPE": sizes.values(2 * (heads + 1) * rotary),
        **_flash(sizes, query=query, key=query, value=value, output=value, num_query=heads),
    }
    outside = {}
    if attention.q_lora_rank is not None:
        outside["latent of queries, and normed"] = _normed(sizes, attention.q_lora_rank)
    return AttentionTerms(core=core, outside=outside, ends=sizes.values(query + latent + rotary + value))


def _mfa(attention: FactorizedAttention, model: Model, sizes: Sizes) -> AttentionTerms:
    heads, size = heads_per_rank(attention, sizes.parallel.tensor).query, attention.head_dim
    query = heads * size
    core = {
        "heads inside RoPE": sizes.values(2 * (heads + 1) * size),
        **_flash(sizes, query=query, key=size, value=size, output=query, num_query=heads),
    }
    outside = {"latent of queries, and normed": _normed(sizes, attention.q_lora_rank)}
    return AttentionTerms(core=core, outside=outside, ends=sizes.values(2 * query + 2 * size))


def _normed(sizes: Sizes, size: int) -> int:
    """A latent of `size` values before and after its norm."""
    return sizes.rows(1, size) + sizes.values(size)


def _gva(attention: GroupedValueAttention, model: Model, sizes: Sizes) -> AttentionTerms:
    heads, rotary = heads_per_rank(attention, sizes.parallel.tensor), attention.qk_rope_head_dim
    query, value = heads.query * attention.head_dim, heads.key_value * attention.head_dim
    core = {
        "queries into the key map": sizes.values(query),
        "heads inside RoPE": sizes.values(2 * (heads.query + 1) * rotary),
        **_flash(
            sizes,
            query=query + heads.query * rotary,
            key=value + heads.key_value * rotary,
            value=value,
            output=query,
            num_query=heads.query,
        ),
    }
    ends = query + heads.query * rotary + value + rotary + query
    return AttentionTerms(core=core, outside={}, ends=sizes.values(ends))


def _dcmha(attention: ComposedAttention, model: Model, sizes: Sizes) -> AttentionTerms:
    """No flash kernel composes heads: scores and weights are written out, and kept at five stages."""
    heads, rank = heads_per_rank(attention, sizes.parallel.tensor).query, attention.compose_rank
    in_group = attention.num_attention_heads // attention.num_groups
    query, hidden, diagonal = heads * attention.head_dim, 8 * rank * heads, 4 * heads
    core = {
        "heads into QK-norm": sizes.rows(2 * heads, attention.head_dim),
        "heads inside RoPE": sizes.values(4 * query),
        "queries into attention": sizes.values(query),
        "keys and values into attention": sizes.values(2 * query) * sizes.parallel.context,
        "factors of the composition": sizes.values(3 * hidden + 2 * diagonal),
        "matrices of the composition": sizes.values(4 * heads * in_group),
        "scores and weights": sizes.values(5 * heads * sizes.sequence_length),
    }
    return AttentionTerms(core=core, outside={}, ends=sizes.values(4 * query + hidden + diagonal))


_TERMS: dict[str, Callable[[Any, Model, Sizes], AttentionTerms]] = {
    "grouped": _grouped,
    "vha": _vha,
    "mla": _mla,
    "mfa": _mfa,
    "gva": _gva,
    "dcmha": _dcmha,
}
