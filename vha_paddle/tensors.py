"""Every parameter of a decoder: canonical name, logical shape, and how the ranks hold it. Plain numbers, no Paddle.

This is the table that the counts, the plan, the names and the export are computed from; the layers that are built
must agree with it (tests/test_tensors.py). Letters: D hidden, N query heads (virtual under VHA), P physical heads, K
key/value heads, H head dim, R Postmix rank, F feed-forward, E experts, V vocabulary, C latent, t tensor degree.

How tensor parallelism holds a tensor (`held`):

    split     each rank has 1/t of it and makes the gradient of its part
    partial   whole on every rank, which uses it on its part of the work: gradients are summed over the ranks
    stream    whole on every rank, on the residual stream: partial only under sequence parallelism
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from vha_paddle.config import (
    Attention,
    ComposedAttention,
    FactorizedAttention,
    GroupedAttention,
    GroupedValueAttention,
    LatentAttention,
    MixtureOfExperts,
    Model,
    VirtualHeadAttention,
)

Held = Literal["split", "partial", "stream"]

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

GROUPS = ("embedding", "attention", "premix", "postmix", "feed_forward", "router", "experts", "norms", "head")
"""Kinds of parameters, whose gradient norms a run records."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One parameter."""

    name: str
    """Canonical name, or within a layer the part after `self_attn.` or `mlp.`."""
    shape: tuple[int, ...]
    """Logical shape; a linear weight is `[in, out]`."""
    held: Held
    is_expert: bool = False
    """Its first axis counts experts, which expert parallelism divides among the ranks."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def local_size(self, tensor: int = 1, expert: int = 1) -> int:
        """Values that one rank holds."""
        size = self.size // (tensor if self.held == "split" else 1)
        return size // expert if self.is_expert else size


def attention_tensors(attention: Attention, hidden_size: int, tensor: int = 1) -> list[TensorSpec]:
    """The tensors of one `self_attn`, in the order of the built layer's parameters.

    `tensor` decides how K and V are held where there are fewer KV heads than ranks, and nothing else.
    """
    return list(_ATTENTION[attention.kind](attention, hidden_size, tensor))


def mlp_tensors(model: Model) -> list[TensorSpec]:
    """The tensors of one `mlp`, in the order of the built layer's parameters."""
    if model.experts is not None:
        return list(_experts(model.experts, model.hidden_size))
    assert model.intermediate_size is not None, "checked with the recipe"
    return list(_swiglu("", model.hidden_size, model.intermediate_size))


def layer_tensors(model: Model, layer: int, tensor: int = 1) -> list[TensorSpec]:
    """The tensors of one block under their canonical names, in the order of the built block's parameters."""
    prefix, width = f"model.layers.{layer}.", (model.hidden_size,)
    attention = attention_tensors(model.attention_of(layer), model.hidden_size, tensor)
    return [
        TensorSpec(name=f"{prefix}input_layernorm.weight", shape=width, held="stream"),
        *(replace(spec, name=f"{prefix}self_attn.{spec.name}") for spec in attention),
        TensorSpec(name=f"{prefix}post_attention_layernorm.weight", shape=width, held="stream"),
        *(replace(spec, name=f"{prefix}mlp.{spec.name}") for spec in mlp_tensors(model)),
    ]


def embedding_tensor(model: Model) -> TensorSpec:
    return TensorSpec(name=EMBEDDING, shape=(model.vocab_size, model.hidden_size), held="split")


def end_tensors(model: Model) -> list[TensorSpec]:
    """Final norm, and the head where it is not the embedding."""
    norm = TensorSpec(name=FINAL_NORM, shape=(model.hidden_size,), held="stream")
    if model.tie_word_embeddings:
        return [norm]
    return [norm, TensorSpec(name=LM_HEAD, shape=(model.hidden_size, model.vocab_size), held="split")]


def model_tensors(model: Model) -> list[TensorSpec]:
    """Every tensor of a decoder, in the order of its forward pass."""
    layers = (spec for layer in range(model.num_hidden_layers) for spec in layer_tensors(model, layer))
    return [embedding_tensor(model), *layers, *end_tensors(model)]


def kv_held(num_key_value_heads: int, tensor: int) -> Held:
    """How W_K and W_V of grouped heads are held: by KV head, or whole where ranks outnumber them."""
    return "split" if num_key_value_heads % tensor == 0 else "partial"


def _linear(name: str, rows: int, columns: int, held: Held = "split") -> TensorSpec:
    return TensorSpec(name=f"{name}.weight", shape=(rows, columns), held=held)


def _gain(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=f"{name}.weight", shape=(size,), held="partial")


def _projection(name: str, rows: int, columns: int, bias: bool, held: Held = "split") -> Iterator[TensorSpec]:
    """A linear weight and, where it has one, its bias, which is held as the columns are."""
    yield _linear(name, rows, columns, held)
    if bias:
        yield TensorSpec(name=f"{name}.bias", shape=(columns,), held=held)


def _output_projection(rows: int, columns: int, bias: bool) -> Iterator[TensorSpec]:
    """The output projection. Its bias is added after the ranks' sum, on the residual stream."""
    yield _linear("o_proj", rows, columns)
    if bias:
        yield TensorSpec(name="o_proj.bias", shape=(columns,), held="stream")


def _qk_gains(attention: GroupedAttention | VirtualHeadAttention) -> Iterator[TensorSpec]:
    if attention.qk_norm:
        yield _gain("q_norm", attention.head_dim)
        yield _gain("k_norm", attention.head_dim)


def _grouped(attention: GroupedAttention, D: int, tensor: int) -> Iterator[TensorSpec]:
    N, K, H = attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim
    bias = attention.attention_bias
    yield from _projection("q_proj", D, N * H, bias)
    yield from _projection("k_proj", D, K * H, bias, kv_held(K, tensor))
    yield from _projection("v_proj", D, K * H, bias, kv_held(K, tensor))
    yield from _qk_gains(attention)
    if attention.output_gate:
        yield _linear("g_proj", D, N * H)
    yield from _output_projection(N * H, D, bias)


def _vha(attention: VirtualHeadAttention, D: int, tensor: int) -> Iterator[TensorSpec]:
    N, K, H, R = (
        attention.num_attention_heads,
        attention.num_key_value_heads,
        attention.head_dim,
        attention.postmix_rank,
    )
    # attributes of the layer itself come before those of its parts
    if attention.premix != "none":
        yield TensorSpec(name="premix", shape=(K, attention.projected_head_dim, H), held="partial")
    if attention.postmix != "none":
        assert R is not None, "checked with the recipe"
        yield TensorSpec(name="postmix_a", shape=(N, R), held="split")
        yield TensorSpec(name="postmix_b", shape=(N, R), held="split")
    bias = attention.attention_bias
    yield from _projection("q_proj", D, attention.num_projected_heads * attention.projected_head_dim, bias)
    yield from _projection("k_proj", D, K * H, bias, "partial")
    yield from _projection("v_proj", D, K * H, bias, "partial")
    yield from _qk_gains(attention)
    if attention.output_gate != "none":
        yield _linear("g_proj", D, N * H)
    yield from _output_projection(N * H, D, bias)


def _mla(attention: LatentAttention, D: int, tensor: int) -> Iterator[TensorSpec]:
    N, C = attention.num_attention_heads, attention.kv_lora_rank
    content, rotary, value = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    queries = N * (content + rotary)
    if attention.q_lora_rank is None:
        yield _linear("q_proj", D, queries)
    else:
        yield _linear("q_a_proj", D, attention.q_lora_rank, "partial")
        yield _gain("q_a_layernorm", attention.q_lora_rank)
        yield _linear("q_b_proj", attention.q_lora_rank, queries)
    yield TensorSpec(name="kv_a_proj_with_mqa.weight", shape=(D, C + rotary), held="partial")
    yield _gain("kv_a_layernorm", C)
    yield _linear("kv_b_proj", C, N * (content + value))
    yield _linear("o_proj", N * value, D)


def _mfa(attention: FactorizedAttention, D: int, tensor: int) -> Iterator[TensorSpec]:
    N, C, Q = attention.num_attention_heads, attention.head_dim, attention.q_lora_rank
    yield _linear("q_a_proj", D, Q, "partial")
    yield _gain("q_a_layernorm", Q)
    yield _linear("q_b_proj", Q, N * C)
    yield _linear("k_proj", D, C, "partial")
    yield _linear("v_proj", D, C, "partial")
    yield _linear("o_proj", N * C, D)


def _gva(attention: GroupedValueAttention, D: int, tensor: int) -> Iterator[TensorSpec]:
    N, K, H, rotary = (
        attention.num_attention_heads,
        attention.num_key_value_heads,
        attention.head_dim,
        attention.qk_rope_head_dim,
    )
    yield TensorSpec(name="key_map", shape=(N, H, H), held="split")
    yield _linear("q_proj", D, N * (H + rotary))
    yield _linear("v_proj", D, K * H, kv_held(K, tensor))
    yield _linear("k_rope_proj", D, rotary, "partial")
    yield _linear("o_proj", N * H, D)


def _dcmha(attention: ComposedAttention, D: int, tensor: int) -> Iterator[TensorSpec]:
    N, H, G, R = attention.num_attention_heads, attention.head_dim, attention.num_groups, attention.compose_rank
    heads = N // G
    factors = 2 * R * heads
    for stage in ("pre", "post"):
        yield TensorSpec(name=f"{stage}_compose", shape=(G, heads, heads), held="split")
    # of each token, four times (queries' and keys', before and after softmax): two factors [R, heads] by way of a
    # hidden layer of the same size, and a diagonal [heads]
    yield TensorSpec(name="compose_factors", shape=(G, 4, factors, factors), held="split")
    yield _linear("q_proj", D, N * H)
    yield _linear("k_proj", D, N * H)
    yield _linear("v_proj", D, N * H)
    yield _gain("q_norm", H)
    yield _gain("k_norm", H)
    yield _linear("compose_proj", D, G * 4 * factors)
    yield _linear("diagonal_proj", D, G * 4 * heads)
    yield _linear("o_proj", N * H, D)


_ATTENTION: dict[str, Callable[[Any, int, int], Iterator[TensorSpec]]] = {
    "grouped": _grouped,
    "vha": _vha,
    "mla": _mla,
    "mfa": _mfa,
    "gva": _gva,
    "dcmha": _dcmha,
}


def _swiglu(prefix: str, D: int, F: int) -> Iterator[TensorSpec]:
    for name in ("gate_proj", "up_proj"):
        yield _linear(f"{prefix}{name}", D, F)
    yield _linear(f"{prefix}down_proj", F, D)


def _experts(experts: MixtureOfExperts, D: int) -> Iterator[TensorSpec]:
    E, F = experts.num_experts, experts.moe_intermediate_size
    # the router is whole on every rank and sees every token there, so its gradient is partial like the experts' input
    yield _linear("gate", D, E, "partial")
    for name in ("gate_proj", "up_proj"):
        yield TensorSpec(name=f"experts.{name}", shape=(E, D, F), held="split", is_expert=True)
    yield TensorSpec(name="experts.down_proj", shape=(E, F, D), held="split", is_expert=True)
    if experts.shared_expert_intermediate_size:
        yield from _swiglu("shared_expert.", D, experts.shared_expert_intermediate_size)


def group_of(name: str) -> str:
    """Which of `GROUPS` a parameter belongs to, by its canonical name: `attention` holds the projections with their
    biases and what maps other kinds than VHA have, `feed_forward` also the shared expert."""
    if name in (EMBEDDING, LM_HEAD):
        return "embedding" if name == EMBEDDING else "head"
    if "norm" in name:
        return "norms"
    if ".self_attn." in name:
        return "premix" if name.endswith(".premix") else "postmix" if ".postmix_" in name else "attention"
    return "router" if ".mlp.gate." in name else "experts" if ".mlp.experts." in name else "feed_forward"
