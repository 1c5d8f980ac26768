"""Saving: a checkpoint is whole or absent, behind training or before it; ranks stop together."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from tests.checkpoints import SMALL_VHA, STATE, small_recipe
from vha_paddle.checkpoint import save, writing
from vha_paddle.checkpoint.layout import checkpoints_directory, list_steps, open_checkpoint, step_directory
from vha_paddle.checkpoint.save import CheckpointSaver, save_checkpoint
from vha_paddle.config import Recipe
from vha_paddle.errors import RunError
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.optimizer import Optimizer

RECIPE = small_recipe(SMALL_VHA)
STEP = STATE.step
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])


def recipe_for(asynchronous: bool, keep: int = 2) -> Recipe:
    changed = RECIPE.checkpoint.model_copy(update={"asynchronous": asynchronous, "keep": keep})
    return RECIPE.model_copy(update={"checkpoint": changed})


class AnotherRankFailed(Mesh):
    """What a rank that wrote its part sees when another could not."""

    def any_rank(self, flag: bool) -> bool:
        return True


class Gate:
    """Holds every writer of tensors until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, write = threading.Event(), writing.write_own_tensors

        def gated(*arguments: Any) -> Any:
            assert self.opened.wait(60)
            return write(*arguments)

        monkeypatch.setattr(writing, "write_own_tensors", gated)


class Run:
    """A model and its optimizer in a run directory."""

    def __init__(self, output: Path) -> None:
        self.output, self.tokenizer = output, output / "tokenizer.model"
        self.tokenizer.write_bytes(b"a tokenizer")
        self.model: Decoder = build_decoder(RECIPE.model, Mesh(), seed=0)
        self.optimizer = Optimizer(self.model.parameters(), RECIPE, Mesh())

    def saver(self, asynchronous: bool = False, keep: int = 2, mesh: Mesh | None = None) -> CheckpointSaver:
        return CheckpointSaver(self.output, recipe_for(asynchronous, keep), self.tokenizer, mesh or Mesh())

    def save(self, saver: CheckpointSaver, step: int = STEP) -> Path:
        state = type(STATE)(**(vars(STATE) | {"step": step}))
        return saver.save(state, self.optimizer)

    def train(self) -> None:
        """Change every weight and every moment in place, as a step does."""
        for parameter in self.model.parameters():
            parameter.set_value(parameter + 1.0)
        for states in self.optimizer.slots().values():
            for tensor in states.values():
                tensor.set_value(tensor + 1.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@MODES
@pytest.mark.parametrize("writer", ["write_own_tensors", "write_state", "write_manifest", "put_in_place", "write_json"])
def test_a_full_disk_leaves_nothing_that_looks_like_a_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, writer: str, asynchronous: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    earlier = run.save(run.saver(), step=STEP - 1)
    monkeypatch.setattr(writing, writer, full)
    saver = run.saver(asynchronous)
    with pytest.raises(RunError, match=r"not saved \(rank 0: No space left on device\)"):
        run.save(saver)
        saver.wait()
    assert list(checkpoints_directory(run.output).iterdir()) == [earlier]


def test_a_disk_that_is_full_within_a_file_is_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vha_paddle.tensor_file.os.fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        run.save(run.saver())
    assert list_steps(run.output) == []


def test_a_fault_that_is_no_oserror_reaches_the_thread_that_waits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("an odd value")

    monkeypatch.setattr(writing, "write_own_tensors", broken)
    saver = run.saver(asynchronous=True)
    run.save(saver)
    with pytest.raises(RunError, match="an odd value"):
        saver.wait()


def test_a_directory_that_cannot_be_made_is_an_error(run: Run) -> None:
    checkpoints_directory(run.output).write_bytes(b"a file in the way")
    with pytest.raises(RunError, match=r"not saved \(rank 0: (Not a directory|File exists): .*\)"):
        run.save(run.saver())


@MODES
def test_a_rank_stops_when_another_could_not_write(run: Run, asynchronous: bool) -> None:
    with pytest.raises(RunError, match="another rank could not write"):
        run.save(run.saver(asynchronous, mesh=AnotherRankFailed()))
    assert list_steps(run.output) == []


@MODES
def test_saving_a_step_again_replaces_its_checkpoint(run: Run, asynchronous: bool) -> None:
    saver = run.saver(asynchronous)
    run.save(saver)
    run.model.norm.weight.set_value(paddle.full([RECIPE.model.hidden_size], 7.0))
    path = run.save(saver)
    saver.wait()
    saved = open_checkpoint(path).model_tensors()
    assert np.array_equal(saved.array("model.norm.weight"), np.full(RECIPE.model.hidden_size, 7.0, np.float32))
    assert list(checkpoints_directory(run.output).iterdir()) == [path]


def test_an_asynchronous_save_holds_what_was_there_when_it_was_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {path.name: path.read_bytes() for path in run.save(run.saver()).iterdir()}
    gate = Gate(monkeypatch)
    saver = run.saver(asynchronous=True)
    path = run.save(saver, step=STEP)
    saver.wait_for_copy()
    run.train()
    gate.opened.set()
    saver.wait()
    found = {path.name: path.read_bytes() for path in path.iterdir()}
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} == {"recipe.yaml", "manifest.json"}


def test_a_later_asynchronous_save_holds_the_later_weights(run: Run) -> None:
    saver = run.saver(asynchronous=True)
    run.save(saver)
    saver.wait_for_copy()
    run.train()
    run.save(saver, step=STEP + 1)
    saver.wait()
    earlier, later = (open_checkpoint(step_directory(run.output, step)) for step in (STEP, STEP + 1))
    for tensors in ("model_tensors", "optimizer_tensors"):
        before, after = getattr(earlier, tensors)(), getattr(later, tensors)()
        for name in before:
            if not name.endswith("_power"):
                assert np.array_equal(after.array(name), before.array(name) + np.float32(1)), name


def test_training_goes_on_while_files_are_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = run.saver(asynchronous=True)
    path = run.save(saver)
    assert not path.exists() and list_steps(run.output) == []
    gate.opened.set()
    saver.wait()
    assert open_checkpoint(path).state.step == STEP


def test_a_save_waits_for_the_one_before_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = run.saver(asynchronous=True)
    run.save(saver)
    timer = threading.Timer(0.3, gate.opened.set)
    timer.start()
    run.save(saver, step=STEP + 1)
    assert STEP in list_steps(run.output)
    saver.wait()
    timer.join()


def test_a_failed_asynchronous_save_is_an_error_at_the_next(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = run.saver(asynchronous=True)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_own_tensors", full)
        run.save(saver)
        with pytest.raises(RunError, match="No space left on device"):
            run.save(saver, step=STEP + 1)
    run.save(saver, step=STEP + 2)
    saver.wait()
    assert list_steps(run.output) == [STEP + 2]


@pytest.mark.parametrize("keep", [1, 2])
def test_older_checkpoints_are_removed_only_after_a_newer_one_is_complete(
    run: Run, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    saver = run.saver(asynchronous=True, keep=keep)
    steps = list(range(STEP, STEP + keep))
    for step in steps:
        run.save(saver, step)
    saver.wait()
    gate = Gate(monkeypatch)
    run.save(saver, STEP + keep)
    assert list_steps(run.output) == steps
    gate.opened.set()
    saver.wait()
    assert list_steps(run.output) == [*steps[1:], STEP + keep]


def test_closing_lets_the_save_in_flight_finish(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = run.saver(asynchronous=True)
    path = run.save(saver)
    timer = threading.Timer(0.3, gate.opened.set)
    timer.start()
    saver.close()
    assert open_checkpoint(path).state.step == STEP
    timer.join()


def test_what_dead_runs_left_is_removed_by_the_next_save(run: Run) -> None:
    for step in (3, STEP, 90):
        (checkpoints_directory(run.output) / f".step-{step:08d}.tmp").mkdir(parents=True)
    path = run.save(run.saver())
    assert list(checkpoints_directory(run.output).iterdir()) == [path]


def test_a_synchronous_save_copies_no_tensor_of_the_host(run: Run) -> None:
    weight = run.model.norm.weight
    view = save.host_view(weight)
    assert view.__array_interface__["data"][0] == weight.data_ptr()
    assert np.array_equal(view, weight.numpy())


def test_save_checkpoint_returns_when_the_checkpoint_is_there(run: Run) -> None:
    path = save_checkpoint(run.output, STATE, run.optimizer, recipe_for(True), run.tokenizer, Mesh())
    assert open_checkpoint(path).state == STATE


def test_leftovers_that_are_no_directories_or_cannot_be_removed_cost_no_save(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = checkpoints_directory(run.output)
    checkpoints.mkdir()
    (tmp_path / "another disk").mkdir()
    (checkpoints / ".step-00000001.removed.tmp").symlink_to(tmp_path / "another disk")
    (checkpoints / ".step-00000002.replaced.tmp").write_bytes(b"a file")
    (checkpoints / ".step-00000003.tmp").mkdir()
    remove = save.remove

    def in_use(path: Path) -> None:
        if path.name == ".step-00000003.tmp":
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path)

    monkeypatch.setattr(save, "remove", in_use)
    path = run.save(run.saver())
    assert sorted(checkpoints.iterdir()) == [checkpoints / ".step-00000003.tmp", path]
    assert (tmp_path / "another disk").is_dir()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_stands_in_the_place_of_a_checkpoint_is_replaced(run: Run, kind: str) -> None:
    checkpoints_directory(run.output).mkdir()
    place = step_directory(run.output, STEP)
    place.symlink_to("nowhere") if kind == "link" else place.write_bytes(b"a file")
    path = run.save(run.saver())
    assert open_checkpoint(path).state.step == STEP
    assert list(checkpoints_directory(run.output).iterdir()) == [path]


def test_a_file_that_a_save_lacks_is_named(run: Run) -> None:
    run.tokenizer.unlink()
    with pytest.raises(RunError, match=rf"not saved \(rank 0: No such file or directory: {run.tokenizer}\)"):
        run.save(run.saver())
