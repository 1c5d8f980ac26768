"""A rank that dies, hangs or fails ends the job under Paddle's launcher, which says which, where and why."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import MakeRecipe, dataset, make_recipe, write_recipe

__all__ = ["dataset", "make_recipe"]  # fixtures
HERE = Path(__file__).parent
AND_THEN = "; last checkpoint step-00000003, the same command continues"


def launch(make_recipe: MakeRecipe, tmp_path: Path, rank: int, what: str) -> tuple[int, str]:
    """Exit code of the launcher, and what it and its ranks said; the misfortune comes in step 4."""
    recipe = make_recipe(parallel__tensor=2, failure__hang_seconds=10.0, debug__check_ranks_interval=1)
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    tied = str(HERE / "tied.py")
    launcher = [sys.executable, tied, "paddle.distributed.launch", "--nproc_per_node", "2"]
    worker = [tied, str(HERE / "failing_training_worker.py"), str(path), str(rank), "4", what]
    process = subprocess.Popen(
        [*launcher, "--log_dir", str(tmp_path / "logs"), *worker],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
    )
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    logs = "".join(log.read_text(errors="replace") for log in sorted((tmp_path / "logs").glob("workerlog.*")))
    return process.returncode, output + logs


@pytest.mark.parametrize(
    ("rank", "what", "message"),
    [
        # it tells where it is ten times a second at most, and a step takes less
        (1, "killed", rf"error: rank 1 died \(last heard of in step [1-4], \w+\){AND_THEN}"),
        (0, "killed", rf"error: rank 0 died \(last heard of in [\w ,]+\){AND_THEN}"),
        (1, "hangs", rf"error: rank 1 hangs \(step 4, data, for 1\d s\){AND_THEN}"),
        (1, "fails", r"error: rank 1 failed \(step 4, data\): ZeroDivisionError: a bug"),
        (1, "lacks_memory", r"out of memory \(alloc memory of \d+ size\); the plan's estimate for this rank is "),
    ],
)
def test_a_misfortune_ends_the_job_and_is_named(
    make_recipe: MakeRecipe, tmp_path: Path, rank: int, what: str, message: str
) -> None:
    code, output = launch(make_recipe, tmp_path, rank, what)
    assert code != 0
    assert re.search(message, output), output[-3000:]


@pytest.mark.parametrize(("what", "loss"), [("finds_no_number", "nan"), ("has_no_gradient", r"[\d.]+")])
def test_what_one_rank_alone_finds_to_be_no_number_is_skipped_by_all(
    make_recipe: MakeRecipe, tmp_path: Path, what: str, loss: str
) -> None:
    code, output = launch(make_recipe, tmp_path, 1, what)
    assert code == 0, output[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "skipped" in line] == [4]
    assert re.match(rf"loss {loss} and gradient norm .*: not finite", lines[3]["skipped"])
    assert "step 6: ranks agree on every parameter" in output


def test_the_seconds_of_the_phases_add_up_to_the_time_of_the_run(make_recipe: MakeRecipe) -> None:
    import time

    from vha_paddle.parallel.mesh import Mesh
    from vha_paddle.train.trainer import RunData, Trainer

    recipe = make_recipe(logging__eval_interval=2, logging__maps_interval=3, checkpoint__interval=2)
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    start = time.perf_counter()
    trainer.fit()
    whole = time.perf_counter() - start
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    later = {phase for record in seconds for phase in record}
    expected = {"data", "forward", "backward", "gradients", "optimizer", "evaluation", "maps", "log", "checkpoint"}
    assert later == expected | {"start"}
    assert set(seconds[1]) == {"log", "data", "forward", "backward", "gradients", "optimizer", "evaluation"}
    assert "checkpoint" in seconds[2]  # it was saved after the record of step 2
    total = sum(value for record in seconds for value in record.values())
    assert 0 < total - seconds[0]["start"] < whole
