"""Trackers read back: every step once, also across a resume, and a tracker that fails."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import NUM_STEPS, MakeRecipe
from vha_paddle.checkpoint.layout import step_directory
from vha_paddle.config import Recipe
from vha_paddle.maps import means_of
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.phases import Phases
from vha_paddle.train.trackers import VISUALDL_FILE, WANDB_ID_FILE, curves_of, cut_after
from vha_paddle.train.trainer import RunData, Trainer

SAVED, ENDED = 3, 4  # steps: of the checkpoint that is resumed from, and after which the run was killed
WANDB_HEADER = 7
BLOCK = 32768
FRAGMENT = struct.Struct("<IHB")  # checksum, length, type of a piece of a record


def train(recipe: Recipe, steps: int = NUM_STEPS) -> None:
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    trainer.fit(lambda: trainer.step == steps)


def train_kill_and_resume(recipe: Recipe) -> None:
    """As a run that is killed after step `ENDED` and continues from step `SAVED`."""
    train(recipe, ENDED)
    shutil.rmtree(step_directory(Path(recipe.run.output), ENDED))
    train(recipe)


def records(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def wandb_starts(recipe: Recipe) -> list[list[Any]]:
    """The records of each start that has trained some step, in the order of their first steps."""
    paths = (Path(recipe.run.output) / "wandb").glob("offline-run-*/run-*.wandb")
    return sorted(map(finished_records, paths), key=lambda found: max(wandb_history(found)))


def finished_records(path: Path) -> list[Any]:
    """wandb's other process may still be writing when the run has ended."""
    deadline = time.monotonic() + 60
    while not (found := list(wandb_records(path))) or not found[-1].HasField("exit"):
        assert time.monotonic() < deadline, f"{path} does not end"
        time.sleep(0.05)
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """What an offline file holds: records in the format of LevelDB's log, in pieces that stay within blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, whole = path.read_bytes(), WANDB_HEADER, b""
    while position + FRAGMENT.size <= len(content):
        left = BLOCK - position % BLOCK
        if left < FRAGMENT.size:
            position += left
            continue
        _, length, kind = FRAGMENT.unpack_from(content, position)
        position += FRAGMENT.size
        whole += content[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or its last piece
            yield Record.FromString(whole)
            whole = b""


def wandb_history(records: list[Any]) -> dict[int, list[dict[str, float]]]:
    """The rows of each step."""
    found: dict[int, list[dict[str, float]]] = {}
    for record in records:
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            values = {key: json.loads(value) for key, value in row.items() if not key.startswith("_")}
            found.setdefault(record.history.step.num, []).append(values)
    return found


def run_ids(records: list[Any]) -> set[str]:
    return {record.run.run_id for record in records if record.HasField("run")}


def visualdl_scalars(recipe: Recipe) -> dict[str, dict[int, float]]:
    """By tag the values of the steps, each of which is there once."""
    from visualdl import LogReader

    reader = LogReader(file_path=os.fspath(Path(recipe.run.output) / VISUALDL_FILE))
    found = {}
    for tag in reader.get_tags()["scalar"]:
        values = reader.get_data("scalar", tag)
        found[tag] = {value.id: value.value for value in values}
        assert len(found[tag]) == len(values), f"{tag}: a step is there twice"
    return found


def expected_curves(recipe: Recipe) -> dict[str, dict[int, float]]:
    """What trackers should hold of metrics.jsonl, by name."""
    found: dict[str, dict[int, float]] = {}
    for record in records(recipe):
        for name, value in curves_of(record).items():
            found.setdefault(name, {})[record["step"]] = value
    return found


@pytest.fixture
def tracked(make_recipe: MakeRecipe) -> Recipe:
    return make_recipe(
        logging__wandb="offline", logging__wandb_project="test", logging__visualdl=True, logging__maps_interval=2
    )


def test_each_step_is_in_wandb_once_and_in_the_same_run_across_a_resume(tracked: Recipe) -> None:
    train_kill_and_resume(tracked)
    first, second = wandb_starts(tracked)
    assert run_ids(first) == run_ids(second) == {(Path(tracked.run.output) / WANDB_ID_FILE).read_text()}
    assert list(wandb_history(first)) == [1, 2, 3, 4]
    assert list(wandb_history(second)) == [5, 6]
    expected = expected_curves(tracked)
    for step, rows in (wandb_history(first) | wandb_history(second)).items():
        assert len(rows) == 1
        assert rows[0]["loss"] == expected["loss"][step]
        logged = {name for name, steps in expected.items() if step in steps}
        assert {name for name in set(rows[0]) ^ logged} <= {"seconds/start", "seconds/checkpoint"}  # of either start


def test_each_step_is_in_visualdls_file_once_across_a_resume(tracked: Recipe) -> None:
    train_kill_and_resume(tracked)
    found, expected = visualdl_scalars(tracked), expected_curves(tracked)
    assert {name: set(steps) for name, steps in found.items()} == {name: set(steps) for name, steps in expected.items()}
    assert {"loss", "seconds/forward", "grad_norms/premix", "maps/premix_distance", "memory/resident"} <= set(found)
    for name, steps in expected.items():
        assert [found[name][step] for step in steps] == [np.float32(value) for value in steps.values()], name


def test_a_record_that_a_crash_has_cut_is_taken_from_visualdls_file(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(logging__visualdl=True)
    train(recipe, ENDED)
    shutil.rmtree(step_directory(Path(recipe.run.output), ENDED))
    path = Path(recipe.run.output) / VISUALDL_FILE
    path.write_bytes(path.read_bytes()[:-3])
    train(recipe)
    assert {tag: list(steps) for tag, steps in visualdl_scalars(recipe).items()}["loss"] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_begins_anew_is_a_new_run_of_the_trackers(tracked: Recipe) -> None:
    train(tracked, 2)
    shutil.rmtree(step_directory(Path(tracked.run.output), 2))
    train(tracked)
    first, second = wandb_starts(tracked)
    assert run_ids(first) != run_ids(second)
    assert list(wandb_history(second)) == list(visualdl_scalars(tracked)["loss"]) == [1, 2, 3, 4, 5, 6]


def test_a_resume_online_asks_for_the_run_by_its_id(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    logged: list[int] = []
    run = types.SimpleNamespace(log=lambda values, step: logged.append(step), finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **options: asked.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train_kill_and_resume(make_recipe(logging__wandb="online", logging__wandb_project="test"))
    assert asked[0]["id"] == asked[1]["id"]
    assert [options["resume"] for options in asked] == ["allow", "allow"]
    assert logged == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("moment", ["init", "log", "finish"])
def test_a_failing_wandb_never_stops_training(
    make_recipe: MakeRecipe, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = types.SimpleNamespace(log=works, finish=works)
    fake = types.SimpleNamespace(init=lambda **_: run)
    setattr(fake if moment == "init" else run, moment, broken)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    recipe = make_recipe(logging__wandb="online", logging__wandb_project="test")
    train(recipe)
    assert len(records(recipe)) == NUM_STEPS
    assert capsys.readouterr().err.count("wandb failed (tracker is down)") == 1


@pytest.mark.parametrize("moment", ["LogWriter", "add_scalar", "flush", "close"])
def test_a_failing_visualdl_never_stops_training(
    make_recipe: MakeRecipe, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = types.SimpleNamespace(add_scalar=works, flush=works, close=works)
    fake = types.SimpleNamespace(LogWriter=lambda **_: writer)
    setattr(fake if moment == "LogWriter" else writer, moment, broken)
    monkeypatch.setitem(sys.modules, "visualdl", fake)
    recipe = make_recipe(logging__visualdl=True)
    train(recipe)
    assert len(records(recipe)) == NUM_STEPS
    assert capsys.readouterr().err.count("VisualDL failed (tracker is down)") == 1


def test_a_run_that_fails_does_not_wait_for_trackers(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks would: the error is told to them when this one ends. What was logged is on disk."""
    run = types.SimpleNamespace(log=works, finish=lambda: pytest.fail("waits for an upload"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    recipe = make_recipe(logging__wandb="online", logging__wandb_project="test", logging__visualdl=True)

    def look() -> bool:
        if len(records(recipe)) == ENDED:
            raise ZeroDivisionError("a bug")
        return False

    with pytest.raises(ZeroDivisionError):
        Trainer(recipe, RunData(recipe), Mesh()).fit(look)
    assert list(visualdl_scalars(recipe)["loss"]) == [1, 2, 3, 4]


def test_trackers_finish_in_a_phase_of_their_own(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload may take longer than any phase before, and is no hang."""
    told: list[str] = []
    run = types.SimpleNamespace(log=works, finish=lambda: told.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    recipe = make_recipe(logging__wandb="online", logging__wandb_project="test")
    phases = Phases(lambda step, phase: told.append(phase))
    Trainer(recipe, RunData(recipe), Mesh(), phases).fit()
    assert told[-3:] == ["checkpoint", "end", "finish"]


def broken(*_: Any, **__: Any) -> None:
    raise ConnectionError("tracker is down")


def works(*_: Any, **__: Any) -> None:
    return None


def test_curves_are_the_numbers_of_a_record() -> None:
    maps = {"layer": [0, 1], "premix_distance": [[1.0, 2.0], [3.0, 6.0]]}
    record = {
        "step": 7,
        "tokens": 70,
        "loss": float("nan"),
        "skipped": "not finite",
        "seconds": {"forward": 0.5},
        "moe": {"worst_load": 1.5, "load": [1, 2]},
        "maps": maps,
    }
    expected = {"tokens": 70.0, "seconds/forward": 0.5, "moe/worst_load": 1.5}
    assert curves_of(record) == expected | {f"maps/{name}": mean for name, mean in means_of(maps).items()}
    assert means_of(maps)["premix_distance"] == 3.0


def test_visualdls_file_has_every_step_of_a_checkpoint_before_it_is_saved(make_recipe: MakeRecipe) -> None:
    """A process that is killed later loses none of them, and trains the steps after it again."""
    recipe = make_recipe(logging__visualdl=True)
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    seen: set[int] = set()

    def look() -> bool:
        if trainer.step == SAVED + 1:
            seen.update(visualdl_scalars(recipe)["loss"])
        return False

    trainer.fit(look)
    assert seen >= set(range(1, SAVED + 1))


def test_a_file_is_cut_back_over_starts_that_logged_nothing(tmp_path: Path) -> None:
    from visualdl import LogReader, LogWriter

    path = tmp_path / VISUALDL_FILE.name
    for steps in (range(1, 6), range(0)):
        writer = LogWriter(logdir=os.fspath(tmp_path), file_name=path.name)
        for step in steps:
            writer.add_scalar(tag="loss", step=step, value=step)
        writer.close()
    cut_after(path, 2)
    assert [value.id for value in LogReader(file_path=os.fspath(path)).get_data("scalar", "loss")] == [1, 2]
    cut_after(path, 0)
    assert path.read_bytes() == b""
