"""What the running program communicates and holds is what a plan says, on every rank of every layout."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.plan.recipes import DCMHA, GROUPED, GVA, MFA, MLA, VHA, small_recipe
from vha_paddle.config import Recipe
from vha_paddle.plan.communication import LOSS, Transfer, postmix_values, transfers
from vha_paddle.plan.schedule import schedule_of
from vha_paddle.plan.stages import owned_sizes, stage_tensors

WORKER = Path(__file__).with_name("communication_worker.py")

# A new layout or model is one row.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor_2": {"tensor": 2},
    "tensor_2_sequence": {"tensor": 2, "sequence": True},
    "data_2": {"data": 2},
    "sharding_2": {"sharding": 2},
    "sharding_2_stage_2": {"sharding": 2, "sharding_stage": 2},
    "sharding_2_stage_3": {"sharding": 2, "sharding_stage": 3},
    "context_2": {"context": 2},
    "pipeline_2": {"pipeline": 2},
    "pipeline_4_virtual_2": {"pipeline": 4, "virtual_pipeline": 2},
    "pipeline_4_virtual_2_few_microbatches": {"pipeline": 4, "virtual_pipeline": 2},
    "tensor_2_sequence_context_2": {"tensor": 2, "sequence": True, "context": 2},
    "tensor_2_sequence_pipeline_2": {"tensor": 2, "sequence": True, "pipeline": 2},
    "tensor_2_sequence_sharding_2_stage_3": {"tensor": 2, "sequence": True, "sharding": 2, "sharding_stage": 3},
    "data_2_sharding_2_stage_2": {"data": 2, "sharding": 2, "sharding_stage": 2},
    "pipeline_2_sharding_2": {"pipeline": 2, "sharding": 2},
    "sharding_2_expert_2": {"sharding": 2, "expert": 2},
    "sharding_4_stage_3_expert_2": {"sharding": 4, "sharding_stage": 3, "expert": 2},
    "tensor_2_sequence_sharding_2_expert_2": {"tensor": 2, "sequence": True, "sharding": 2, "expert": 2},
    "pipeline_2_sharding_2_expert_2": {"pipeline": 2, "sharding": 2, "expert": 2},
}
# Sequences of a microbatch, 1 elsewhere: with as many microbatches as stages all forwards come before all backwards.
MICRO_BATCHES = {"pipeline_4_virtual_2_few_microbatches": 2}
EXPERTS: dict[str, Any] = {
    "intermediate_size": None,
    "experts": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
}
SHARED: dict[str, Any] = EXPERTS | {"experts": EXPERTS["experts"] | {"shared_expert_intermediate_size": 8}}
WINDOW: dict[str, Any] = {"window": 3, "full_every": 2, "attention": GROUPED | {"num_key_value_heads": 4}}
MODELS: dict[str, dict[str, Any]] = {
    "vha": {"attention": VHA},
    "vha_in_weight_space": {"attention": VHA | {"postmix_space": "weight"}},
    "grouped_of_the_same_heads": {"attention": GROUPED},
    "grouped_untied": {"attention": GROUPED, "tied": False},
    "mqa": {"attention": GROUPED | {"num_key_value_heads": 1}},
    "vha_full": {"attention": VHA, "recompute": "full"},
    "vha_selective": {"attention": VHA, "recompute": "selective"},
    "vha_in_weight_space_selective": {"attention": VHA | {"postmix_space": "weight"}, "recompute": "selective"},
    "vha_gated_postmix_only": {"attention": VHA | {"premix": "none", "output_gate": "after_postmix"}},
    "vha_bias_without_norm": {"attention": VHA | {"attention_bias": True, "qk_norm": False}},
    "vha_and_sliding_grouped": {"attention": VHA, "model": {"sliding_window": WINDOW}},
    "mla_selective": {"attention": MLA, "recompute": "selective"},
    "mfa": {"attention": MFA},
    "gva": {"attention": GVA, "tied": False},
    "dcmha": {"attention": DCMHA},
    "experts": {"attention": VHA, "model": EXPERTS},
    "shared_expert_full": {"attention": GROUPED, "model": SHARED, "recompute": "full", "tied": False},
}
TENSOR_LAYOUTS = [name for name, degrees in LAYOUTS.items() if "tensor" in degrees and "expert" not in degrees]
PIPELINE_LAYOUTS = [name for name, degrees in LAYOUTS.items() if "pipeline" in degrees and "expert" not in degrees]
ROWS = "expert all-to-all"


def fits(model: str, layout: str) -> bool:
    """Only experts lie on an expert axis."""
    return "expert" not in LAYOUTS[layout] or "experts" in MODELS[model].get("model", {})


PAIRS = [(model, layout) for layout in LAYOUTS for model in MODELS if fits(model, layout)]


def recipe_of(model: str, layout: str) -> Recipe:
    degrees = LAYOUTS[layout]
    chunks = degrees.get("pipeline", 1) * degrees.get("virtual_pipeline", 1)
    described = MODELS[model]
    return small_recipe(
        **(described | {"model": described.get("model", {}) | {"num_hidden_layers": max(2, chunks)}}),
        parallel=degrees,
        data={"micro_batch_size": MICRO_BATCHES.get(layout, 1)},
    )


@functools.cache
def measured(layout: str) -> list[dict[str, Any]]:
    """What each rank found, by model."""
    with tempfile.TemporaryDirectory() as folder:
        recipes = Path(folder) / "recipes.json"
        fitting = [recipe_of(model, layout) for model, other in PAIRS if other == layout]
        names = [model for model, other in PAIRS if other == layout]
        values = {model: recipe.model_dump(mode="json") for model, recipe in zip(names, fitting, strict=True)}
        recipes.write_text(json.dumps(values))
        num_ranks = fitting[0].num_ranks
        run_ranks(WORKER, num_ranks, [str(recipes), folder], timeout=600)
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def on_cpu(transfer: Transfer) -> tuple[str, int]:
    """Axis with kind, and payload: the CPU's softmax gathers at once what a GPU's sums in three steps."""
    if transfer.purpose == LOSS:
        return f"{transfer.axis} all-gather", transfer.payload * transfer.ranks
    return f"{transfer.axis} {transfer.kind}", transfer.payload


def counted(found: dict[str, Any]) -> Counter[str]:
    return Counter(found["passes"]) + Counter(found["step"])


def planned_for(recipe: Recipe, found: dict[str, Any]) -> Counter[str]:
    planned = Counter[str]()
    for transfer in transfers(recipe, found["pipeline_rank"], found["sharding_rank"]):
        key, payload = on_cpu(transfer)
        planned[key] += payload
    return planned


@pytest.mark.parametrize(("model", "layout"), PAIRS)
class TestEveryRank:
    def test_communicates_what_the_plan_says(self, model: str, layout: str) -> None:
        recipe = recipe_of(model, layout)
        for rank in measured(layout):
            found, planned = counted(rank[model]), planned_for(recipe, rank[model])
            for count in (found, planned):
                del count[ROWS]  # depend on what the router chooses: compared over all ranks below
            assert found == planned

    def test_holds_the_planned_parameters_in_the_planned_order(self, model: str, layout: str) -> None:
        recipe = recipe_of(model, layout)
        for rank in measured(layout):
            found = rank[model]
            tensors = stage_tensors(recipe.model, recipe.parallel, found["pipeline_rank"])
            assert [(name, size) for name, size in found["parameters"]] == [(t.name, t.size) for t in tensors]

    def test_owns_the_planned_share_of_the_optimizer(self, model: str, layout: str) -> None:
        recipe = recipe_of(model, layout)
        for rank in measured(layout):
            found = rank[model]
            planned = owned_sizes(recipe.model, recipe.parallel, found["pipeline_rank"])
            assert found["owned"] == planned[found["sharding_rank"]]


@pytest.mark.parametrize(("model", "layout"), [pair for pair in PAIRS if "expert" in LAYOUTS[pair[1]]])
def test_all_ranks_together_exchange_the_planned_rows(model: str, layout: str) -> None:
    """An expert with many tokens receives many rows and sends as many back; the plan is of even routing."""
    recipe = recipe_of(model, layout)
    found, planned = (
        sum(count(rank[model])[ROWS] for rank in measured(layout))
        for count in (counted, lambda found: planned_for(recipe, found))
    )
    assert found == planned > 0


@pytest.mark.parametrize("layout", PIPELINE_LAYOUTS)
def test_a_stage_keeps_the_planned_forward_passes(layout: str) -> None:
    recipe = recipe_of("vha", layout)
    schedule = schedule_of(recipe.parallel, recipe.num_microbatches)
    for rank in measured(layout):
        assert rank["vha"]["chunks_kept"] == schedule.chunks_kept(rank["vha"]["pipeline_rank"])


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
@pytest.mark.parametrize("space", ["activation", "weight"])
def test_vha_adds_postmix_alone_to_the_passes_of_grouped_attention(space: str, layout: str) -> None:
    """R * H values per token, or R * H * D per pass, in forward and again in backward; Premix adds nothing."""
    model = "vha" if space == "activation" else "vha_in_weight_space"
    recipe = recipe_of(model, layout)
    data, width = recipe.data, recipe.model.hidden_size
    channels = VHA["postmix_rank"] * VHA["head_dim"]
    tokens = data.micro_batch_size * data.sequence_length // recipe.parallel.context
    values = tokens * channels if space == "activation" else channels * width
    layers = recipe.model.num_hidden_layers // recipe.parallel.pipeline
    expected = 2 * layers * recipe.num_microbatches * values * 4
    for rank in measured(layout):
        vha, grouped = (
            sum(size for kind, size in rank[name]["passes"].items() if kind.startswith("tensor"))
            for name in (model, "grouped_of_the_same_heads")
        )
        assert vha - grouped == expected


def test_the_stated_formula_is_the_counted_one() -> None:
    channels = VHA["postmix_rank"] * VHA["head_dim"]
    in_activations, in_weights = (
        postmix_values(recipe_of(model, "tensor_2")) for model in ("vha", "vha_in_weight_space")
    )
    assert in_activations is not None and in_weights is not None
    assert (in_activations.per_token, in_activations.per_pass) == (channels, 0)
    assert (in_weights.per_token, in_weights.per_pass) == (0, channels * 24)
