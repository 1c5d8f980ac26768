"""Predicted times: the arithmetic of the stated utilisation, the bubble and what is recomputed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.recipes import DCMHA, GROUPED, GVA, MFA, MLA, VHA, small_recipe
from vha_paddle.counts import FlopRule, forward_flops_by_part, training_flops
from vha_paddle.errors import UserError
from vha_paddle.plan.communication import transfers
from vha_paddle.plan.cost import crosses_nodes, make_plan, recomputed_flops
from vha_paddle.plan.gpus import GPUS, gpu_named
from vha_paddle.plan.memory import RESERVE

H800 = GPUS["h800"]
CAUSAL = FlopRule(sequence_length=8, causal=True)


def test_a_step_takes_its_flops_over_the_share_of_the_peak_that_is_reached() -> None:
    recipe = small_recipe(VHA, {"data": 4})
    plan = make_plan(recipe, H800, 0.25)
    flops = 64 * training_flops(recipe.model, CAUSAL)
    assert plan.step_seconds == pytest.approx(flops / (4 * 989e12 * 0.25))
    pace = plan.stated
    assert pace.step_seconds == plan.step_seconds
    assert pace.mfu(H800) == pytest.approx(0.25)
    assert pace.days == pytest.approx(100 * plan.step_seconds / 86400)
    assert pace.gpu_hours == pytest.approx(4 * 24 * pace.days)
    assert pace.tokens_per_second_per_gpu == pytest.approx(64 / 4 / plan.step_seconds)


def test_the_slow_end_of_the_range_adds_all_communication_to_every_step() -> None:
    plan = make_plan(small_recipe(VHA, {"data": 4}), H800, 0.25)
    step = plan.step_seconds + plan.communication_seconds
    assert step > plan.step_seconds
    pace = plan.with_communication
    assert (pace.step_seconds, pace.days) == (step, pytest.approx(100 * step / 86400))
    assert pace.gpu_hours == pytest.approx(4 * 100 * step / 3600)
    assert pace.mfu(H800) == pytest.approx(0.25 * plan.step_seconds / step)


def test_waiting_stages_and_recomputed_flops_lengthen_the_step() -> None:
    plain = make_plan(small_recipe(VHA, {"data": 2}), H800, 0.4)
    piped = make_plan(small_recipe(VHA, {"pipeline": 2}, recompute="full"), H800, 0.4)
    factor = (1 + piped.recomputed) * (8 + 1) / 8
    assert piped.step_seconds == pytest.approx(plain.step_seconds * factor)
    assert piped.stated.mfu(H800) == pytest.approx(0.4 / factor)


@pytest.mark.parametrize(
    ("attention", "mode", "parts"),
    [
        (VHA, "none", ()),
        (VHA, "selective", ("scores", "premix", "postmix")),
        (VHA | {"postmix_space": "weight"}, "selective", ("scores", "premix")),
        (GROUPED, "selective", ("scores",)),
        (GROUPED, "full", ("q_proj", "k_proj", "v_proj", "o_proj", "scores", "mlp")),
        (MLA, "selective", ("scores", "kv_b_proj")),
        (MFA, "selective", ("scores",)),
        (GVA, "selective", ("scores", "key_map")),
        (DCMHA, "selective", ("scores", "composition", "compose_factors")),
    ],
)
def test_recomputed_flops_are_those_of_the_parts_that_run_again(
    attention: dict[str, Any], mode: str, parts: tuple[str, ...]
) -> None:
    recipe = small_recipe(attention, recompute=mode)
    flops = forward_flops_by_part(recipe.model, CAUSAL)
    assert recomputed_flops(recipe) == sum(flops[part] for part in parts)


def test_a_group_crosses_nodes_when_it_spans_more_than_8_ranks() -> None:
    recipe = small_recipe(VHA, {"tensor": 2, "context": 2, "pipeline": 2, "data": 2})
    assert [crosses_nodes(recipe, axis) for axis in ("tensor", "context", "pipeline", "data")] == [
        False,
        False,
        False,
        True,
    ]


EXPERTS: dict[str, Any] = {
    "intermediate_size": None,
    "experts": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
}


@pytest.mark.parametrize(("expert", "crosses"), [(4, False), (8, True)])
def test_experts_lie_on_neighbours_of_the_sharding_axis(expert: int, crosses: bool) -> None:
    recipe = small_recipe(VHA, {"tensor": 2, "sharding": 8, "expert": expert}, model=EXPERTS)
    assert crosses_nodes(recipe, "expert") == crosses
    assert crosses_nodes(recipe, "sharding")


@pytest.mark.parametrize(
    ("fp8", "fast"),
    [
        ("none", ()),
        ("experts", ("experts",)),
        ("all", ("experts", "q_proj", "k_proj", "v_proj", "o_proj")),
    ],
)
def test_what_is_rounded_to_fp8_runs_at_its_peak(fp8: Any, fast: tuple[str, ...]) -> None:
    recipe = small_recipe(VHA, model=EXPERTS, recompute="full", compute="bfloat16")
    recipe = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"fp8": fp8})})
    plan = make_plan(recipe, H800, 0.5)
    parts = forward_flops_by_part(recipe.model, CAUSAL)
    again = {part: flops for part, flops in parts.items() if part != "lm_head"}  # recomputed
    seconds = sum(
        (3 * flops + again.get(part, 0)) / (1979e12 if part in fast else 989e12) for part, flops in parts.items()
    )
    assert plan.step_seconds == pytest.approx(64 * seconds / 0.5)
    assert plan.stated.mfu(H800) == pytest.approx(64 * 3 * sum(parts.values()) / (989e12 * plan.step_seconds))


def test_fp8_on_a_gpu_without_it_is_refused() -> None:
    recipe = small_recipe(VHA, compute="bfloat16")
    recipe = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"fp8": "all"})})
    with pytest.raises(UserError, match="precision.fp8=all: A100 SXM 80 GB has no FP8; use none or another --gpu"):
        make_plan(recipe, GPUS["a100"], 0.4)


def test_a_step_of_experts_takes_the_flops_of_those_that_a_token_uses() -> None:
    more = EXPERTS | {"experts": EXPERTS["experts"] | {"num_experts": 32}}
    few, many = (make_plan(small_recipe(VHA, model=model), H800, 0.4) for model in (EXPERTS, more))
    router = 3 * 2 * 4 * 24 * 16  # training, layers
    assert many.flops_per_token - few.flops_per_token == router


def test_communication_time_is_ring_bytes_over_the_link_they_cross() -> None:
    recipe = small_recipe(VHA, {"tensor": 2, "context": 2, "pipeline": 2, "data": 2})
    plan = make_plan(recipe, H800, 0.4)
    ring = {"data": 0, "others": 0}
    for transfer in plan.transfers:
        ring["data" if transfer.axis == "data" else "others"] += transfer.ring
    assert ring["data"] > 0 and ring["others"] > 0
    assert plan.communication_seconds == pytest.approx(ring["data"] / 50e9 + ring["others"] / 200e9)


def test_a_plan_shows_the_stage_that_communicates_longest() -> None:
    recipe = small_recipe(VHA, {"pipeline": 4})
    plan = make_plan(recipe, H800, 0.4)
    sent = [sum(transfer.ring for transfer in transfers(recipe, stage)) for stage in range(4)]
    assert sum(transfer.ring for transfer in plan.transfers) == max(sent) > min(sent)


def test_a_plan_fits_where_its_largest_rank_does() -> None:
    plan = make_plan(small_recipe(VHA, {"pipeline": 4}), H800, 0.4)
    assert plan.fits and plan.best.total < plan.worst.total
    between = (plan.best.total + plan.worst.total) / 2 / (1 - RESERVE)
    assert not replace(plan, gpu=replace(H800, memory=int(between))).fits


@pytest.mark.parametrize("mfu", [0.0, -0.1, 1.5, float("nan")])
def test_an_impossible_utilisation_is_refused(mfu: float) -> None:
    with pytest.raises(UserError, match="--mfu .*: must be above 0 and at most 1"):
        make_plan(small_recipe(VHA), H800, mfu)


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    assert gpu_named("H200").memory == 141 * 10**9
    with pytest.raises(UserError, match="--gpu v100: no such GPU in the table; use h800, h100, h200, a100"):
        gpu_named("v100")


def test_the_h800_differs_from_the_h100_in_nvlink() -> None:
    h100 = GPUS["h100"]
    assert (H800.bf16_flops, H800.memory) == (h100.bf16_flops, h100.memory) == (989e12, 80 * 10**9)
    assert (2 * H800.nvlink, 2 * h100.nvlink) == (400e9, 900e9)
