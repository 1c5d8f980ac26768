"""The watchdog among real processes: who died, who hangs, where, and that nobody is left waiting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
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


def run(tmp_path: Path, num_ranks: int, what: str, victim: str = "none", *more: str, pause: float = 0) -> list[Ended]:
    """Every rank's end; a stopped one is killed after the others have ended.

    Args:
        pause: seconds for which all are stopped, once they have told that they are ready.
    """
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
        if pause:
            stop_and_go_on(processes, tmp_path, pause)
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


def stop_and_go_on(processes: list[subprocess.Popen[str]], tmp_path: Path, pause: float) -> None:
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < len(processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(pause)
    for process in processes:
        process.send_signal(signal.SIGCONT)


def test_a_run_that_ends_is_no_failure(tmp_path: Path) -> None:
    assert [(rank.code, rank.output) for rank in run(tmp_path, 3, "nothing")] == [(0, "")] * 3


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_with_step_and_phase(tmp_path: Path, victim: int) -> None:
    ended = run(tmp_path, 3, "kill", str(victim))
    others = [rank for rank in range(3) if rank != victim]
    assert [ended[rank] for rank in others] == [
        Ended(1, f"error: rank {victim} died (last heard of in {FIRST}); start again\n")
    ] * 2


def test_the_main_ranks_place_is_known_before_its_next_beat(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "kill", "0", "slow_beat")
    assert f"rank 0 died (last heard of in {FIRST})" in ended[1].output


def test_ranks_that_are_lost_together_are_told_by_any_other(tmp_path: Path) -> None:
    """As with a host; which of them was first is not known."""
    ended = run(tmp_path, 3, "kill", "0+1")
    assert re.match(r"error: rank [01] died \(", ended[2].output), ended[2]
    assert ended[2].code == 1


@pytest.mark.parametrize("log", ["full_disk", "blocked"])
def test_a_log_that_takes_no_line_keeps_no_rank_from_ending(tmp_path: Path, log: str) -> None:
    assert run(tmp_path, 2, "kill", "1", log)[0].code == 1


def test_strangers_at_the_port_do_not_blind_it(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "kill", "1", "strangers")
    assert ended[0].output == f"error: rank 1 died (last heard of in {FIRST}); start again\n"


def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "pause", "all", pause=9.0)  # more than a rank may be silent, and than a phase may take
    assert ended == [Ended(0, "")] * 2


def test_a_rank_alone_that_hangs_ends(tmp_path: Path) -> None:
    (ended,) = run(tmp_path, 1, "hang", "0")
    assert ended.code == 1
    assert re.search(rf"error: rank 0 hangs \({FIRST}, for \d+ s\); start again\n", ended.output)


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
    for rank in ended:
        assert re.search(rf"error: rank {victim} hangs \({FIRST}, for \d+ s\); start again\n", rank.output)
    assert "watchdog_worker.py" in ended[victim].output  # the stack


def test_a_rank_that_hangs_when_the_main_one_is_done_ends(tmp_path: Path) -> None:
    main, other = run(tmp_path, 2, "last", "1")
    assert (main.code, other.code) == (0, 1)
    assert re.search(rf"error: rank 1 hangs \({FIRST}, for \d+ s\); start again\n", other.output)


def test_ranks_that_all_wait_are_told_so(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "wait", "all")
    said = f"error: every rank waits for another (rank 0: {FIRST}; rank 1: {FIRST}); start again\n"
    assert ended == [Ended(1, said)] * 2


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
    with alone(hang_seconds=0.0) as dog:
        dog._longest["backward"] = 30.0
        dog.enter(1, "backward")
        assert dog.beat().allowed == 150.0
        dog.hang_seconds = 200.0
        assert dog.beat().allowed == 200.0
        dog.enter(1, "checkpoint")
        assert dog.beat().allowed == watchdog.FIRST_SECONDS
        dog.hang_seconds = 3600.0  # a model that takes long to load
        assert dog.beat().allowed == 3600.0


def test_each_phase_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone(hang_seconds=45.0) as dog:
        now = dog.clock.seconds()
        monkeypatch.setattr(dog.clock, "seconds", lambda: now)
        dog.enter(3, "data")
        now += 30.0
        dog.enter(3, "backward")
        now += 7.0
        assert dog.beat() == watchdog.Beat(3, "backward", 7.0, watchdog.FIRST_SECONDS)
        dog.enter(4, "data")
        now += 1.0
        assert dog.beat() == watchdog.Beat(4, "data", 1.0, 150.0)


def test_the_clock_stands_still_while_the_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    clock = watchdog.Clock()
    start = clock.seconds()
    for passed, expected in ((2.0, 2.0), (3600.0, 2.0), (watchdog.BEAT_SECONDS, 2.0 + watchdog.BEAT_SECONDS)):
        now += passed
        assert clock.seconds() - start == expected


def test_one_rank_alone_keeps_its_own_error() -> None:
    with pytest.raises(ValueError, match="its own"), alone(hang_seconds=1.0):
        raise ValueError("its own")
