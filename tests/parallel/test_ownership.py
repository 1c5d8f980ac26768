"""Who keeps which optimizer state. That training does not change is tested in tests/distributed."""

from __future__ import annotations

import paddle
import pytest

from tests.cases import CASES
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import assign_owners, owned
from vha_paddle.parallel.placement import ParameterInfo, Placement, info_of
from vha_paddle.train.optimizer import Optimizer


@pytest.fixture
def model() -> Decoder:
    return build_decoder(CASES[0].recipe().model, Mesh(), seed=0)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_every_parameter_has_one_owner_and_the_loads_are_even(model: Decoder, degree: int) -> None:
    parameters = model.parameters()
    parts = [owned(parameters, Mesh(sharding_rank=rank, sharding_degree=degree)) for rank in range(degree)]
    names = [info_of(parameter).name for part in parts for parameter in part]
    assert sorted(names) == sorted(model.named_tensors())
    loads = [sum(parameter.size for parameter in part) for part in parts]
    assert max(loads) - min(loads) <= max(parameter.size for parameter in parameters)


def test_the_largest_tensor_is_placed_first_and_each_where_least_lies() -> None:
    parameters = []
    for name, size in {"a": 1, "b": 1, "c": 1, "d": 3}.items():
        parameter = paddle.zeros([size])
        parameter.info = ParameterInfo(name, Placement.replicated((size,), partial_gradient=False), "matrix")
        parameters.append(parameter)
    assert assign_owners(parameters, 2) == {"d": 0, "a": 1, "b": 1, "c": 1}


def test_a_rank_keeps_the_state_of_its_own_parameters_only(model: Decoder) -> None:
    mesh = Mesh(sharding_rank=1, sharding_degree=2)
    optimizer = Optimizer(model.parameters(), CASES[0].recipe(), mesh)
    mine = {info_of(parameter).name for parameter in owned(model.parameters(), mesh)}
    assert 0 < len(mine) < len(model.parameters())
    assert {name for states in optimizer.slots().values() for name in states} == mine
