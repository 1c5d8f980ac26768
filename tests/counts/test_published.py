"""Counts against the published numbers."""

from __future__ import annotations

import pytest

from tests.counts.models import (
    GQA_2,
    GQA_4,
    GQA_8,
    MHA_12,
    MILLIONS,
    MQA,
    TABLE_INTERMEDIATE,
    VHA_16,
    VHA_32,
    VHA_48,
    a3b,
    grouped,
    published,
    vha,
)
from vha_paddle import counts
from vha_paddle.config import Attention, LatentAttention, Model, VirtualHeadAttention

PAPER = counts.FlopRule(sequence_length=4096, lm_head=False)
MLA = LatentAttention(kind="mla", num_attention_heads=16)


def giga(value: float) -> float:
    return round(value / 1e9, 4)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (MHA_12, 6144),
        (GQA_8, 4096),
        (GQA_4, 2048),
        (GQA_2, 1024),
        (VHA_16, 1024),
        (VHA_32, 1024),
        (MQA, 512),
        (MLA, 1152),
    ],
)
def test_cache_bytes_are_the_published_ones(attention: Attention, expected: int) -> None:
    assert counts.kv_cache_bytes(attention, "bfloat16") == expected
    assert counts.kv_cache_bytes(attention, "float32") == 2 * expected


def test_query_weights_of_vha_are_half_in_training_and_whole_when_served() -> None:
    trained = counts.attention_parameters(VHA_16, 2048)
    served = counts.attention_parameters(counts.folded_attention(VHA_16), 2048)
    assert trained["q_proj"] + trained["premix"] == 2_129_920
    assert served["q_proj"] == 4_194_304


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (GQA_8, 12_582_912),
        (MHA_12, 12_582_912),
        (GQA_2, 9_437_184),
        (grouped(8, 2), 5_242_880),
        (VHA_16, 7_372_928),
    ],
)
def test_attention_weights_per_layer_are_the_published_ones(attention: Attention, expected: int) -> None:
    weights = counts.attention_parameters(attention, 2048)
    gains = weights["q_norm"] + weights["k_norm"]
    assert sum(weights.values()) - gains == expected


def test_postmix_adds_128_weights_to_a_layer_at_1p7b() -> None:
    weights = counts.attention_parameters(VHA_16, 2048)
    assert weights["postmix_a"] + weights["postmix_b"] == 2 * 16 * 4 == 128


@pytest.mark.parametrize(("size", "attention", "millions"), MILLIONS)
def test_whole_models_have_the_published_parameters(size: str, attention: Attention, millions: float) -> None:
    assert round(counts.parameters(published(size, attention)).total / 1e6, 3) == millions


@pytest.mark.parametrize(
    ("attention", "expected", "printed"),
    [(GQA_8, 10.6137, 10.61), (MHA_12, 9.9090, 9.91), (VHA_16, 9.7797, 9.78)],
)
def test_training_flops_per_token_are_the_published_ones(attention: Attention, expected: float, printed: float) -> None:
    flops = counts.training_flops(published("1.7B", attention, TABLE_INTERMEDIATE), PAPER) / 1e9
    assert round(flops, 4) == expected
    assert round(flops, 2) == printed


@pytest.mark.parametrize(("lm_head", "expected"), [(False, 11.274), (True, 13.141)])
def test_training_flops_of_the_standard_width_differ_from_the_table(lm_head: bool, expected: float) -> None:
    rule = counts.FlopRule(sequence_length=4096, lm_head=lm_head)
    assert round(counts.training_flops(published("1.7B", GQA_8), rule) / 1e9, 3) == expected


def training_by_part(model: Model) -> dict[str, int]:
    return {part: 3 * flops for part, flops in counts.forward_flops_by_part(model, PAPER).items()}


def test_mha_saves_only_scores_against_gqa_8() -> None:
    gqa, mha = training_by_part(published("1.7B", GQA_8)), training_by_part(published("1.7B", MHA_12))
    assert giga(sum(gqa.values()) - sum(mha.values())) == giga(gqa["scores"] - mha["scores"]) == 0.7046


def test_saving_of_vha_at_1p7b_has_the_published_parts() -> None:
    gqa, vha_ = training_by_part(published("1.7B", GQA_8)), training_by_part(published("1.7B", VHA_16))
    queries = gqa["q_proj"] - vha_["q_proj"]
    keys_values = gqa["k_proj"] + gqa["v_proj"] - vha_["k_proj"] - vha_["v_proj"]
    assert (giga(queries), giga(keys_values)) == (0.3523, 0.5285)
    assert (giga(vha_["premix"]), giga(vha_["postmix"])) == (0.0440, 0.0028)
    assert giga(vha_["premix"] + vha_["postmix"]) == 0.0468
    assert giga(sum(gqa.values()) - sum(vha_.values())) == 0.8340
    assert round(100 * keys_values / (queries + keys_values)) == 60


@pytest.mark.parametrize(("rank", "expected"), [(8, 1.8544), (4, 1.8615)])
def test_saving_of_vha_at_4b_is_the_published_one(rank: int, expected: float) -> None:
    gqa = training_by_part(published("4B", grouped(32, 8)))
    vha_ = training_by_part(published("4B", vha(32, 2, rank)))
    assert giga(sum(gqa.values()) - sum(vha_.values())) == expected


def test_queries_are_the_larger_share_of_the_saving_at_4b() -> None:
    gqa, vha_ = training_by_part(published("4B", grouped(32, 8))), training_by_part(published("4B", VHA_32))
    saved = {part: gqa[part] - vha_[part] for part in ("q_proj", "k_proj", "v_proj")}
    assert round(100 * saved["q_proj"] / sum(saved.values()), 1) == 57.1


def test_training_saving_at_1p7b_is_7p858_percent() -> None:
    gqa = counts.training_flops(published("1.7B", GQA_8, TABLE_INTERMEDIATE), PAPER)
    vha_ = counts.training_flops(published("1.7B", VHA_16, TABLE_INTERMEDIATE), PAPER)
    assert round(100 * (1 - vha_ / gqa), 3) == 7.858


def test_prefill_with_the_folded_model_saves_4p98_percent() -> None:
    gqa = counts.forward_flops(published("1.7B", GQA_8, TABLE_INTERMEDIATE), PAPER)
    served = counts.FlopRule(sequence_length=4096, lm_head=False, folded=True)
    folded = counts.forward_flops(published("1.7B", VHA_16, TABLE_INTERMEDIATE), served)
    assert (giga(gqa - folded), giga(gqa)) == (0.1762, 3.5379)
    assert round(100 * (gqa - folded) / gqa, 2) == 4.98


def test_30b_a3b_has_the_published_parameters() -> None:
    gqa, own = a3b(grouped(32, 4)), a3b(VHA_48)
    assert round(counts.parameters(gqa).total / 1e9, 2) == 30.53
    assert round(counts.active_parameters(gqa) / 1e9, 2) == 3.35
    assert round(counts.parameters(own).total / 1e9, 2) == 30.58
    assert sum(counts.attention_parameters(grouped(32, 4), 2048).values()) == 18_874_368 + 2 * 128
    assert round(sum(counts.attention_parameters(VHA_48, 2048).values()) / 1e6, 2) == 19.96


@pytest.mark.parametrize("attention", [VHA_16, VHA_32, VHA_48])
def test_the_published_ranks_are_a_quarter_of_the_heads(attention: VirtualHeadAttention) -> None:
    assert attention.postmix_rank == attention.num_attention_heads // 4


def test_the_largest_published_group_is_24() -> None:
    assert (VHA_48.query_group_size, VHA_48.num_physical_heads) == (24, 24)


def test_an_mla_query_in_the_latent_is_576_wide() -> None:
    assert counts.kv_cache_values(MLA) == 576
