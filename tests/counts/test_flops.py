"""FLOPs against every matrix product of a layer, enumerated here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.counts.models import EXPERTS, GQA_8, HYBRID, SHARED, TINY, grouped, tiny
from vha_paddle import counts
from vha_paddle.config import (
    ComposedAttention,
    GroupedAttention,
    LatentAttention,
    Model,
    VirtualHeadAttention,
)

S = 10
Product = tuple[int, int, int]


def qwen3_products(attention: GroupedAttention | VirtualHeadAttention, keys: int) -> Iterator[Product]:
    """`[rows, inner] @ [inner, columns]` for a sequence of S tokens that see `keys` keys each."""
    N, K, H = attention.num_attention_heads, attention.num_key_value_heads, 6
    yield from [(S, 12, K * H)] * 2 + [(S, N * H, 12)]
    yield from [(S, H, keys), (S, keys, H)] * N
    if attention.output_gate not in (False, "none"):
        yield (S, 12, N * H)
    if isinstance(attention, GroupedAttention) or attention.premix == "none":
        yield (S, 12, N * H)
    else:
        P, width = N // K, attention.physical_head_dim or H
        yield (S, 12, P * width)
        yield from [(S * P, width, H)] * K
    if isinstance(attention, VirtualHeadAttention) and attention.postmix_rank is not None:
        yield from [(attention.postmix_rank, N, H), (N, attention.postmix_rank, H)] * S


def mla_products(attention: LatentAttention, absorbed: bool) -> Iterator[Product]:
    """N 4, latent 10, content 6, rotary 2, values 4."""
    if attention.q_lora_rank is None:
        yield (S, 12, 4 * 8)
    else:
        yield from [(S, 12, 8), (S, 8, 4 * 8)]
    yield from [(S, 12, 10 + 2), (S, 4 * 4, 12)]
    if absorbed:  # queries into the latent and outputs out of it, each head by its own part of W_UK and W_UV
        yield from [(S, 6, 10), (S, 10, 4)] * 4
        yield from [(S, 10 + 2, S), (S, S, 10)] * 4
    else:
        yield (S, 10, 4 * (6 + 4))
        yield from [(S, 6 + 2, S), (S, S, 4)] * 4


def dcmha_products(attention: ComposedAttention) -> Iterator[Product]:
    """N 4 in 2 groups of 2, H 6, R 1: factors and their hidden layer 2 * 1 * 2 wide."""
    yield from [(S, 12, 4 * 6)] * 3 + [(S, 4 * 6, 12), (S, 12, 2 * 4 * 4), (S, 12, 2 * 4 * 2)]
    yield from [(S, 4, 4)] * 2 * 4  # of each group, for queries and keys before and after softmax
    yield from [(2, 1, 2)] * 2 * 4 * S  # the matrix of each token
    yield from [(S, 6, S), (S, S, 6)] * 4
    for _stage in range(2):
        yield from [(2, 2, S)] * 2 * S * 2  # each group's scores of a query by its matrix, and of a key by its own


OTHERS: dict[str, list[Product]] = {
    "mfa": [(S, 12, 8), (S, 8, 24), (S, 12, 6), (S, 12, 6), (S, 24, 12)] + [(S, 6, S), (S, S, 6)] * 4,
    "gva": [(S, 12, 4 * 8), (S, 12, 12), (S, 12, 2), (S, 24, 12)] + [(S, 6, 6), (S, 8, S), (S, S, 6)] * 4,
}
MLP: list[Product] = [(S, 12, 20), (S, 12, 20), (S, 20, 12)]


def products(kind: str, absorbed: bool = False) -> list[Product]:
    attention = TINY[kind]
    if isinstance(attention, GroupedAttention | VirtualHeadAttention):
        return list(qwen3_products(attention, S))
    if isinstance(attention, LatentAttention):
        return list(mla_products(attention, absorbed))
    return list(dcmha_products(attention)) if isinstance(attention, ComposedAttention) else OTHERS[kind]


def flops(found: list[Product]) -> int:
    return sum(2 * rows * inner * columns for rows, inner, columns in found)


HEAD = flops([(S, 12, 40)])


@pytest.mark.parametrize("kind", TINY)
def test_forward_flops_are_the_sum_of_the_matrix_products(kind: str) -> None:
    rule = counts.FlopRule(sequence_length=S)
    assert S * counts.forward_flops(tiny(TINY[kind]), rule) == 3 * flops(products(kind) + MLP) + HEAD


@pytest.mark.parametrize("kind", ["mla", "mla_latent_queries"])
def test_an_absorbed_mla_attends_in_the_latent(kind: str) -> None:
    rule = counts.FlopRule(sequence_length=S, absorbed=True)
    assert S * counts.forward_flops(tiny(TINY[kind]), rule) == 3 * flops(products(kind, absorbed=True) + MLP) + HEAD


@pytest.mark.parametrize("kind", ["gqa", "vha", "mfa", "gva", "dcmha"])
def test_only_mla_has_an_absorbed_form(kind: str) -> None:
    plain = counts.FlopRule(sequence_length=S)
    absorbed = counts.FlopRule(sequence_length=S, absorbed=True)
    assert counts.forward_flops(tiny(TINY[kind]), absorbed) == counts.forward_flops(tiny(TINY[kind]), plain)


def test_a_token_goes_through_its_experts_the_router_and_the_shared_expert() -> None:
    model, rule = tiny(TINY["gqa"], experts=SHARED), counts.FlopRule(sequence_length=S)
    found = counts.forward_flops_by_part(model, rule)
    assert S * found["router"] == 3 * flops([(S, 12, 8)])
    assert S * found["experts"] == 3 * flops([(2 * S, 12, 10), (2 * S, 12, 10), (2 * S, 10, 12)])
    assert S * found["shared_expert"] == 3 * flops([(S, 12, 14), (S, 12, 14), (S, 14, 12)])
    assert "mlp" not in found
    assert counts.forward_flops_by_part(tiny(TINY["gqa"], experts=EXPERTS), rule)["shared_expert"] == 0


def test_layers_of_a_hybrid_count_their_own_attention_over_their_own_window() -> None:
    window = HYBRID.model_copy(update={"attention": grouped(4, 2, 6)})
    model, rule = tiny(TINY["vha"], sliding_window=window), counts.FlopRule(sequence_length=S)
    sliding = flops(list(qwen3_products(grouped(4, 2, 6), keys=4)) + MLP)
    full = flops(products("vha") + MLP)
    assert S * counts.forward_flops(model, rule) == 2 * sliding + full + HEAD


def test_a_window_longer_than_the_sequence_changes_nothing() -> None:
    long = HYBRID.model_copy(update={"window": 100, "attention": None})
    for causal in (False, True):
        rule = counts.FlopRule(sequence_length=S, causal=causal)
        hybrid = counts.forward_flops_by_part(tiny(TINY["vha"], sliding_window=long), rule)
        assert hybrid == counts.forward_flops_by_part(tiny(TINY["vha"]), rule)


def scores(model: Model, length: int, causal: bool) -> int:
    return counts.forward_flops_by_part(model, counts.FlopRule(sequence_length=length, causal=causal))["scores"]


def test_causal_scores_of_a_window_are_the_area_of_its_band() -> None:
    """Of S x S pairs a window w keeps w S - w^2 / 2: a band without the corner above the first row."""
    length, window = 4096, 1024
    model = tiny(GQA_8, sliding_window=HYBRID.model_copy(update={"window": window, "attention": None}))
    pairs = sum(min(row + 1, window) for row in range(length))
    per_pair = 2 * 2 * 16 * 128
    full = 2 * per_pair * length // 2
    exact = per_pair * pairs / length  # per token of a sliding layer
    assert scores(model, length, causal=True) - full // 2 == pytest.approx(2 * exact, rel=1e-3)
    assert scores(model, length, causal=False) == per_pair * (2 * window + length)


def test_training_flops_are_three_forward_passes() -> None:
    model, rule = tiny(TINY["vha"]), counts.FlopRule(sequence_length=S)
    assert counts.training_flops(model, rule) == 3 * counts.forward_flops(model, rule)


@pytest.mark.parametrize("kind", ["vha", "mla", "dcmha"])
def test_causal_counting_halves_the_scores_and_what_acts_on_them(kind: str) -> None:
    model = tiny(TINY[kind])
    full = counts.forward_flops_by_part(model, counts.FlopRule(sequence_length=S))
    causal = counts.forward_flops_by_part(model, counts.FlopRule(sequence_length=S, causal=True))
    halved = {"scores": full["scores"] // 2}
    if kind == "dcmha":  # but not the making of each token's matrices
        made = 3 * 8 * 1 * 4 * 2
        halved["composition"] = (full["composition"] - made) // 2 + made
    assert causal == full | halved


def test_the_folded_count_is_that_of_the_grouped_model_with_the_virtual_heads() -> None:
    folded = counts.forward_flops_by_part(tiny(TINY["vha"]), counts.FlopRule(sequence_length=S, folded=True))
    assert folded == counts.forward_flops_by_part(tiny(TINY["gqa"]), counts.FlopRule(sequence_length=S))


@pytest.mark.parametrize("kind", TINY)
def test_parts_are_named_after_the_tensors_that_make_them(kind: str) -> None:
    model = tiny(TINY[kind])
    parts = set(counts.forward_flops_by_part(model, counts.FlopRule(sequence_length=S)))
    tensors = set(counts.attention_parameters(TINY[kind], 12))
    made = {"scores", "composition", "premix", "postmix", "mlp", "lm_head"}
    assert parts - made <= tensors
    assert {name for name in tensors if name.endswith("_proj") or name in ("key_map", "compose_factors")} <= parts
