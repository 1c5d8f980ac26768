"""`counts` against the published numbers, and against tensors and products enumerated here one by one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from vha_paddle import counts
from vha_paddle.config import (
    Attention,
    GroupedAttention,
    Model,
    Recipe,
    VirtualHeadAttention,
    recipe_from_dict,
)
from vha_paddle.errors import UserError

VOCAB = 151936
# layers, hidden, intermediate
SIZES = {"0.6B": (28, 1024, 3072), "1.7B": (28, 2048, 6144), "4B": (36, 2560, 9728)}
TABLE_INTERMEDIATE = 5504  # the width that the published FLOP table was counted with
PAPER = counts.FlopRule(sequence_length=4096, lm_head=False)


def grouped(heads: int, kv_heads: int, head_dim: int = 128) -> GroupedAttention:
    return GroupedAttention(kind="grouped", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)


def vha(heads: int, kv_heads: int, rank: int, head_dim: int = 128) -> VirtualHeadAttention:
    return VirtualHeadAttention(
        kind="vha",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        postmix_rank=rank,
    )


def published(size: str, attention: Attention, intermediate: int | None = None) -> Model:
    layers, hidden, standard = SIZES[size]
    return Model(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate or standard,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        attention=attention,
    )


def tiny(attention: Attention, tied: bool = False) -> Model:
    return Model(
        vocab_size=40,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=3,
        tie_word_embeddings=tied,
        attention=attention,
    )


MHA_12, MQA = grouped(12, 12), grouped(16, 1)
GQA_8, GQA_4, GQA_2 = grouped(16, 8), grouped(16, 4), grouped(16, 2)
VHA_16, VHA_32 = vha(16, 2, rank=4), vha(32, 2, rank=8)
MILLIONS = [  # published parameters of whole models
    ("0.6B", GQA_8, 596.050),
    ("1.7B", GQA_8, 1720.575),
    ("4B", grouped(32, 8), 4022.468),
    ("0.6B", VHA_16, 523.571),
    ("1.7B", VHA_16, 1574.695),
    ("4B", VHA_32, 3693.365),
]
TINY: dict[str, Attention] = {
    "mha": grouped(4, 4, head_dim=6),
    "gqa": grouped(8, 2, head_dim=6),
    "mqa": grouped(4, 1, head_dim=6),
    "vha": vha(8, 2, rank=3, head_dim=6),
}


def giga(value: float) -> float:
    return round(value / 1e9, 4)


# ---------------------------------------------------------------- the published numbers


@pytest.mark.parametrize(
    ("attention", "expected"),
    [(MHA_12, 6144), (GQA_8, 4096), (GQA_4, 2048), (GQA_2, 1024), (VHA_16, 1024), (VHA_32, 1024), (MQA, 512)],
)
def test_cache_bytes_are_the_published_ones(attention: Attention, expected: int) -> None:
    assert counts.kv_cache_bytes(attention, "bfloat16") == expected
    assert counts.kv_cache_bytes(attention, "float32") == 2 * expected


def test_query_weights_of_vha_are_half_in_training_and_whole_when_served() -> None:
    model = published("1.7B", VHA_16)
    trained, served = counts.attention_parameters(model), counts.attention_parameters(counts.folded(model))
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
    weights = counts.attention_parameters(published("1.7B", attention))
    gains = weights["q_norm"] + weights["k_norm"]
    assert sum(weights.values()) - gains == expected


def test_postmix_adds_128_weights_to_a_layer_at_1p7b() -> None:
    weights = counts.attention_parameters(published("1.7B", VHA_16))
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


# ---------------------------------------------------------------- against an enumeration

Split = tuple[tuple[int, ...], int | None]  # a shape, and the axis that tensor-parallel ranks split


def attention_shapes(attention: Attention, degree: int = 1) -> dict[str, Split]:
    """One layer's attention of a `tiny` model, D = 12 and H = 6; the maps with their heads as [K, P]."""
    whole = attention.kind == "vha" or degree > attention.num_key_value_heads
    kv: Split = ((12, attention.num_key_value_heads, 6), None if whole else 1)
    shapes: dict[str, Split] = {"k_proj": kv, "v_proj": kv, "q_norm": ((6,), None), "k_norm": ((6,), None)}
    if isinstance(attention, VirtualHeadAttention):
        shapes |= {"q_proj": ((12, 4, 6), 1), "o_proj": ((2, 4, 6, 12), 1), "premix": ((2, 6, 6), None)}
        return shapes | {"postmix_a": ((2, 4, 3), 1), "postmix_b": ((2, 4, 3), 1)}
    heads = attention.num_attention_heads
    return shapes | {"q_proj": ((12, heads, 6), 1), "o_proj": ((heads, 6, 12), 0)}


def model_shapes(attention: Attention, tied: bool, degree: int) -> list[Split]:
    shapes: list[Split] = [((40, 12), 0), ((12,), None)]
    shapes += [] if tied else [((12, 40), 1)]
    for _layer in range(3):
        shapes += attention_shapes(attention, degree).values()
        shapes += [((12,), None), ((12,), None), ((12, 20), 1), ((12, 20), 1), ((20, 12), 0)]
    return shapes


def local_size(split: Split, degree: int) -> int:
    shape, axis = split
    return math.prod(size // degree if index == axis else size for index, size in enumerate(shape))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "degree"),
    [(kind, 1) for kind in TINY] + [("mha", 4), ("gqa", 2), ("gqa", 4), ("mqa", 2), ("vha", 2), ("vha", 4)],
)
def test_parameters_of_a_rank_are_the_sum_of_its_tensors(kind: str, degree: int, tied: bool) -> None:
    tensors = model_shapes(TINY[kind], tied, degree)
    found = counts.parameters(tiny(TINY[kind], tied), degree)
    assert found.total == sum(local_size(tensor, degree) for tensor in tensors)
    ends = (1 if tied else 2) * 40 * 12 // degree
    assert found.non_embedding == found.total - ends


@pytest.mark.parametrize(("kind", "degree"), [("mha", 2), ("gqa", 4), ("vha", 1), ("vha", 2), ("vha", 4)])
def test_attention_parameters_of_a_rank_are_those_of_each_tensor(kind: str, degree: int) -> None:
    shapes = attention_shapes(TINY[kind], degree)
    expected = {name: local_size(split, degree) for name, split in shapes.items()}
    assert counts.attention_parameters(tiny(TINY[kind]), degree) == expected


@pytest.mark.parametrize(("kind", "degree"), [("vha", 3), ("vha", 8), ("gqa", 3), ("mha", 8)])
def test_a_degree_that_does_not_divide_the_heads_is_refused(kind: str, degree: int) -> None:
    with pytest.raises(UserError, match="must divide"):
        counts.parameters(tiny(TINY[kind]), degree)


def products(attention: Attention, sequence: int) -> list[tuple[int, int, int]]:
    """Every matrix product of a layer, `[rows, inner] @ [inner, columns]`, for a whole sequence."""
    heads, kv_heads = attention.num_attention_heads, attention.num_key_value_heads
    found = [(sequence, 12, kv_heads * 6)] * 2 + [(sequence, heads * 6, 12)]
    found += [(sequence, 6, sequence), (sequence, sequence, 6)] * heads
    found += [(sequence, 12, 20), (sequence, 12, 20), (sequence, 20, 12)]
    if isinstance(attention, VirtualHeadAttention):
        physical, rank = heads // kv_heads, attention.postmix_rank
        found += [(sequence * physical, 6, 6)] * kv_heads
        found += [(rank, heads, 6), (heads, rank, 6)] * sequence
        return [*found, (sequence, 12, physical * 6)]
    return [*found, (sequence, 12, heads * 6)]


@pytest.mark.parametrize("kind", TINY)
def test_forward_flops_are_the_sum_of_the_matrix_products(kind: str) -> None:
    sequence = 10
    layer = sum(2 * rows * inner * columns for rows, inner, columns in products(TINY[kind], sequence))
    head = 2 * sequence * 12 * 40
    rule = counts.FlopRule(sequence_length=sequence)
    assert sequence * counts.forward_flops(tiny(TINY[kind]), rule) == 3 * layer + head


def test_training_flops_are_three_forward_passes() -> None:
    model, rule = tiny(TINY["vha"]), counts.FlopRule(sequence_length=10)
    assert counts.training_flops(model, rule) == 3 * counts.forward_flops(model, rule)


def test_causal_counting_halves_the_scores_and_nothing_else() -> None:
    model = tiny(TINY["vha"])
    full = counts.forward_flops_by_part(model, counts.FlopRule(sequence_length=10))
    causal = counts.forward_flops_by_part(model, counts.FlopRule(sequence_length=10, causal=True))
    assert causal == full | {"scores": full["scores"] // 2}


def test_the_folded_count_is_that_of_the_grouped_model_with_the_virtual_heads() -> None:
    folded = counts.forward_flops_by_part(tiny(TINY["vha"]), counts.FlopRule(sequence_length=10, folded=True))
    assert folded == counts.forward_flops_by_part(tiny(TINY["gqa"]), counts.FlopRule(sequence_length=10))


def test_the_fold_of_a_grouped_model_is_itself() -> None:
    assert counts.folded(tiny(TINY["gqa"])) == tiny(TINY["gqa"])


# ---------------------------------------------------------------- summary


def recipe(kind: str, degree: int = 1) -> Recipe:
    sizes = {"sequence_length": 10, "global_batch_size": 8, "micro_batch_size": 2}
    values: dict[str, Any] = {
        "run": {"name": "tiny", "seed": 1, "output": "out"},
        "model": tiny(TINY[kind]).model_dump(),
        "data": {"train": "t", "tokenizer": "m"} | sizes,
        "optim": {"lr": 1e-3} | ({"decay_target": "none"} if kind == "vha" else {}),
        "schedule": {"kind": "cosine", "total_tokens": 815, "warmup_tokens": 0, "min_lr": 0.0},
        "parallel": {"tensor": degree},
        "precision": {"compute": "float32"},
    }
    return recipe_from_dict(values, source="test")


def test_a_summary_holds_the_costs_of_the_run() -> None:
    run = recipe("vha", 2)
    found, model = counts.summary(run), run.model
    assert found["parameters"]["total"] == counts.parameters(model).total
    assert found["parameters"]["non_embedding"] == counts.parameters(model).total - 2 * 40 * 12
    assert found["schedule"] == {"tokens_per_step": 80, "steps": 10, "tokens": 800}
    per_token = counts.training_flops(model, counts.FlopRule(sequence_length=10, causal=True))
    assert found["flops"]["training_per_token"] == per_token
    assert found["flops"]["training_per_token_without_lm_head"] == per_token - 3 * 2 * 12 * 40
    assert found["flops"]["training_total"] == 800 * per_token
    assert found["kv_cache_bytes_bfloat16"] == {"per_token_per_layer": 2 * 2 * 6 * 2, "per_token": 3 * 48}


def test_a_summary_survives_json() -> None:
    found = counts.summary(recipe("gqa"))
    assert json.loads(json.dumps(found)) == found


def test_a_rendered_summary_shows_every_number_of_it() -> None:
    found = counts.summary(recipe("vha", 2))
    title, *lines = counts.render(found).splitlines()
    assert title == "tiny: vha attention on 2 ranks"
    for section in (value for value in found.values() if isinstance(value, dict)):
        for name, value in section.items():
            label = name.replace("_", " ")
            assert any(line.startswith(f"  {label} ") and f" {value:,} " in line for line in lines), name


def test_a_rendered_size_has_the_largest_unit_that_leaves_at_least_one() -> None:
    sizes = {"below": 1023, "at": 1024, "above": 3 << 20}
    found = {"run": "tiny", "attention": "vha", "ranks": 1, "cache_bytes": sizes, "flops": {"many": 1_500_000}}
    lines = counts.render(found).splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("  ")] == [
        ["1023", "B"],
        ["1.000", "KiB"],
        ["3.000", "MiB"],
        ["1.500", "M"],
    ]
