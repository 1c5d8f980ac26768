"""Rules of the keys that mixtures of experts, FP8 and the telemetry of the maps add."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from vha_paddle.config import Recipe, load_recipe, recipe_from_dict
from vha_paddle.errors import UserError

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes/quickstart.yaml"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GROUPED = {"kind": "grouped", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}

VALUE_HEADS = GROUPED | {"kind": "gva", "num_attention_heads": 12, "num_key_value_heads": 3, "qk_rope_head_dim": 16}


def recipe_with(changes: dict[str, Any]) -> Recipe:
    """The quickstart with experts in place of its MLP, and `section.key` changed; None removes a key."""
    values: dict[str, Any] = load_recipe(QUICKSTART).model_dump(mode="json")
    values["model"]["experts"] = dict(EXPERTS)
    values["model"]["intermediate_size"] = None
    values["parallel"]["tensor"] = values["data"]["micro_batch_size"] = 1
    for path, value in changes.items():
        section = values
        *parents, key = path.split(".")
        for parent in parents:
            section = section[parent]
        section[key] = copy.deepcopy(value)
    return recipe_from_dict(values, source="test")


def test_experts_lie_along_the_sharding_axis_and_take_no_ranks() -> None:
    recipe = recipe_with({"parallel.sharding": 4, "parallel.expert": 2})
    assert recipe.num_ranks == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model.intermediate_size": 512},
            "model.intermediate_size=512: a model has either intermediate_size (an MLP in every layer) or experts (a "
            "mixture in every layer); give one of the two",
        ),
        (
            {"model.experts": None},
            "model.intermediate_size=null: a model has either intermediate_size (an MLP in every layer) or experts (a "
            "mixture in every layer); give one of the two",
        ),
        (
            {"model.experts.num_experts_per_tok": 9},
            "model.experts.num_experts_per_tok=9: exceeds model.experts.num_experts=8; lower it",
        ),
        (
            {"parallel.expert": 2},
            "parallel.expert=2: must divide parallel.sharding=1 and model.experts.num_experts=8; use 1, or make "
            "parallel.sharding a multiple of 2",
        ),
        (
            {"parallel.expert": 3, "parallel.sharding": 4},
            "parallel.expert=3: must divide parallel.sharding=4 and model.experts.num_experts=8; use 2 or 4",
        ),
        (
            {"parallel.expert": 2, "parallel.sharding": 2, "model.experts.num_experts": 7},
            "parallel.expert=2: must divide parallel.sharding=2 and model.experts.num_experts=7; use 1",
        ),
        (
            {"model.experts": None, "model.intermediate_size": 512, "parallel.sharding": 2, "parallel.expert": 2},
            "parallel.expert=2: splits the experts of a mixture-of-experts model, and there is no model.experts; use 1",
        ),
        (
            {"model.experts": None, "model.intermediate_size": 512, "precision.fp8": "experts"},
            "precision.fp8=experts: has no effect without model.experts; use all or none",
        ),
        (
            {"model.experts.capacity_factor": 1.5, "parallel.context": 2},
            "model.experts.capacity_factor=1.5: is counted per sequence, of which a rank holds a part with "
            "parallel.context=2; use context=1 or remove the key",
        ),
        (
            {"model.experts.capacity_factor": 4.0},
            "model.experts.capacity_factor=4.0: has no effect from num_experts / num_experts_per_tok = 4 on, where an "
            "expert takes a whole sequence; use less or remove the key",
        ),
        (
            {"model.experts.num_experts_per_tok": 8, "model.experts.router_bias_update_rate": 0.1},
            "model.experts.router_bias_update_rate=0.1: has no effect where every token is sent to all experts "
            "(num_experts_per_tok=8); remove the key",
        ),
        (
            {"parallel.tensor": 4, "model.experts.moe_intermediate_size": 66},
            "parallel.tensor=4: must divide model.experts.moe_intermediate_size=66; use 1 or 2",
        ),
        (
            {"parallel.tensor": 4, "model.experts.shared_expert_intermediate_size": 66},
            "parallel.tensor=4: must divide model.experts.shared_expert_intermediate_size=66; use 1 or 2",
        ),
        (
            {"model.attention": VALUE_HEADS, "optim.decay_target": None, "parallel.tensor": 2},
            "parallel.tensor=2: must divide model.attention.num_key_value_heads=3 or be a multiple of it; use 1",
        ),
        (
            {"model.attention": GROUPED, "optim.decay_target": None, "logging.maps_interval": 5},
            "logging.maps_interval=5: has no effect with model.attention.kind=grouped, which has no maps; "
            "remove the key",
        ),
    ],
)
def test_a_mistake_gives_one_line(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_with(changes)
    assert str(caught.value) == f"test: {expected}"
