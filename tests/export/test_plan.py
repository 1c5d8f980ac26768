"""The fate of every tensor: read once, written once, or named with the reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints import SMALL_EXPERTS, SMALL_MIXTURE, SMALL_VHA, small_model
from tests.weights import trained_weights
from vha_paddle.config import Model
from vha_paddle.errors import RunError
from vha_paddle.export.ahead import ReadAhead
from vha_paddle.export.plan import Plan, describe_plan, make_plan, planned_tensors
from vha_paddle.export.stock import stock_target, unfolded_target
from vha_paddle.names import expected_tensors
from vha_paddle.sources.base import WeightSpec

PREFIX = "model.layers.1.self_attn."
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass
class InMemory:
    """The weights of a model; `read_names` says what was read, in order."""

    arrays: Mapping[str, np.ndarray]
    specs: Mapping[str, WeightSpec]
    left_out: Mapping[str, str] = field(default_factory=dict)
    read_names: list[str] = field(default_factory=list)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        self.read_names.append(name)
        return np.array(self.arrays[name])


def weights_of(model: Model) -> InMemory:
    arrays = trained_weights(model, seed=0)
    return InMemory(arrays, {name: WeightSpec(array.shape, array.dtype, (name,)) for name, array in arrays.items()})


def plan_of(model: Model) -> Plan:
    return make_plan(weights_of(model), planned_tensors(model, stock_target(model, "test"), BFLOAT16))


def test_the_plan_names_what_is_folded_into_each_tensor() -> None:
    targets = {tensor.name: tensor for tensor in plan_of(small_model(SMALL_VHA | {"attention_bias": True})).targets}
    query, output = targets[f"{PREFIX}q_proj.weight"], targets[f"{PREFIX}o_proj.weight"]
    assert query.sources == (f"{PREFIX}q_proj.weight", f"{PREFIX}premix")
    assert output.sources == (f"{PREFIX}o_proj.weight", f"{PREFIX}postmix_a", f"{PREFIX}postmix_b")
    assert targets[f"{PREFIX}q_proj.bias"].sources == (f"{PREFIX}q_proj.bias", f"{PREFIX}premix")
    assert targets[f"{PREFIX}o_proj.bias"].sources == (f"{PREFIX}o_proj.bias",)
    assert (query.shape, query.num_bytes, output.shape) == ((48, 20), 48 * 20 * 2, (20, 48))
    assert targets["model.norm.weight"].sources == ("model.norm.weight",)
    assert not any(name.endswith(("premix", "postmix_a", "postmix_b")) for name in targets)


def test_every_tensor_has_a_fate() -> None:
    model = small_model(SMALL_VHA, **SMALL_MIXTURE)
    plan = plan_of(model)
    fates = {fate.name: fate for fate in plan.fates}
    assert list(fates) == list(expected_tensors(model))
    assert fates[f"{PREFIX}premix"].becomes == () and fates[f"{PREFIX}premix"].folded_into == (
        f"{PREFIX}q_proj.weight",
    )
    experts = fates["model.layers.0.mlp.experts.up_proj"].becomes
    assert experts == tuple(
        f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(SMALL_EXPERTS["num_experts"])
    )
    assert sorted(name for fate in plan.fates for name in fate.becomes) == sorted(each.name for each in plan.targets)


def test_maps_that_are_written_are_not_folded() -> None:
    model = small_model(SMALL_VHA)
    plan = make_plan(weights_of(model), planned_tensors(model, unfolded_target(model, "test"), BFLOAT16))
    assert all(len(tensor.sources) == 1 for tensor in plan.targets)
    assert all(fate.becomes and not fate.folded_into for fate in plan.fates)


def test_the_list_has_a_line_for_each_tensor_with_its_fate() -> None:
    model = small_model(SMALL_VHA | {"attention_bias": True}, **SMALL_MIXTURE)
    weights = weights_of(model)
    bias = f"{PREFIX}o_proj.bias"
    specs = {
        name: replace(spec, stored=() if name == bias else (f"{name}.master",)) for name, spec in weights.specs.items()
    }
    rounded = {name: f"rounded from {name}.master" for name in specs if name != bias}
    weights = InMemory(weights.arrays, specs, {"lm_head.weight": "a copy", **rounded})
    planned = planned_tensors(model, stock_target(model, "test"), BFLOAT16)
    lines = describe_plan(make_plan(weights, planned)).splitlines()
    assert f"zeros [20] float64 -> {bias} [20] bfloat16, 40 bytes" in lines
    assert (
        f"{PREFIX}premix.master [2, 8, 8] float64 -> folded into {PREFIX}q_proj.weight and {PREFIX}q_proj.bias" in lines
    )
    before = "model.layers.0.mlp.experts"
    assert (
        f"{before}.up_proj.master [5, 20, 12] float64 -> {before}.0.up_proj.weight to {before}.4.up_proj.weight "
        "(5 tensors) [12, 20] bfloat16, 2,400 bytes" in lines
    )
    assert "lm_head.weight -> left out: a copy" in lines
    assert lines[-2] == (
        f"model.embed_tokens.weight to model.norm.weight ({len(rounded)} tensors) -> left out: rounded from the "
        "masters, which are read"
    )
    total = sum(tensor.num_bytes for tensor in planned)
    assert lines[-1] == (
        f"{len(specs) - 1} tensors read, {len(rounded) + 1} left out; {len(planned)} tensors to write, each once, "
        f"{total:,} bytes in bfloat16"
    )
    assert len(lines) == len(specs) + 3


@pytest.mark.parametrize("fault", ["twice", "absent", "unused"])
def test_a_plan_that_does_not_add_up_is_refused(fault: str) -> None:
    model = small_model(SMALL_VHA)
    weights, planned = weights_of(model), planned_tensors(model, stock_target(model, "test"), BFLOAT16)
    if fault == "twice":
        planned, words = [*planned, planned[3]], f"{planned[3].name} would be written 2 times"
    elif fault == "absent":
        planned = [*planned, replace(planned[0], name="new", sources=("absent",))]
        words = "new would be made of absent, which is not there"
    else:
        planned, words = planned[:-1], f"{planned[-1].name} would not be used"
    with pytest.raises(RunError, match=words):
        make_plan(weights, planned)


# Reading


def test_tensors_are_read_once_in_order_and_ahead() -> None:
    model = small_model(SMALL_VHA)
    weights = weights_of(model)
    with ReadAhead(weights) as state:
        assert list(state) == list(weights.specs) and len(state) == len(weights.specs)
        for name in weights.specs:
            np.testing.assert_array_equal(state[name], weights.arrays[name])
        state.check_all_read()
    assert weights.read_names == list(weights.specs)


def test_no_more_is_read_ahead_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 10, "b": 3, "c": 3, "d": 10, "e": 1, "f": 1, "g": 1}
    arrays = {name: np.zeros(size) for name, size in sizes.items()}
    weights = InMemory(arrays, {name: WeightSpec(each.shape, each.dtype, (name,)) for name, each in arrays.items()})
    monkeypatch.setattr("vha_paddle.export.ahead._NEXT_BYTES", 3 * 8)  # and the largest: 13 values for two
    monkeypatch.setattr("vha_paddle.export.ahead._AHEAD_BYTES", 6 * 8)
    seen = {}
    with ReadAhead(weights) as state:
        for name in sizes:
            state[name]
            state._pool.submit(lambda: None).result()  # until the thread has nothing left to do
            seen[name] = weights.read_names[-1]
    assert seen == {"a": "b", "b": "c", "c": "d", "d": "e", "e": "g", "f": "g", "g": "g"}


@pytest.mark.parametrize(("asked", "words"), [("b", "b was asked for where a is to be read"), ("a", "b was not used")])
def test_a_tensor_out_of_turn_or_left_over_is_a_fault(asked: str, words: str) -> None:
    arrays = {"a": np.zeros(2), "b": np.zeros(3)}
    weights = InMemory(arrays, {name: WeightSpec(each.shape, each.dtype, (name,)) for name, each in arrays.items()})
    with ReadAhead(weights) as state, pytest.raises(RunError, match=words):
        state[asked]
        state.check_all_read()


def test_a_fault_of_reading_is_raised_where_the_tensor_is_asked_for(tmp_path: Path) -> None:
    arrays = {"a": np.zeros(2)}
    weights = InMemory({}, {name: WeightSpec(each.shape, each.dtype, (name,)) for name, each in arrays.items()})
    with ReadAhead(weights) as state, pytest.raises(KeyError):
        state["a"]
