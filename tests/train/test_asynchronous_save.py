"""A run that saves behind training leaves the checkpoints of one that stops to save."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import NUM_STEPS, MakeRecipe
from vha_paddle.checkpoint import writing
from vha_paddle.checkpoint.layout import list_steps, open_checkpoint, step_directory
from vha_paddle.checkpoint.save import CheckpointSaver
from vha_paddle.config import Recipe
from vha_paddle.errors import RunError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train import trainer as trainer_module
from vha_paddle.train.trainer import RunData, Trainer


def fit(recipe: Recipe) -> None:
    Trainer(recipe, RunData(recipe), Mesh()).fit()


def test_the_checkpoints_are_those_of_a_synchronous_run(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    found = []
    for asynchronous in (False, True):
        output = tmp_path / f"asynchronous-{asynchronous}"
        fit(make_recipe(run__output=str(output), checkpoint={"asynchronous": asynchronous, "interval": 1, "keep": 3}))
        assert list_steps(output) == [NUM_STEPS - 2, NUM_STEPS - 1, NUM_STEPS]
        found.append({path.relative_to(output): path.read_bytes() for path in output.rglob("*.safetensors")})
    assert len(found[0]) == 6 and found[0] == found[1]


def test_an_update_waits_until_the_weights_are_copied(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, copy = [], CheckpointSaver._copy
    monkeypatch.setattr(CheckpointSaver, "_copy", lambda *arguments: (time.sleep(0.03), copy(*arguments)))
    for asynchronous in (False, True):
        output = tmp_path / f"asynchronous-{asynchronous}"
        recipe = make_recipe(run__output=str(output), checkpoint={"asynchronous": asynchronous, "interval": 3})
        fit(recipe)
        found.append({path.relative_to(output): path.read_bytes() for path in output.rglob("*.safetensors")})
    assert len(found[0]) == 4 and found[0] == found[1]


def test_a_run_that_fails_lets_the_save_in_flight_finish(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, write, step = threading.Event(), writing.write_own_tensors, trainer_module.train_step

    def held_until_the_failure(*arguments: Any) -> Any:
        assert failed.wait(60)
        return write(*arguments)

    def failing_after_step_3(*arguments: Any, **named: Any) -> Any:
        if list(Path(recipe.run.output).glob("checkpoints/.step-00000003.tmp")):
            failed.set()
            raise RunError("loss is not finite")
        return step(*arguments, **named)

    recipe = make_recipe(checkpoint={"asynchronous": True, "interval": 3})
    monkeypatch.setattr(writing, "write_own_tensors", held_until_the_failure)
    monkeypatch.setattr(trainer_module, "train_step", failing_after_step_3)
    with pytest.raises(RunError, match="step 4: loss is not finite"):
        fit(recipe)
    assert open_checkpoint(step_directory(Path(recipe.run.output), 3)).state.step == 3


def test_a_last_save_that_fails_fails_the_run(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_own_tensors", full)
    recipe = make_recipe(checkpoint={"asynchronous": True})
    with pytest.raises(RunError, match=r"not saved \(rank 0: No space left on device\)"):
        fit(recipe)
    assert list_steps(Path(recipe.run.output)) == []
