"""Counts and plan against the model that is built, for every kind, hybrids and experts, on ranks of many layouts.

Models are built without memory for their values, so the largest published shape is among them. What several ranks
hold of a running model is compared in tests/distributed/test_communication.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.built import built_for
from tests.cases import CASES, Case
from tests.counts.models import MILLIONS, VHA_48, a3b, grouped, published
from vha_paddle import counts
from vha_paddle.config import Attention, Model, Parallel
from vha_paddle.config.check import check
from vha_paddle.errors import UserError
from vha_paddle.parallel.ownership import owners_of
from vha_paddle.parallel.placement import info_of
from vha_paddle.plan.stages import owned_sizes, stage_tensors, tensor_owners

# A new layout is one row.
LAYOUTS = {
    "one": Parallel(),
    "tensor_2": Parallel(tensor=2),
    "tensor_4_sequence": Parallel(tensor=4, sequence=True),
    "expert_2": Parallel(sharding=4, expert=2),
    "tensor_2_expert_2": Parallel(tensor=2, sequence=True, sharding=2, expert=2),
}


def allowed(case: Case, layout: str) -> bool:
    parallel = LAYOUTS[layout]
    data = case.recipe().data.model_copy(update={"global_batch_size": 8, "micro_batch_size": 1})
    try:
        check(case.recipe().model_copy(update={"parallel": parallel, "data": data}))
    except UserError:
        return False
    return True


PAIRS = [(case, layout) for case in CASES for layout in LAYOUTS if allowed(case, layout)]


def assert_built_as_counted(model: Model, parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Names, order, sizes and roles of every parameter, and the sums; returns the parameters of the rank."""
    decoder, _ = built_for(model, parallel, monkeypatch)
    parameters = decoder.parameters()
    planned = stage_tensors(model, parallel, 0)
    assert [(tensor.name, tensor.size) for tensor in planned] == [(info_of(p).name, p.size) for p in parameters]
    assert [tensor.is_expert for tensor in planned] == [info_of(p).is_expert for p in parameters]
    if parallel.tensor > 1:
        assert [t.partial_gradient for t in planned] == [info_of(p).placement.partial_gradient for p in parameters]
    total = sum(parameter.size for parameter in parameters)
    assert counts.parameters(model, parallel.tensor, parallel.expert).total == total
    return total


@pytest.mark.parametrize(("case", "layout"), PAIRS, ids=[f"{case.name}-{layout}" for case, layout in PAIRS])
def test_a_rank_holds_what_is_counted(case: Case, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_built_as_counted(case.recipe().model, LAYOUTS[layout], monkeypatch)


def test_every_kind_and_layout_is_among_the_pairs() -> None:
    kinds = {case.recipe().model.attention.kind for case, layout in PAIRS if layout == "tensor_4_sequence"}
    assert kinds == {"grouped", "vha", "mla", "mfa", "gva", "dcmha"}
    with_experts = {layout for case, layout in PAIRS if case.recipe().model.experts is not None}
    assert {"one", "tensor_2", "expert_2", "tensor_2_expert_2"} <= with_experts
    assert any(case.recipe().model.sliding_window is not None for case, _ in PAIRS)


@pytest.mark.parametrize(("size", "attention", "millions"), MILLIONS)
def test_published_shapes_are_built_as_counted(
    size: str, attention: Attention, millions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = assert_built_as_counted(published(size, attention), Parallel(), monkeypatch)
    assert round(total / 1e6, 3) == millions


@pytest.mark.parametrize(
    ("attention", "parallel", "parameters"),
    [
        (grouped(32, 4), Parallel(), 30_532_122_624),
        (VHA_48, Parallel(), 30_584_082_432),
        (VHA_48, Parallel(sharding=64, expert=8), 5_216_931_840),
        (VHA_48, Parallel(sharding=128, expert=128), 1_819_545_600),
        (VHA_48, Parallel(tensor=4, sequence=True, sharding=64, expert=8), 1_352_756_736),
        (VHA_48, Parallel(tensor=8, sharding=8, expert=8), 708_727_552),
        (grouped(32, 4), Parallel(tensor=8, sequence=True, sharding=16, expert=16), 518_404_096),
    ],
)
def test_30b_a3b_is_built_as_planned(
    attention: Attention, parallel: Parallel, parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = assert_built_as_counted(a3b(attention), parallel, monkeypatch)
    assert total == parameters


def test_the_shards_of_30b_a3b_are_those_of_the_built_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, parallel = a3b(VHA_48), Parallel(sharding=64, expert=8)
    decoder, mesh = built_for(model, parallel, monkeypatch)
    parameters = decoder.parameters()
    owners = owners_of(parameters, mesh)
    assert list(tensor_owners(model, parallel, 0)) == [owners[info_of(parameter).name] for parameter in parameters]
    owned = owned_sizes(model, parallel, 0)
    experts = sum(parameter.size for parameter in parameters if info_of(parameter).is_expert)
    # dense parameters are owned once among all 64 ranks, each rank's experts once among the 8 that hold the same
    assert sum(owned) == sum(parameter.size for parameter in parameters) + 7 * experts
    assert sum(owned) == counts.parameters(model).total
    mine = sum(parameter.size for parameter in parameters if owners[info_of(parameter).name] == 0)
    assert owned[0] == mine


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_names_the_owners_that_the_built_model_names(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == "moe_vha_tied")
    model, parallel = case.recipe().model, Parallel(sharding=4, expert=2)
    decoder, mesh = built_for(model, parallel, monkeypatch)
    mesh = replace(mesh, sharding_rank=rank, expert_rank=rank % 2)
    parameters = decoder.parameters()
    owners = owners_of(parameters, mesh)
    assert list(tensor_owners(model, parallel, 0, rank)) == [owners[info_of(p).name] for p in parameters]
    mine = sum(parameter.size for parameter in parameters if owners[info_of(parameter).name] == rank)
    assert owned_sizes(model, parallel, 0)[rank] == mine
