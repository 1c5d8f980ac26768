"""Proposed layouts: they obey the recipe's rules, use all GPUs, fit, and come in the stated order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.recipes import GROUPED, VHA, small_recipe
from vha_paddle.config import Recipe, load_recipe
from vha_paddle.config.check import check
from vha_paddle.errors import UserError
from vha_paddle.plan.cost import make_plan
from vha_paddle.plan.gpus import GPUS
from vha_paddle.plan.layouts import (
    NUM_PROPOSED,
    OWN,
    OWN_TUNED,
    SAME_TIME,
    SEARCHED,
    candidates,
    proposals,
    propose,
    rescaled,
)
from vha_paddle.plan.schedule import schedule_of

H800 = GPUS["h800"]
LARGE = {  # 1.7B
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
}
ATTENTION = VHA | {"num_attention_heads": 16, "head_dim": 128, "postmix_rank": 4}
DATA = {"sequence_length": 4096, "global_batch_size": 512}


def large(**parallel: int) -> Recipe:
    small = small_recipe(ATTENTION, parallel, compute="bfloat16", data={"global_batch_size": 512}, model=LARGE)
    schedule = small.schedule.model_copy(update={"total_tokens": 50_331_648_000})
    return small.model_copy(update={"data": small.data.model_copy(update=DATA), "schedule": schedule})


def test_candidates_use_every_gpu_and_obey_every_rule() -> None:
    found = list(candidates(small_recipe(VHA), 8))
    for recipe in found:
        assert recipe.num_ranks == 8
        check(recipe)
        schedule_of(recipe.parallel, recipe.num_microbatches)
    tried = {(recipe.parallel.tensor, recipe.parallel.pipeline, recipe.parallel.context) for recipe in found}
    assert {(4, 2, 1), (1, 4, 2), (1, 1, 1), (2, 1, 4)} <= tried
    assert not any(tensor == 8 for tensor, _, _ in tried)  # 4 physical heads


def test_candidates_keep_model_and_batch() -> None:
    recipe = small_recipe(GROUPED)
    for candidate in candidates(recipe, 4):
        assert (candidate.model, candidate.data) == (recipe.model, recipe.data)


def test_layouts_that_fit_are_ordered_by_time_and_equal_times_by_plainness() -> None:
    found = propose(large(), 64, H800, 0.4)
    assert len(found) == NUM_PROPOSED and all(plan.fits for plan in found)
    seconds = [plan.step_seconds + plan.communication_seconds for plan in found]
    slower = [second for second in seconds if second > min(seconds) * (1 + SAME_TIME)]
    assert seconds[len(seconds) - len(slower) :] == sorted(slower)
    degrees = found[0].recipe.parallel
    assert (degrees.tensor, degrees.pipeline, degrees.context) == (1, 1, 1)


def test_each_combination_of_degrees_is_proposed_once() -> None:
    found = [plan.recipe.parallel for plan in propose(large(), 64, H800, 0.4)]
    assert len({(degrees.tensor, degrees.pipeline, degrees.context) for degrees in found}) == len(found)


def test_a_small_memory_is_met_by_cutting_the_model_or_recomputing() -> None:
    own = make_plan(large(data=64), H800, 0.4)
    small = replace(H800, memory=20 * 10**9)
    assert own.worst.total > 20 * 10**9
    found = propose(large(data=64), 64, small, 0.4)
    assert all(plan.worst.total <= 18 * 10**9 for plan in found)


def test_where_nothing_fits_the_smallest_come_first() -> None:
    found = propose(large(), 8, replace(H800, memory=10**9), 0.4)
    totals = [plan.worst.total for plan in found]
    assert not any(plan.fits for plan in found) and totals == sorted(totals)
    assert found[0].recipe.memory.recompute == "full"


def test_a_number_of_gpus_that_nothing_multiplies_to_is_refused_with_those_that_work() -> None:
    with pytest.raises(UserError, match=r"--gpus 7: no tensor degree of 1 or 2 or 4 or 8, .*; use 4 or 8$"):
        propose(small_recipe(VHA), 7, H800, 0.4)
    assert propose(small_recipe(VHA), 4, H800, 0.4) and propose(small_recipe(VHA), 8, H800, 0.4)


def test_the_quickstart_can_be_planned_for_more_gpus(request: pytest.FixtureRequest) -> None:
    recipe = load_recipe(request.config.rootpath / "recipes" / "quickstart.yaml")
    assert all(plan.recipe.num_ranks == 4 for plan in propose(recipe, 4, H800, 0.4))


def test_candidates_vary_the_microbatch_by_its_divisors() -> None:
    recipe = small_recipe(VHA, data={"micro_batch_size": 4})
    found = list(candidates(recipe, 2))
    assert {candidate.data.micro_batch_size for candidate in found} == {1, 2, 4}
    assert {candidate.data.global_batch_size for candidate in found} == {8}


def test_the_own_layout_of_table_1_comes_first_then_what_is_faster_on_the_same_degrees(
    request: pytest.FixtureRequest,
) -> None:
    """By hand: 64 shards, one sequence a microbatch and nothing recomputed take 27.0 GiB and 0.903 s a step."""
    recipe = load_recipe(request.config.rootpath / "recipes" / "table1_1p7b_vha.yaml")
    own, tuned, *others = proposals(recipe, 64, GPUS["h100"], 0.4)
    assert own.origin == OWN and own.plan.recipe == recipe.model_copy(
        update={"parallel": recipe.parallel.model_copy(update={"sharding": 64})}
    )
    assert tuned.origin == OWN_TUNED and tuned.plan.recipe.parallel == own.plan.recipe.parallel
    assert tuned.plan.recipe.data.micro_batch_size == 1 and tuned.plan.recipe.memory.recompute == "none"
    assert round(tuned.plan.worst.total / 2**30, 2) == 27.03
    assert round(tuned.plan.step_seconds, 3) == 0.903 and round(tuned.plan.stated.gpu_hours) == 385
    assert tuned.plan.with_communication.step_seconds < own.plan.with_communication.step_seconds
    assert others and all(proposal.origin == SEARCHED for proposal in others)


def test_the_own_layout_comes_first_where_it_does_not_fit() -> None:
    own, *_ = proposals(large(sharding=64), 32, replace(H800, memory=10**9), 0.4)
    assert own.origin == OWN and not own.plan.fits and own.plan.recipe.parallel.sharding == 32


def test_a_recipe_that_does_not_fit_is_not_its_own_proposal() -> None:
    recipe = large(data=64)
    small = replace(H800, memory=20 * 10**9)
    found = proposals(recipe, 64, small, 0.4)
    assert found[0].origin == OWN_TUNED and all(proposal.plan.recipe != recipe for proposal in found)
    assert not any(one == other for i, one in enumerate(found) for other in found[:i])


def test_rescaling_changes_the_shards_or_the_data_ranks_and_what_must_follow() -> None:
    assert rescaled(small_recipe(VHA, {"data": 2}), 4) == small_recipe(VHA, {"data": 4})
    sharded = small_recipe(VHA, {"sharding": 4, "sharding_stage": 2, "data": 2})
    assert rescaled(sharded, 4) == small_recipe(VHA, {"sharding": 2, "sharding_stage": 2, "data": 2})
    assert rescaled(sharded, 2) == small_recipe(VHA, {"sharding": 1, "data": 2})
    assert rescaled(sharded, 3) is None
    model = {"intermediate_size": None, "experts": EXPERTS["experts"]}
    experts = small_recipe(VHA, {"sharding": 8, "expert": 4}, model=model)
    assert rescaled(experts, 4) == small_recipe(VHA, {"sharding": 4, "expert": 4}, model=model)
    assert rescaled(experts, 2) == small_recipe(VHA, {"sharding": 2, "expert": 2}, model=model)
    four = small_recipe(VHA, {"data": 2}, data={"micro_batch_size": 4})
    assert rescaled(four, 8) == small_recipe(VHA, {"data": 8}, data={"micro_batch_size": 1})
    assert rescaled(four, 16) is None  # 8 sequences a step


EXPERTS = {
    "intermediate_size": None,
    "experts": {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def test_experts_are_divided_over_what_divides_both_them_and_the_shards() -> None:
    found = list(candidates(small_recipe(VHA, model=EXPERTS), 8))
    for recipe in found:
        check(recipe)
        assert recipe.num_ranks == 8  # experts take no ranks of their own
    pairs = {(recipe.parallel.sharding, recipe.parallel.expert) for recipe in found}
    assert {(1, 1), (8, 1), (8, 2), (8, 4)} <= pairs
    assert not any(expert == 8 for _, expert in pairs)  # 12 experts
    assert {recipe.parallel.expert for recipe in candidates(small_recipe(VHA), 8)} == {1}


def test_the_own_expert_degree_is_tried_beyond_a_node() -> None:
    model = EXPERTS | {"experts": EXPERTS["experts"] | {"num_experts": 16}}  # type: ignore[operator]
    recipe = small_recipe(VHA, {"sharding": 16, "expert": 16}, model=model, data={"global_batch_size": 16})
    assert {candidate.parallel.expert for candidate in candidates(recipe, 16)} == {1, 2, 4, 8, 16}
