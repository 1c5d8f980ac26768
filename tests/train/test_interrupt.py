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

from tests.distributed.launch import environments
from tests.train.conftest import MEASURED, NUM_STEPS, MakeRecipe, write_recipe
from vha_paddle.checkpoint.layout import list_steps, step_directory
from vha_paddle.config import Recipe
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.trainer import RunData, Trainer

ROOT = Path(__file__).resolve().parents[2]
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
        # SIGINT for the launcher and its ranks, which the launcher passes on
        (["INT", "TERM", "TERM"], INTERRUPTED, f"interrupted: {SAVED}", [2]),
        (["TERM", "INT", "TERM"], INTERRUPTED, f"interrupted: {SAVED}", [2]),
        (["INT", "INT"], 130, "SIGINT, the second signal: ended without saving", []),
        (["TERM", "wait", "TERM"], 143, "SIGTERM, the second signal: ended without saving", []),
    ],
    ids=["TERM", "INT", "launcher", "everything", "everything, late", "INT-INT", "TERM-later-TERM"],
)
def test_what_signals_in_the_second_step_do(
    make_recipe: MakeRecipe, tmp_path: Path, plan: list[str], code: int, said: str, steps: list[int]
) -> None:
    recipe = make_recipe()
    found, output = worker(recipe, tmp_path / "recipe.yaml", *plan)
    assert (found, list_steps(Path(recipe.run.output))) == (code, steps), output[-3000:]
    assert said in output and "FatalError" not in output


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_before_training_begins_ends_at_once(make_recipe: MakeRecipe, tmp_path: Path, name: str) -> None:
    recipe = make_recipe()
    found, output = worker(recipe, tmp_path / "recipe.yaml", "before", name)
    assert found == -signal.Signals[f"SIG{name}"] and "FatalError" not in output
    assert not Path(recipe.run.output).exists()


def test_a_signal_ends_a_rank_that_waits_for_the_others(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """It tries to connect to rank 0 again and again, in a call of Paddle's during which no other thread runs Python."""
    path = write_recipe(make_recipe(parallel__tensor=2), tmp_path / "recipe.yaml")
    command = [sys.executable, str(ROOT / "tools/train.py"), str(path)]
    rank = subprocess.Popen(command, env=environments(2)[1], stderr=subprocess.DEVNULL)
    try:
        deadline, before = time.monotonic() + 120, (False, -1)
        while (now := (has_paddle(rank.pid), cpu_ticks(rank.pid))) != before or not now[0]:
            assert rank.poll() is None and time.monotonic() < deadline
            before = now
            time.sleep(1.0)
        rank.terminate()
        assert rank.wait(20) == -signal.SIGTERM
    finally:
        rank.kill()
        rank.wait()


def has_paddle(process: int) -> bool:
    return "libpaddle" in Path(f"/proc/{process}/maps").read_text(encoding="utf-8")


def cpu_ticks(process: int) -> int:
    """Time that it has computed for."""
    return sum(map(int, Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1].split()[11:13]))


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


ORPHANED = """
import os, subprocess, sys, time
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
rank = subprocess.Popen(sys.argv[1:], env=os.environ | {"PADDLE_TRAINER_ID": "0"}, **quiet)
print(rank.pid, flush=True)
while "libpaddle" not in open(f"/proc/{rank.pid}/maps").read():
    time.sleep(0.01)
os._exit(0)
"""


def test_a_rank_whose_launcher_dies_while_it_imports_paddle_does_not_go_on(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make_recipe(schedule__total_tokens=64 * 100_000)
    train = [sys.executable, str(ROOT / "tools/train.py"), str(write_recipe(recipe, tmp_path / "recipe.yaml"))]
    result = subprocess.run([sys.executable, "-c", ORPHANED, *train], stdout=subprocess.PIPE, timeout=120, check=True)
    rank, deadline = int(result.stdout.split()[0]), time.monotonic() + 120
    try:
        while runs(rank) and not Path(recipe.run.output).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not Path(recipe.run.output).exists()
    finally:
        if runs(rank):
            os.kill(rank, signal.SIGKILL)


def runs(process: int) -> bool:
    """Whether it is there, and no mere entry in the table of processes."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False
