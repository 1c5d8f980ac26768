"""Signals in one process: when they save and end, when they end at once, and what the run is after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import MEASURED, NUM_STEPS, MakeRecipe, write_recipe
from vha_paddle.checkpoint.layout import list_steps, step_directory
from vha_paddle.config import Recipe
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.trainer import RunData, Trainer

WORKER = Path(__file__).with_name("interrupted_worker.py")
SAVED, INTERRUPTED = "step 2 is saved; the same command continues the run", 75


def worker(recipe: Recipe, path: Path, *plan: str) -> tuple[int, str]:
    """Exit code and what was said; see the worker for the plan."""
    command = [sys.executable, str(WORKER), str(write_recipe(recipe, path)), *plan]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    return result.returncode, result.stdout + result.stderr


def results(recipe: Recipe) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The records but for times, and the files of the last checkpoint."""
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    last = step_directory(Path(recipe.run.output), NUM_STEPS)
    untimed = [{k: v for k, v in record.items() if k not in MEASURED} for record in records]
    return untimed, {file.name: file.read_bytes() for file in last.iterdir()}


def test_a_run_told_to_end_saves_its_step_and_continues_bit_equal(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(checkpoint={"interval": 3, "asynchronous": True})
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    assert trainer.fit() is True
    unbroken = results(recipe)
    (tmp_path / "run").rename(tmp_path / "unbroken")
    for stop in (2, 4):
        trainer = Trainer(recipe, RunData(recipe), Mesh())
        assert trainer.fit(lambda trainer=trainer, stop=stop: trainer.step == stop) is False
        assert list_steps(tmp_path / "run")[-1] == stop
    assert Trainer(recipe, RunData(recipe), Mesh()).fit() is True
    assert results(recipe) == unbroken


def test_a_run_told_to_end_in_its_last_step_is_done(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    assert trainer.fit(lambda: trainer.step == NUM_STEPS) is True


@pytest.mark.parametrize(
    ("plan", "code", "said", "steps"),
    [
        (["TERM"], INTERRUPTED, f"interrupted: {SAVED}", [2]),
        (["INT"], INTERRUPTED, f"interrupted: {SAVED}", [2]),
        (["TERM", "TERM", "TERM"], INTERRUPTED, f"interrupted: {SAVED}", [2]),  # as Paddle's launcher sends it
        (["INT", "INT"], 130, "SIGINT, the second signal: ended without saving", []),
        (["TERM", "wait", "TERM"], 143, "SIGTERM, the second signal: ended without saving", []),
    ],
    ids=["TERM", "INT", "launcher", "INT-INT", "TERM-later-TERM"],
)
def test_what_signals_in_the_second_step_do(
    make_recipe: MakeRecipe, tmp_path: Path, plan: list[str], code: int, said: str, steps: list[int]
) -> None:
    recipe = make_recipe()
    found, output = worker(recipe, tmp_path / "recipe.yaml", *plan)
    assert (found, list_steps(Path(recipe.run.output))) == (code, steps), output[-3000:]
    assert said in output and "FatalError" not in output


def test_a_signal_before_training_begins_ends_at_once(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    found, output = worker(recipe, tmp_path / "recipe.yaml", "before", "TERM")
    assert found == INTERRUPTED and "SIGTERM before training began: nothing to save" in output
    assert not Path(recipe.run.output).exists()


def test_handlers_are_restored_where_no_signal_came() -> None:
    from vha_paddle.train.interrupt import interrupts

    before = signal.getsignal(signal.SIGINT)
    with interrupts() as signals:
        assert signal.getsignal(signal.SIGINT) is not before
        assert not signals.is_requested()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_is_heard_while_the_main_thread_is_in_a_long_call() -> None:
    """A handler in Python would wait for the call's end."""
    code = (
        "import os, signal, sys, threading, time\n"
        "from vha_paddle.train.interrupt import interrupts\n"
        "import numpy as np\n"
        "with interrupts() as signals:\n"
        "    signals.training_begins()\n"
        "    def twice():\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(0.3); os.kill(os.getpid(), signal.SIGINT)\n"
        "    threading.Timer(0.2, twice).start()\n"
        "    import ctypes; ctypes.CDLL(None).pause(); ctypes.CDLL(None).sleep(100); ctypes.CDLL(None).sleep(100)\n"
    )
    begin = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, timeout=90, check=False)
    assert result.returncode == 130 and time.monotonic() - begin < 90
