"""Saves that fail cost a checkpoint, not the run, until too many have; records wait for a full disk."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import NUM_STEPS, MakeRecipe
from vha_paddle.checkpoint import writing
from vha_paddle.checkpoint.layout import checkpoints_directory, list_steps
from vha_paddle.config import Recipe
from vha_paddle.errors import RunError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.metrics import MetricsLog
from vha_paddle.train.trainer import RunData, Trainer

MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
WRITE = writing.write_own_tensors


def fit(recipe: Recipe) -> None:
    Trainer(recipe, RunData(recipe), Mesh()).fit()


def full_disk_at(monkeypatch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    def write(path: Path, *rest: Any) -> Any:
        if int(path.parent.name.split("-")[1].split(".")[0]) in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        return WRITE(path, *rest)

    monkeypatch.setattr(writing, "write_own_tensors", write)


def recipe_with(make_recipe: MakeRecipe, asynchronous: bool, max_failed: int) -> Recipe:
    rules = {"interval": 1, "keep": 9, "asynchronous": asynchronous, "max_failed_saves": max_failed}
    return make_recipe(checkpoint=rules)


@MODES
def test_failures_within_the_budget_are_told_and_training_goes_on(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    full_disk_at(monkeypatch, {1, 2, 4, 5})
    recipe = recipe_with(make_recipe, asynchronous, 2)
    fit(recipe)
    output = Path(recipe.run.output)
    assert list_steps(output) == [3, NUM_STEPS]
    assert not list(checkpoints_directory(output).glob(".*"))
    said = capsys.readouterr().out
    assert said.count("not saved (rank 0: No space left on device)") == 4
    assert said.count("training goes on (1 of 2 saves that may fail in a row)") == 2  # a save begins the count anew
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    late = asynchronous  # known when the next save begins
    failed = {2: 1, 3: 2, 5: 1, 6: 2} if not late else {3: 1, 4: 2, 6: 1}
    assert {line["step"]: line["failed_saves"] for line in lines if "failed_saves" in line} == failed


@MODES
def test_past_the_budget_the_run_ends(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    full_disk_at(monkeypatch, {2, 3, 4})
    recipe = recipe_with(make_recipe, asynchronous, 2)
    with pytest.raises(RunError, match=r"No space left on device.*failed one after another: 3; .*max_failed_saves=2"):
        fit(recipe)
    assert list_steps(Path(recipe.run.output)) == [1]


@MODES
def test_with_a_budget_of_none_the_first_failure_ends_the_run(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    full_disk_at(monkeypatch, {2})
    recipe = recipe_with(make_recipe, asynchronous, 0)
    with pytest.raises(RunError, match="No space left on device"):
        fit(recipe)


@MODES
def test_the_last_step_and_an_interrupted_one_must_be_saved(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    full_disk_at(monkeypatch, {4, NUM_STEPS})
    recipe = recipe_with(make_recipe, asynchronous, 9)
    with pytest.raises(RunError, match=r"not saved \(rank 0: No space left"):
        fit(recipe)
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    assert trainer.step == 5
    full_disk_at(monkeypatch, {NUM_STEPS, 2})
    again = recipe.model_copy(update={"run": recipe.run.model_copy(update={"output": f"{recipe.run.output}2"})})
    trainer = Trainer(again, RunData(again), Mesh())
    with pytest.raises(RunError, match="No space left"):
        trainer.fit(lambda: trainer.step == 2)


def test_records_that_do_not_fit_on_the_disk_are_written_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, 0)
    records = [{"step": step, "loss": float(step), "text": "x" * 50} for step in range(1, 6)]
    log.write(records[0])
    length = log.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + 20, before[1]))  # a part of a line fits
    try:
        log.write(records[1])
        log.write(records[2])
        assert log.path.stat().st_size == length
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.write(records[3])
    log.write(records[4])
    log.close()
    assert [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()] == records
    said = capsys.readouterr().err
    assert said.count("records kept in memory") == 2 and "records kept in memory: 2" in said


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    log.close()
    assert log.path.read_text(encoding="utf-8") == '{"step": 1, "loss": null, "grad_norm": null}\n'
