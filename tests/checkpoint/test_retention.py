"""Which checkpoints are kept: the newest, some for ever, and the last good one whatever else."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, STATE, small_recipe, small_tokenizer, trained_weights, write_checkpoint
from vha_paddle.checkpoint.layout import (
    MANIFEST_FILE,
    checkpoints_directory,
    list_steps,
    record_of,
    step_directory,
    write_manifest,
    write_state,
)
from vha_paddle.checkpoint.retention import first_of_each, last_good_step, remove_old_checkpoints, set_aside


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = small_recipe(SMALL_VHA)
    directory = tmp_path_factory.mktemp("whole") / "checkpoint"
    return write_checkpoint(directory, recipe, trained_weights(recipe), small_tokenizer())


def write(whole: Path, output: Path, step: int, skipped_in_a_row: int = 0) -> Path:
    path = step_directory(output, step)
    shutil.copytree(whole, path)
    write_state(path, replace(STATE, step=step, skipped_in_a_row=skipped_in_a_row))
    names = [file.name for file in path.iterdir() if file.name != MANIFEST_FILE]
    write_manifest(path, {name: record_of(path / name) for name in names})
    return path


def test_the_newest_are_kept_and_the_first_of_every_so_many_tokens(whole: Path, tmp_path: Path) -> None:
    """Saved one after another, as a run does: what is kept follows from what is there."""
    for step in range(2, 31, 2):
        write(whole, tmp_path, step)
        remove_old_checkpoints(tmp_path, 2, tokens_per_step=10, every_tokens=70)
        passed = [first for first in (8, 14, 22, 28) if first <= step]  # at or after 70, 140, 210, 280 tokens
        assert list_steps(tmp_path) == sorted({*passed, *[kept for kept in (step - 2, step) if kept]})
    assert not list(checkpoints_directory(tmp_path).glob(".*"))


def test_the_first_of_each_are_those_that_pass_a_multiple_whatever_was_removed() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        steps = sorted(generator.choice(np.arange(1, 60), 12, replace=False).tolist())
        tokens, every = int(generator.integers(1, 9)), int(generator.integers(1, 90))
        kept = first_of_each(steps, tokens, every)
        for multiple in range(every, steps[-1] * tokens + 1, every):
            assert next(step for step in steps if step * tokens >= multiple) in kept
        fewer = [step for step in steps if step in kept or generator.random() < 0.5]
        assert first_of_each(fewer, tokens, every) == kept


def test_the_last_one_that_no_skipped_step_precedes_is_kept(whole: Path, tmp_path: Path) -> None:
    for step, skipped in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 3)):
        write(whole, tmp_path, step, skipped)
    remove_old_checkpoints(tmp_path, 2, 1, None)
    assert list_steps(tmp_path) == [2, 4, 5]
    write(whole, tmp_path, 6)
    remove_old_checkpoints(tmp_path, 2, 1, None)
    assert list_steps(tmp_path) == [5, 6]


@pytest.mark.parametrize("fault", ["cut", "no manifest"])
def test_an_incomplete_newest_one_does_not_cost_the_last_good_one(whole: Path, tmp_path: Path, fault: str) -> None:
    for step in (1, 2, 3):
        path = write(whole, tmp_path, step)
    if fault == "cut":
        file = next(path.glob("model-*"))
        file.write_bytes(file.read_bytes()[:-1])
    else:
        (path / MANIFEST_FILE).unlink()
    assert last_good_step(tmp_path) == 2
    remove_old_checkpoints(tmp_path, 1, 1, None)
    assert list_steps(tmp_path) == [2, 3]


def test_where_none_is_good_nothing_is_removed(whole: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(whole, tmp_path, step, skipped_in_a_row=1)
    assert last_good_step(tmp_path) is None
    remove_old_checkpoints(tmp_path, 1, 1, None)
    assert list_steps(tmp_path) == [1, 2, 3]


def test_what_is_set_aside_keeps_its_files_and_is_no_checkpoint(whole: Path, tmp_path: Path) -> None:
    for name in ("step-00000004.damaged", "step-00000004.damaged-2"):
        before = {file.name: file.read_bytes() for file in write(whole, tmp_path, 4).iterdir()}
        aside = set_aside(step_directory(tmp_path, 4))
        assert aside.name == name and list_steps(tmp_path) == []
        assert {file.name: file.read_bytes() for file in aside.iterdir()} == before


def test_of_a_linked_checkpoint_the_link_goes_and_what_it_leads_to_stays(whole: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(whole, tmp_path, step)
    elsewhere = tmp_path / "another disk"
    step_directory(tmp_path, 1).rename(elsewhere)
    step_directory(tmp_path, 1).symlink_to(elsewhere)
    before = {file.name: file.read_bytes() for file in elsewhere.iterdir()}
    remove_old_checkpoints(tmp_path, 1, 1, None)
    assert sorted(os.listdir(checkpoints_directory(tmp_path))) == ["step-00000003"]
    assert {file.name: file.read_bytes() for file in elsewhere.iterdir()} == before


def test_what_has_no_checkpoints_name_is_left_alone(whole: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(whole, tmp_path, step)
    foreign = [
        "best",
        "step-1",
        "step-00000001.damaged",
        "step-00000001-export",
        "step-00000001\n",
        f"step-{chr(0x661) * 8}",
    ]
    for name in foreign:
        (checkpoints_directory(tmp_path) / name).mkdir()
        (checkpoints_directory(tmp_path) / name / "a file").write_text("dear", encoding="utf-8")
    assert list_steps(tmp_path) == [1, 2, 3]
    remove_old_checkpoints(tmp_path, 1, 1, None)
    left = {path.name: os.listdir(path) for path in checkpoints_directory(tmp_path).iterdir()}
    assert left.pop("step-00000003") and left == dict.fromkeys(foreign, ["a file"])


def test_what_has_a_checkpoints_name_is_listed_whatever_it_is(tmp_path: Path) -> None:
    assert list_steps(tmp_path / "fresh") == []
    checkpoints_directory(tmp_path).mkdir()
    step_directory(tmp_path, 1).mkdir()
    step_directory(tmp_path, 2).write_text("a file", encoding="utf-8")
    step_directory(tmp_path, 3).symlink_to("nowhere")
    os.utime(step_directory(tmp_path, 1), (4e9, 4e9))  # times tell nothing: a copy has others
    assert list_steps(tmp_path) == [1, 2, 3]


def test_a_link_that_is_set_aside_takes_no_other_ones_name(tmp_path: Path) -> None:
    checkpoints_directory(tmp_path).mkdir()
    for name in ("step-00000004.damaged", "step-00000004.damaged-2"):
        step_directory(tmp_path, 4).symlink_to("nowhere")
        assert set_aside(step_directory(tmp_path, 4)).name == name
    assert sorted(os.listdir(checkpoints_directory(tmp_path))) == ["step-00000004.damaged", "step-00000004.damaged-2"]
