"""The watchdog among real processes: who died, who hangs, where, and that nobody is left waiting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from vha_paddle.parallel import watchdog

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("watchdog_worker.py")
FIRST = "step 4, backward"


@dataclass
class Ended:
    code: int
    output: str


def run(tmp_path: Path, num_ranks: int, what: str, victim: str = "none", *more: str) -> list[Ended]:
    """Every rank's end; a stopped one is killed after the others have ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(num_ranks), str(tmp_path), what, victim, *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    results: dict[int, Ended] = {}
    try:
        for rank, process in enumerate(processes):
            if what == "stop" and str(rank) == victim:
                continue
            output, _ = process.communicate(timeout=120)
            results[rank] = Ended(process.returncode, output)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return [results.get(rank, Ended(-signal.SIGKILL, "")) for rank in range(num_ranks)]


def test_a_run_that_ends_is_no_failure(tmp_path: Path) -> None:
    assert [(rank.code, rank.output) for rank in run(tmp_path, 3, "nothing")] == [(0, "")] * 3


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_with_step_and_phase(tmp_path: Path, victim: int) -> None:
    ended = run(tmp_path, 3, "kill", str(victim))
    others = [rank for rank in range(3) if rank != victim]
    assert [ended[rank].code for rank in others] == [1, 1]
    assert ended[min(others)].output == f"error: rank {victim} died (last heard of in {FIRST}); start again\n"
    assert ended[max(others)].output == ""  # one says it


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named(tmp_path: Path, victim: int) -> None:
    ended = run(tmp_path, 3, "stop", str(victim))
    others = [rank for rank in range(3) if rank != victim]
    assert [ended[rank].code for rank in others] == [1, 1]
    assert f"error: rank {victim} has not answered for" in ended[min(others)].output
    assert f"({FIRST}): stopped, or its host is gone; start again\n" in ended[min(others)].output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(tmp_path: Path, victim: int) -> None:
    """It shows where it is, in its own log."""
    ended = run(tmp_path, 3, "hang", str(victim))
    assert [rank.code for rank in ended] == [1, 1, 1]
    teller = 1 if victim == 0 else 0
    assert re.search(rf"error: rank {victim} hangs \({FIRST}, for \d+ s\); start again\n", ended[teller].output)
    assert "watchdog_worker.py" in ended[victim].output  # the stack


def test_ranks_that_all_wait_are_told_so(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "wait", "all")
    assert [rank.code for rank in ended] == [1, 1]
    assert ended[0].output == f"error: every rank waits for another (rank 0: {FIRST}; rank 1: {FIRST}); start again\n"


def test_a_phase_that_has_not_ended_before_may_take_longer(tmp_path: Path) -> None:
    assert [rank.code for rank in run(tmp_path, 2, "long", "1")] == [0, 0]


def test_an_error_of_a_survivor_is_explained_by_the_death(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "kill", "1", "explain")
    assert ended[0].output == f"explained: rank 1 died (last heard of in {FIRST}); start again\n"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_does_not_answer_keeps_no_rank_from_ending(tmp_path: Path, victim: int) -> None:
    ended = run(tmp_path, 2, "kill", str(victim), "dead_disk")
    assert ended[1 - victim] == Ended(1, f"error: rank {victim} died (last heard of in {FIRST})\n")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_tells_why_and_keeps_its_own_words(tmp_path: Path, victim: int) -> None:
    ended = run(tmp_path, 3, "fail", str(victim), "explain")
    others = [rank for rank in range(3) if rank != victim]
    assert ended[victim] == Ended(1, "explained: the disk is full\n")
    assert [ended[rank] for rank in others] == [
        Ended(1, f"explained: rank {victim} failed ({FIRST}): the disk is full\n")
    ] * 2


def alone(hang_seconds: float) -> watchdog.Watchdog:
    return watchdog.Watchdog(0, 1, lambda address: address, hang_seconds, lambda: "start again")


def test_a_phase_may_take_five_times_its_longest() -> None:
    dog = alone(hang_seconds=0.0)
    dog._longest["backward"] = 30.0
    dog.enter(1, "backward")
    assert dog.beat().allowed == 150.0
    dog.hang_seconds = 200.0
    assert dog.beat().allowed == 200.0
    dog.enter(1, "checkpoint")
    assert dog.beat().allowed == watchdog.FIRST_SECONDS


def test_one_rank_alone_keeps_its_own_error() -> None:
    with pytest.raises(ValueError, match="its own"), alone(hang_seconds=1.0):
        raise ValueError("its own")
