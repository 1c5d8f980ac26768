"""A run under Paddle's launcher that is killed or told to end is, continued, the unbroken run bit by bit.

`kill_harness.py` does the same with many kills at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.kills import Kill, KilledRun
from tests.train.conftest import MakeRecipe, dataset, make_recipe
from vha_paddle.checkpoint.layout import list_steps

__all__ = ["dataset", "make_recipe"]  # fixtures
NUM_STEPS = 24


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def run(request: pytest.FixtureRequest, make_recipe: MakeRecipe, tmp_path: Path) -> Iterator[KilledRun]:
    recipe = make_recipe(
        parallel__tensor=2,
        schedule__total_tokens=64 * NUM_STEPS,
        checkpoint={"interval": 3, "keep": 99, "asynchronous": request.param},
        logging__eval_interval=4,
    )
    run = KilledRun(recipe, tmp_path)
    try:
        run.train_unbroken()
        yield run
    finally:
        run.clean()


def test_kills_at_any_moment_change_nothing(run: KilledRun) -> None:
    kills = [Kill("1", None, 0, 0.6), Kill("ranks", "checkpoint", 6, 0.3), Kill("launcher", "evaluation", 4, 0.5)]
    if run.recipe.checkpoint.asynchronous:
        kills = [Kill("0", "checkpoint", 3, 0.1), Kill("everything", "optimizer", 5, 0.5)]
    for kill in kills:
        run.kill(kill)
        run.check()
    run.finish()
    run.check_end()


def test_a_run_told_to_end_saves_its_step_on_all_ranks(run: KilledRun) -> None:
    """However the signal comes; the launcher passes SIGTERM on, and tells its own end by the signal's number."""
    told = [Kill("launcher", "forward", 2, 0.0, "TERM"), Kill("1", "forward", 2, 0.0, "INT")]
    if run.recipe.checkpoint.asynchronous:
        told = [Kill("launcher", "forward", 2, 0.0, "INT"), Kill("launcher", "forward", 2, 0.0, "KILL")]
    codes = []
    for kill in told:
        codes.append(run.kill(kill))
        run.check()
    assert codes == ([2, -9] if run.recipe.checkpoint.asynchronous else [15, 75]), run.said()
    steps = list_steps(run.output)
    assert len(steps) >= 2 and steps[0] < 3 + 2  # where each ended; a signal takes its time
    said = run.said()
    assert said.count(f"interrupted: step {steps[-1]} is saved; the same command continues the run") == 2
    assert "FatalError" not in said
    run.finish()
    run.check_end()
