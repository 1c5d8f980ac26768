"""What a model costs, from its numbers alone: parameters, FLOPs, cache. Memory and communication: `vha_paddle.plan`.

Letters: D hidden, P physical heads, K key/value heads, N query heads (virtual under VHA, N = P*K), H head
dim, R postmix rank, F feed-forward, V vocabulary, B batch, S sequence, t tensor-parallel degree.

The split over t ranks, per layer:

    tensor                         kind vha                 kind grouped
    q_proj, o_proj, postmix        by physical head, P/t    by query head, N/t
    k_proj, v_proj                 whole on every rank      by KV head, K/t; whole where t > K
    premix, norms                  whole on every rank      whole on every rank
    MLP                            by column and row, F/t   the same

The embedding and the head are split by vocabulary, V/t. A tied head is the embedding and counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from vha_paddle.config import Attention, GroupedAttention, Model, Recipe, VirtualHeadAttention
from vha_paddle.errors import UserError
from vha_paddle.tensors import attention_tensors

Dtype = Literal["float32", "bfloat16"]

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
TRAINING_OVER_FORWARD = 3  # backward takes two products for each of forward's: one by each factor


def folded(model: Model) -> Model:
    """The model that is served: N plain query heads for a VHA model; a grouped model is itself."""
    attention = model.attention
    if not isinstance(attention, VirtualHeadAttention):
        return model
    grouped = GroupedAttention(
        kind="grouped",
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
    )
    return model.model_copy(update={"attention": grouped})


@dataclass(frozen=True, kw_only=True)
class HeadsPerRank:
    """Heads of one layer that a tensor-parallel rank holds."""

    projected: int
    """Heads that q_proj makes: physical ones under VHA."""
    query: int
    """Heads that attend: virtual ones under VHA."""
    key_value: int
    """KV heads that it computes."""
    key_value_held: int
    """KV heads whose weights it holds: all of them where ranks outnumber them and each computes one."""


def heads_per_rank(attention: Attention, tensor: int = 1) -> HeadsPerRank:
    """The split over `tensor` ranks, as the table above. Raises `UserError` where the heads do not divide."""
    num_kv_heads = attention.num_key_value_heads
    if isinstance(attention, VirtualHeadAttention):
        projected = _split(attention.num_physical_heads, tensor, "physical heads")
        query, held, key_value = projected * num_kv_heads, num_kv_heads, num_kv_heads
    else:
        projected = query = _split(attention.num_attention_heads, tensor, "query heads")
        shared = tensor > num_kv_heads and tensor % num_kv_heads == 0
        held = num_kv_heads if shared else _split(num_kv_heads, tensor, "KV heads")
        key_value = 1 if shared else held
    return HeadsPerRank(projected=projected, query=query, key_value=key_value, key_value_held=held)


def attention_parameters(model: Model, tensor: int = 1) -> dict[str, int]:
    """Parameters of one layer's attention on one rank, by tensor."""
    specs = attention_tensors(model.attention, model.hidden_size, tensor)
    return {spec.name.removesuffix(".weight"): spec.local_size(tensor) for spec in specs}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a model, or of one tensor-parallel rank's part of it."""

    embedding: int
    attention_per_layer: int
    mlp_per_layer: int
    norms_per_layer: int
    """The two norms on the residual stream; QK-norm belongs to attention."""
    num_layers: int
    final_norm: int
    lm_head: int
    """0 where the head is tied to the embedding."""

    @property
    def per_layer(self) -> int:
        return self.attention_per_layer + self.mlp_per_layer + self.norms_per_layer

    @property
    def non_embedding(self) -> int:
        """All but the embedding and the head."""
        return self.num_layers * self.per_layer + self.final_norm

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding + self.lm_head


def parameters(model: Model, tensor: int = 1) -> Parameters:
    """Parameters of one of `tensor` ranks. Raises `UserError` where heads, MLP or vocabulary do not fit."""
    hidden = model.hidden_size
    vocabulary = _split(model.vocab_size, tensor, "model.vocab_size") * hidden
    return Parameters(
        embedding=vocabulary,
        attention_per_layer=sum(attention_parameters(model, tensor).values()),
        mlp_per_layer=3 * hidden * _split(model.intermediate_size, tensor, "model.intermediate_size"),
        norms_per_layer=2 * hidden,
        num_layers=model.num_hidden_layers,
        final_norm=hidden,
        lm_head=0 if model.tie_word_embeddings else vocabulary,
    )


@dataclass(frozen=True, kw_only=True)
class FlopRule:
    """What a count of FLOPs includes. Conventions differ, so every count names its own."""

    sequence_length: int
    """Tokens S in the sequence: the keys that a token's scores are taken over."""
    lm_head: bool = True
    """Count the output projection to the vocabulary."""
    causal: bool = False
    """Halve the scores: the mask hides about half of the S x S square, and some kernels skip that half."""
    folded: bool = False
    """Count the model that is served in place of the one that is trained."""


def forward_flops_by_part(model: Model, rule: FlopRule) -> dict[str, int]:
    """FLOPs of a forward pass per token, over all layers, by part.

    Matrix products only, two FLOPs for each multiply-add; norms, RoPE, softmax and SiLU are left out.
    """
    if rule.folded:
        model = folded(model)
    attention, layers = model.attention, model.num_hidden_layers
    weights = attention_parameters(model)
    heads_width = attention.num_attention_heads * attention.head_dim
    keys_twice = rule.sequence_length if rule.causal else 2 * rule.sequence_length
    per_layer = {part: 2 * weights[part] for part in ("q_proj", "k_proj", "v_proj", "o_proj")}
    per_layer["scores"] = 2 * keys_twice * heads_width  # queries with keys, then probabilities with values
    per_layer["mlp"] = 2 * parameters(model).mlp_per_layer
    if isinstance(attention, VirtualHeadAttention):
        # Premix is used once per physical head; each factor of Postmix meets every channel of every head.
        per_layer["premix"] = 2 * weights["premix"] * attention.num_physical_heads
        per_layer["postmix"] = 2 * (2 * heads_width * attention.postmix_rank)
    flops = {part: layers * count for part, count in per_layer.items()}
    flops["lm_head"] = 2 * model.hidden_size * model.vocab_size if rule.lm_head else 0
    return flops


def forward_flops(model: Model, rule: FlopRule) -> int:
    return sum(forward_flops_by_part(model, rule).values())


def training_flops(model: Model, rule: FlopRule) -> int:
    """FLOPs per token of forward and backward: nothing recomputed, the optimizer left out."""
    return TRAINING_OVER_FORWARD * forward_flops(model, rule)


def kv_cache_bytes(attention: Attention, dtype: Dtype) -> int:
    """Bytes of keys and values that a layer keeps per token of context."""
    return 2 * attention.num_key_value_heads * attention.head_dim * BYTES[dtype]


def summary(recipe: Recipe) -> dict[str, Any]:
    """The costs of a run, memory and communication apart, as plain values for JSON; keys carry their units."""
    model = recipe.model
    whole, tokens = parameters(model), recipe.num_steps * recipe.tokens_per_step
    rule = FlopRule(sequence_length=recipe.data.sequence_length, causal=True)  # as MFU and tools/plan.py count
    without_head = replace(rule, lm_head=False)
    cache, layers = kv_cache_bytes(model.attention, "bfloat16"), model.num_hidden_layers
    return {
        "run": recipe.run.name,
        "attention": model.attention.kind,
        "ranks": recipe.num_ranks,
        "parameters": {
            "total": whole.total,
            "non_embedding": whole.non_embedding,
            "attention_per_layer": whole.attention_per_layer,
        },
        "schedule": {"tokens_per_step": recipe.tokens_per_step, "steps": recipe.num_steps, "tokens": tokens},
        "flops": {
            "forward_per_token": forward_flops(model, rule),
            "training_per_token": training_flops(model, rule),
            "training_per_token_without_lm_head": training_flops(model, without_head),
            "training_total": training_flops(model, rule) * tokens,
        },
        "kv_cache_bytes_bfloat16": {"per_token_per_layer": cache, "per_token": cache * layers},
    }


def render(summary: dict[str, Any]) -> str:
    """A summary as a table to read."""
    lines = [f"{summary['run']}: {summary['attention']} attention on {summary['ranks']} ranks"]
    for title, section in ((key, value) for key, value in summary.items() if isinstance(value, dict)):
        lines.append(title.replace("_", " "))
        for name, value in section.items():
            short = _binary(value) if "bytes" in title else _decimal(value)
            lines.append(f"  {name.replace('_', ' '):<36}{value:>32,}  {short:>12}")
    return "\n".join(lines)


def _split(size: int, tensor: int, name: str) -> int:
    if size % tensor:
        raise UserError(f"tensor-parallel degree {tensor}: must divide {name}={size}; use a divisor")
    return size // tensor


def _binary(value: float) -> str:
    return _with_unit(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _decimal(value: float) -> str:
    return _with_unit(value, 1000, ("", "k", "M", "G", "T", "P", "E", "Z", "Y"))


def _with_unit(value: float, step: int, units: tuple[str, ...]) -> str:
    """Three decimals, and the largest unit that leaves at least 1."""
    power = 0
    while value >= step and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{value:.3f} {units[power]}" if power else f"{value} {units[0]}".rstrip()
