"""Every replacement of `vha_paddle.parallel.gloo`, on real ranks. What they do is in gloo_*_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed import gloo_collective_cases, gloo_fleet_cases  # noqa: F401 - they fill the worlds
from tests.distributed.gloo_worlds import WORLDS
from tests.distributed.launch import run_ranks

WORKER = Path(__file__).with_name("gloo_worker.py")


@dataclass(frozen=True)
class Outcome:
    passed: set[str]
    """Cases that every rank passed."""
    problem: str
    """Why the next one was not."""


@pytest.fixture(scope="module")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Start each world's ranks once, for all of its cases: starting costs more than they do."""
    directory = tmp_path_factory.mktemp("gloo")
    outcomes: dict[str, Outcome] = {}

    def run(name: str) -> Outcome:
        if name not in outcomes:
            size, problem = WORLDS[name].size, ""
            try:
                run_ranks(WORKER, size, [name, str(directory)], timeout=90)
            except AssertionError as error:
                problem = str(error)
            notes = [directory / f"{name}.{rank}" for rank in range(size)]
            passed = set.intersection(*(set(note.read_text().split()) if note.exists() else set() for note in notes))
            outcomes[name] = Outcome(passed, problem)
        return outcomes[name]

    return run


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, ranks in WORLDS.items() for case in ranks.cases])
def test_ranks_pass(run_world: Callable[[str], Outcome], world: str, case: str) -> None:
    outcome = run_world(world)
    if case not in outcome.passed:
        first = next(name for name in WORLDS[world].cases if name not in outcome.passed)
        pytest.fail(outcome.problem if case == first else f"not reached: {first} failed before", pytrace=False)


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_end_without_error(run_world: Callable[[str], Outcome], world: str) -> None:
    assert not run_world(world).problem
