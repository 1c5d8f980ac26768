"""The tensors that a plan says a rank holds are those of the built model; several ranks: tests/distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from tests.counts.models import MILLIONS, published
from tests.plan.recipes import GROUPED, VHA, small_recipe
from vha_paddle.config import Attention, Model, Parallel
from vha_paddle.errors import UserError
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel import ownership
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.plan.stages import assign_owners, chunks_of, owned_sizes, stage_tensors, tensor_owners


def built(model: Model) -> list[tuple[str, int]]:
    return [(info_of(parameter).name, parameter.size) for parameter in build_decoder(model, Mesh(), 1).parameters()]


def planned(model: Model) -> list[tuple[str, int]]:
    return [(tensor.name, tensor.size) for tensor in stage_tensors(model, Parallel(), 0)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "attention", [VHA, GROUPED, GROUPED | {"num_key_value_heads": 8}, GROUPED | {"num_key_value_heads": 1}]
)
def test_one_process_holds_what_the_decoder_is_built_of_in_its_order(attention: dict[str, Any], tied: bool) -> None:
    model = small_recipe(attention, tied=tied).model
    assert planned(model) == built(model)


@pytest.mark.parametrize(("size", "attention", "millions"), MILLIONS)
def test_published_shapes_are_planned_as_they_are_built(size: str, attention: Attention, millions: float) -> None:
    model = published(size, attention)
    with paddle.LazyGuard():
        expected = built(model)
    assert planned(model) == expected
    assert round(sum(count for _, count in expected) / 1e6, 3) == millions


@pytest.mark.parametrize("degree", [1, 2, 5, 40])
def test_the_largest_tensor_goes_first_and_each_to_the_least_loaded(degree: int) -> None:
    sizes = [int(size) for size in np.random.default_rng(3).integers(1, 6, 33)]  # many ties
    load, expected = [0] * degree, {}
    for size, index in sorted((-size, index) for index, size in enumerate(sizes)):
        expected[index] = load.index(min(load))
        load[expected[index]] -= size
    assert assign_owners(sizes, degree) == [expected[index] for index in range(len(sizes))]


def test_the_optimizer_divides_the_built_model_as_planned() -> None:
    model = small_recipe(VHA).model
    parameters = build_decoder(model, Mesh(), 1).parameters()
    planned_owners = tensor_owners(model, Parallel(sharding=3), 0)
    names = [tensor.name for tensor in stage_tensors(model, Parallel(sharding=3), 0)]
    assert ownership.assign_owners(parameters, 3) == dict(zip(names, planned_owners, strict=True))


def test_owned_sizes_add_up_to_the_stage() -> None:
    recipe = small_recipe(VHA, {"sharding": 4, "tensor": 2})
    whole = sum(tensor.size for tensor in stage_tensors(recipe.model, recipe.parallel, 0))
    owned = owned_sizes(recipe.model, recipe.parallel, 0)
    assert len(owned) == 4 and sum(owned) == whole


def test_a_stage_holds_every_pth_chunk() -> None:
    parallel = Parallel(pipeline=2, virtual_pipeline=3)
    assert chunks_of(12, parallel, 0) == [range(0, 2), range(4, 6), range(8, 10)]
    assert chunks_of(12, parallel, 1) == [range(2, 4), range(6, 8), range(10, 12)]


@pytest.mark.parametrize("tied", [True, False])
def test_stages_together_hold_the_model_and_a_tied_embedding_twice(tied: bool) -> None:
    model = small_recipe(VHA, tied=tied).model
    stages = [stage_tensors(model, Parallel(pipeline=4), stage) for stage in range(4)]
    names = sorted(tensor.name for stage in stages for tensor in stage)
    copies = ["model.embed_tokens.weight"] if tied else []
    assert names == sorted([name for name, _ in planned(model)] + copies)
    assert ("model.embed_tokens.weight" in {tensor.name for tensor in stages[-1]}) == tied


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"parallel.pipeline=3 .* must divide model.num_hidden_layers=4"):
        stage_tensors(small_recipe(VHA).model, Parallel(pipeline=3), 0)
