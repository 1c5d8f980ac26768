"""A run of a mixture of experts in one process: what it tells, keeps, and starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import NUM_STEPS, MakeRecipe
from vha_paddle.checkpoint.inspect import describe, find_faults, reshard
from vha_paddle.checkpoint.layout import MANIFEST_FILE, open_checkpoint, step_directory
from vha_paddle.config import Recipe
from vha_paddle.errors import UserError
from vha_paddle.evaluate import load_model, validation_loss
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.trainer import RunData, Trainer

EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "router_bias_update_rate": 0.004,
    "capacity_factor": 1.25,
}
MIXTURE: dict[str, Any] = {"model__intermediate_size": None, "model__experts": EXPERTS}


def fit(recipe: Recipe) -> Trainer:
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    trainer.fit()
    return trainer


def newest(recipe: Recipe) -> Path:
    return step_directory(Path(recipe.run.output), NUM_STEPS)


def test_every_step_records_how_the_experts_were_used_and_the_console_the_worst(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(**MIXTURE)
    fit(recipe)
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    figures = [json.loads(line)["moe"] for line in lines]
    assert len(figures) == NUM_STEPS
    for moe in figures:
        assert moe["worst_load"] == max(moe["max_load"]) and all(1 <= load <= 2.5 for load in moe["max_load"])
        assert len(moe["dead_experts"]) == len(moe["dropped"]) == 2 and all(0 <= share < 1 for share in moe["dropped"])
    assert figures[0]["aux_loss"] == pytest.approx(2e-3)  # an even load in the first step: the coefficient per layer
    assert f"expert load {figures[-1]['worst_load']:.2f}  " in capsys.readouterr().out


def test_a_dense_run_records_nothing_of_experts(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe()
    fit(recipe)
    assert '"moe"' not in (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8")
    assert "expert" not in capsys.readouterr().out
    assert not any("router" in name for name in open_checkpoint(newest(recipe)).files)


def test_a_model_read_back_chooses_by_the_biases_that_it_was_trained_with(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(**MIXTURE)
    trainer = fit(recipe)
    assert trainer.model.balance is not None and trainer.model.balance.bias_LE is not None
    assert trainer.model.balance.bias_LE.any()
    model, windows = load_model(newest(recipe)), trainer.data.validation["validation"].windows
    loss = validation_loss(model, windows, recipe.logging.eval_sequences, 2, Mesh())
    assert {"validation": loss} == trainer.evaluate()
    model.balance.bias_LE = np.zeros_like(model.balance.bias_LE)
    assert validation_loss(model, windows, recipe.logging.eval_sequences, 2, Mesh()) != loss


def test_a_run_resumed_in_the_middle_is_bit_equal_to_an_unbroken_one(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    unbroken, broken = (make_recipe(run__output=str(tmp_path / name), **MIXTURE) for name in ("unbroken", "broken"))
    expected = fit(unbroken)
    first = Trainer(broken, RunData(broken), Mesh())
    for _ in range(3):
        first._train_one()
    first.save()
    first._saver.wait()
    resumed = fit(broken)
    assert resumed.model.balance is not None and expected.model.balance is not None
    for name, array in expected.model.balance.state().items():
        assert np.array_equal(resumed.model.balance.state()[name], array), name
    for name, parameter in expected.model.named_tensors().items():
        assert np.array_equal(resumed.model.named_tensors()[name].numpy(), parameter.numpy()), name


def test_a_run_that_starts_from_another_takes_its_load_and_biases(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    first = make_recipe(**MIXTURE)
    before = fit(first).model.balance
    second = make_recipe(run__output=str(tmp_path / "second"), run__start_from=first.run.output, **MIXTURE)
    after = Trainer(second, RunData(second), Mesh()).model.balance
    assert before is not None and after is not None
    assert all(np.array_equal(after.state()[name], array) for name, array in before.state().items())


def test_biases_that_a_start_does_not_have_begin_at_zero(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    without = make_recipe(**MIXTURE | {"model__experts": EXPERTS | {"router_bias_update_rate": 0.0}})
    before = fit(without).model.balance
    second = make_recipe(run__output=str(tmp_path / "second"), run__start_from=without.run.output, **MIXTURE)
    after = Trainer(second, RunData(second), Mesh()).model.balance
    assert before is not None and after is not None and before.bias_LE is None
    assert np.array_equal(after.load_LE, before.load_LE)
    assert after.bias_LE is not None and not after.bias_LE.any()


def test_inspecting_and_resharding_keep_what_the_routers_remember(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(**MIXTURE)
    fit(recipe)
    source = newest(recipe)
    names = {row["name"] for row in describe(source)["tensors"]}
    assert {f"model.layers.{layer}.mlp.gate.{what}" for layer in (0, 1) for what in ("load", "bias")} <= names
    assert not any(find_faults(source, lambda count: None).values())
    reshard(source, tmp_path / "out", 2, lambda count: None)
    before, after = (open_checkpoint(path).router_tensors() for path in (source, tmp_path / "out"))
    assert list(before) == list(after)
    assert all(before.array(name).tobytes() == after.array(name).tobytes() for name in before)


def test_a_checkpoint_without_the_routers_memory_is_refused(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(**MIXTURE)
    fit(recipe)
    path = newest(recipe)
    (path / "router-00000-of-00001.safetensors").unlink()
    with pytest.raises(UserError, match="router-00000-of-00001.safetensors is missing"):
        load_model(path)
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    del manifest["files"]["router-00000-of-00001.safetensors"]
    (path / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match="tensor model.layers.0.mlp.gate.load is missing"):
        load_model(path)
