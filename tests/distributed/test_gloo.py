"""Every replacement of `vha_paddle.parallel.gloo`, on real ranks: what a world's ranks do is in gloo_worker.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed import gloo_worker
from tests.distributed.launch import run_ranks

CASES = [(world, case) for world, ranks in gloo_worker.WORLDS.items() for case in ranks.cases]


@dataclass(frozen=True)
class Outcome:
    passed: set[str]
    """Cases that every rank passed."""
    problem: str
    """Why the others were not."""


@pytest.fixture(scope="module")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Start each world's ranks once, for all of its cases: starting costs more than they do."""
    directory = tmp_path_factory.mktemp("gloo")
    outcomes: dict[str, Outcome] = {}

    def run(name: str) -> Outcome:
        if name not in outcomes:
            problem = ""
            try:
                run_ranks(Path(gloo_worker.__file__), gloo_worker.WORLDS[name].size, [name, str(directory)], timeout=90)
            except AssertionError as error:
                problem = str(error)
            notes = [set(path.read_text().split()) for path in directory.glob(f"{name}.*")]
            passed = set.intersection(*notes) if len(notes) == gloo_worker.WORLDS[name].size else set()
            outcomes[name] = Outcome(passed, problem)
        return outcomes[name]

    return run


@pytest.mark.parametrize(("world", "case"), CASES, ids=lambda name: name)
def test_ranks(run_world: Callable[[str], Outcome], world: str, case: str) -> None:
    outcome = run_world(world)
    assert case in outcome.passed, f"{case} failed, or a case before it did:\n{outcome.problem}"


@pytest.mark.parametrize("world", gloo_worker.WORLDS)
def test_ranks_end_without_error(run_world: Callable[[str], Outcome], world: str) -> None:
    assert not run_world(world).problem
