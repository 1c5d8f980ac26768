"""What the calculator prints of a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.counts.models import HYBRID, SHARED, TINY, tiny
from vha_paddle import counts
from vha_paddle.config import Model, Recipe
from vha_paddle.counts import FlopRule, topics
from vha_paddle.counts.shapes import counting_recipe, named

RULE = FlopRule(sequence_length=10)


def recipe(model: Model, tensor: int = 1, expert: int = 1) -> Recipe:
    return counting_recipe("tiny", model.model_dump(), 10, tensor, expert)


@pytest.mark.parametrize("kind", TINY)
def test_every_kind_has_every_topic(kind: str) -> None:
    one = recipe(tiny(TINY[kind]))
    for found in (topics.cache(one), topics.params(one), topics.flops(one, RULE), topics.fold(one, RULE)):
        assert json.loads(json.dumps(found)) == found
    parameters = topics.params(one)
    assert parameters["total"] == counts.parameters(one.model).total
    assert parameters["attention_per_layer"] == counts.parameters(one.model).layers[0].attention


def test_layers_of_a_hybrid_are_listed_apart() -> None:
    one = recipe(tiny(TINY["vha"], sliding_window=HYBRID))
    found = topics.cache(one)
    assert (found["sliding.layers"], found["sliding.window_tokens"], found["full.layers"]) == (2, 4, 1)
    assert found["sliding.bfloat16_bytes_per_token_per_layer"] == 2 * 4 * 6 * 2
    assert found["full.bfloat16_bytes_per_token_per_layer"] == 2 * 2 * 6 * 2
    assert found["bfloat16_bytes_per_token"] == 2 * 96 + 48
    assert found["bfloat16_bytes_at_10_tokens"] == counts.cache_bytes(one.model, 10, "bfloat16")
    assert {"full.attention_per_layer.premix", "sliding.attention_per_layer.q_proj"} <= set(topics.params(one))


def test_a_rank_has_its_share_of_heads_and_experts() -> None:
    model = tiny(TINY["gqa"], experts=SHARED)
    found = topics.params(recipe(model, tensor=2, expert=4))
    assert found["total_on_one_rank"] == counts.parameters(model, 2, 4).total < found["total"]
    assert found["active_per_token"] == counts.active_parameters(model)
    virtual = tiny(TINY["vha"], experts=SHARED)
    served = topics.params(recipe(virtual))["active_per_token_served_folded"]
    assert served == counts.active_parameters(counts.folded(virtual)) != counts.active_parameters(virtual)


def test_query_weights_are_those_of_every_projection_on_the_way_to_the_queries() -> None:
    for kind, parts in {"vha": ("q_proj", "premix"), "mfa": ("q_a_proj", "q_b_proj"), "gqa_bias": ("q_proj",)}.items():
        model = tiny(TINY[kind])
        layer = counts.attention_parameters(model.attention, model.hidden_size)
        assert topics.query_weights(model) == sum(layer[part] for part in parts)


def test_flops_follow_the_rule_and_the_totals_every_rule() -> None:
    one = recipe(tiny(TINY["vha"]))
    found = topics.flops(one, FlopRule(sequence_length=10, lm_head=False, causal=True))
    parts = sum(value for name, value in found.items() if name.startswith("forward."))  # type: ignore[misc]
    assert found["forward"] == parts and found["training"] == 3 * parts
    assert found["training.without_lm_head_causal_scores"] == found["training"]
    served = topics.flops(one, FlopRule(sequence_length=10, folded=True))
    assert "forward.premix" not in served and "training" not in served
    assert served["forward"] == served["folded_forward.with_lm_head_full_scores"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"premix": "folds", "postmix": "folds", "served.kind": "grouped"}),
        ({"premix": "silu"}, {"premix": "stays: SiLU lies between Premix and the attention core", "postmix": "folds"}),
        ({"postmix": "none", "postmix_rank": None}, {"premix": "folds", "postmix": "none"}),
        (
            {"output_gate": "after_postmix"},
            {"postmix": "stays: the gate lies between Postmix and W_O", "served.kind": "vha"},
        ),
    ],
)
def test_what_folds_is_said_map_by_map(changes: dict[str, Any], expected: dict[str, str]) -> None:
    attention = {"kind": "vha", "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "postmix_rank": 4}
    found = topics.fold(named("1.7B", attention | changes), FlopRule(sequence_length=4096))
    assert expected.items() <= found.items()


def test_the_fold_costs_query_weights_and_no_cache() -> None:
    found = topics.fold(named("1.7B", "vha"), FlopRule(sequence_length=4096))
    assert (found["trained.query_weights_per_layer"], found["served.query_weights_per_layer"]) == (2_129_920, 4_194_304)
    cache = "cache_bfloat16_bytes_per_token_per_layer"
    assert found[f"trained.{cache}"] == found[f"served.{cache}"] == 1024
    other = topics.fold(named("1.7B", "mla"), FlopRule(sequence_length=4096))
    assert other["fold"] == "nothing to fold: it is served as it is trained"
