"""What a rank holds at each stage of ZeRO. That training does not change is tested in tests/distributed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paddle import nn

from tests.cases import GLOBAL_BATCH, MICRO_BATCH
from tests.distributed.launch import run_ranks
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from vha_paddle.parallel.init import Constant
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import owners_of, with_gradient, with_weight
from vha_paddle.parallel.placement import Placement, info_of
from vha_paddle.parallel.scope import Scope
from vha_paddle.parallel.sharding import Sharding

WORKER = Path(__file__).with_name("sharding_worker.py")
NUM_RANKS = 2
NUM_MICROBATCHES = GLOBAL_BATCH // NUM_RANKS // MICRO_BATCH
TABLE, NORM = "model.embed_tokens.weight", "model.norm.weight"

Seen = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The observations of every rank, by stage and case."""
    directory = tmp_path_factory.mktemp("sharding")
    run_ranks(WORKER, NUM_RANKS, [str(directory)])
    return [json.loads((directory / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(NUM_RANKS)]


def size_of(names: set[str] | list[str], here: dict[str, Any]) -> int:
    return sum(here["sizes"][name] for name in names)


each_rank = pytest.mark.parametrize("rank", range(NUM_RANKS))
each_head = pytest.mark.parametrize("head", ["tied", "untied"])
each_stage = pytest.mark.parametrize("stage", [2, 3])


@each_rank
@each_head
@each_stage
class TestGradients:
    def test_after_backward_a_rank_has_the_gradients_of_its_own_parameters_only(
        self, seen: Seen, rank: int, head: str, stage: int
    ) -> None:
        here = seen[rank][f"{stage} {head}"]
        assert 0 < len(here["owned"]) < len(here["sizes"])
        assert here["gradients"] == here["owned"]

    def test_during_backward_none_outlives_its_sum(self, seen: Seen, rank: int, head: str, stage: int) -> None:
        assert seen[rank][f"{stage} {head}"]["most_gradients"] == 0
        assert seen[rank][f"1 {head}"]["most_gradients"] == len(seen[rank][f"1 {head}"]["sizes"])


@each_rank
@each_head
class TestWeights:
    @pytest.mark.parametrize("moment", ["built", "after_backward", "after_step", "after_evaluation"])
    def test_outside_forward_and_backward_a_rank_holds_its_own_only(
        self, seen: Seen, rank: int, head: str, moment: str
    ) -> None:
        here = seen[rank][f"3 {head}"]
        assert here[moment] == here["owned"]

    def test_a_block_runs_with_all_of_its_own_and_no_other_blocks_weights(
        self, seen: Seen, rank: int, head: str
    ) -> None:
        here = seen[rank][f"3 {head}"]
        gathered = {name for name in here["sizes"] if name.startswith("model.layers.0.")} | kept_through_backward(head)
        assert set(here["in_block"]) == set(here["owned"]) | gathered
        assert set(here["after_block"]) == set(here["owned"]) | kept_through_backward(head)

    def test_a_unit_is_released_when_its_backward_is_over(self, seen: Seen, rank: int, head: str) -> None:
        here = seen[rank][f"3 {head}"]
        assert set(here["at_last_gradient"]) == set(here["owned"]) | kept_through_backward(head)

    def test_the_memory_of_the_others_is_given_back(self, seen: Seen, rank: int, head: str) -> None:
        here, stage_1 = seen[rank][f"3 {head}"], seen[rank][f"1 {head}"]
        assert stage_1["built_bytes"] == 4 * size_of(list(here["sizes"]), here)
        assert here["built_bytes"] == 4 * size_of(here["owned"], here)

    def test_what_autograd_saves_for_backward_keeps_no_weight(self, seen: Seen, rank: int, head: str) -> None:
        here, stage_1 = seen[rank][f"3 {head}"], seen[rank][f"1 {head}"]
        kept = kept_through_backward(head) - set(here["owned"])
        assert here["forward_bytes"] == stage_1["forward_bytes"] + 4 * size_of(kept, here)

    def test_each_unit_travels_once_for_forward_and_once_for_backward(self, seen: Seen, rank: int, head: str) -> None:
        here = seen[rank][f"3 {head}"]
        blocks = {name for name in here["sizes"] if name.startswith("model.layers.")}
        both_ways = blocks if head == "tied" else blocks | {"lm_head.weight"}
        forward_only = set() if head == "tied" else {TABLE}  # the gradient of a lookup needs no table
        expected = NUM_MICROBATCHES * (2 * size_of(both_ways, here) + size_of(forward_only, here))
        assert here["gathered"] == expected + size_of(kept_through_backward(head), here)

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_an_update_sends_the_weights_that_all_ranks_keep(
        self, seen: Seen, rank: int, head: str, stage: int
    ) -> None:
        here = seen[rank][f"{stage} {head}"]
        assert here["sent_by_update"] == (0 if stage == 3 else size_of(list(here["sizes"]), here))

    def test_evaluation_sees_the_updated_weights(self, seen: Seen, rank: int, head: str) -> None:
        here, stage_1 = (np.array(seen[rank][f"{stage} {head}"]["evaluation"]) for stage in (3, 1))
        assert_close(here, stage_1, FLOAT32, "loss of each token")


def kept_through_backward(head: str) -> set[str]:
    """What lies in no unit: a tied table is used at both ends of the model."""
    return {TABLE, NORM} if head == "tied" else {NORM}


@each_rank
@pytest.mark.parametrize("stage", [1, 2, 3])
@each_head
def test_an_update_leaves_no_gradient_in_memory(seen: Seen, rank: int, head: str, stage: int) -> None:
    assert seen[rank][f"{stage} {head}"]["gradients_after_step"] == []


@each_stage
def test_layers_run_again_in_backward_and_called_twice_have_the_right_gradients(seen: Seen, stage: int) -> None:
    found = {}
    for rank in range(NUM_RANKS):
        here = seen[rank][f"{stage} toy"]
        assert sorted(here["gradients"]) == here["owned"]
        assert stage == 2 or here["held"] == here["owned"]
        found |= here["gradients"]
    whole = [seen[rank]["1 toy"]["gradients"] for rank in range(NUM_RANKS)]
    assert found.keys() == whole[0].keys()
    for name in found:
        expected = np.sum([gradients[name] for gradients in whole], axis=0)  # at stage 1 each is its rank's share
        assert_close(np.array(found[name]), expected, FLOAT64, name)


class Mixture(nn.Layer):
    """Four parameters of one size, two of them of experts."""

    def __init__(self) -> None:
        super().__init__()
        scope = Scope(Mesh(), "float32", 0, "mixture")
        for name in ("router", "shared", "up", "down"):
            parameter = scope.parameter(self, name, Placement.replicated((3, 3), False), Constant(1.0), "matrix")
            info = info_of(parameter)
            by_expert = replace(info.placement, by_expert=name in ("up", "down"))
            parameter.info = replace(info, placement=by_expert)
            self.add_parameter(name, parameter)


@pytest.mark.parametrize("rank", range(4))
def test_the_parameters_of_experts_are_owned_among_the_ranks_that_hold_them(rank: int) -> None:
    mesh = Mesh(sharding_rank=rank, sharding_degree=4, expert_rank=rank % 2, expert_degree=2)
    owners = owners_of(Mixture().parameters(), mesh)
    assert (owners["mixture.router"], owners["mixture.shared"]) == (0, 1)
    assert (owners["mixture.up"], owners["mixture.down"]) == (rank % 2, 2 + rank % 2)


@each_stage
@pytest.mark.parametrize("rank", range(4))
def test_the_parameters_of_experts_stay_at_stage_1(stage: int, rank: int) -> None:
    mesh = Mesh(sharding_rank=rank, sharding_degree=4, sharding_stage=stage, expert_rank=rank % 2, expert_degree=2)
    model = Mixture()
    Sharding(model, [], mesh)
    experts = {"mixture.up", "mixture.down"}
    own = experts | {0: {"mixture.router"}, 1: {"mixture.shared"}}.get(rank, set())
    kept = {info_of(parameter).name for parameter in model.parameters() if parameter._is_initialized()}
    assert kept == (own if stage == 3 else {info_of(parameter).name for parameter in model.parameters()})
    assert {info_of(parameter).name for parameter in with_weight(model.parameters(), mesh)} == kept
    assert {info_of(parameter).name for parameter in with_gradient(model.parameters(), mesh)} == own
