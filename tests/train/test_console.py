"""What a run says when it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import NUM_STEPS, MakeRecipe, write_recipe
from vha_paddle.checkpoint.layout import list_steps, step_directory
from vha_paddle.config import Recipe
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.console import duration, summary
from vha_paddle.train.metrics import RunLog
from vha_paddle.train.trainer import RunData, Trainer
from vha_paddle.train.usage import Peaks

ROOT = Path(__file__).resolve().parents[2]
SECONDS = {"data": 0.5, "forward": 40.0, "backward": 50.0, "checkpoint": 9.5}


def test_a_summary_names_phases_by_their_share_and_none_that_is_short() -> None:
    lines = summary(range(11, 31), 1000, SECONDS, skipped=0, checkpoint=Path("runs/a/checkpoints/step-00000030"))
    assert lines == [
        "trained steps 11 to 30: 20,000 tokens in 1:40, 200 tokens/s over all",
        "time: backward 50%, forward 40%, checkpoint 10%",
        "last checkpoint: runs/a/checkpoints/step-00000030",
    ]


def test_a_summary_counts_skipped_steps_where_there_are_some() -> None:
    lines = summary(range(1, 3), 1000, SECONDS, skipped=2, checkpoint=Path("a"))
    assert lines[2] == "skipped steps: 2"


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")])
def test_a_duration_is_read_as_on_a_clock(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def said(recipe: Recipe, capsys: pytest.CaptureFixture[str], steps: int = NUM_STEPS) -> list[str]:
    """The summary of one start, which ends after `steps`."""
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    trainer.fit(lambda: trainer.step == steps)
    return capsys.readouterr().out.splitlines()[-3:]


def test_a_run_ends_with_a_summary_of_what_this_start_did(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    interrupted = said(recipe, capsys, steps=5)
    assert re.match(r"trained steps 1 to 5: 320 tokens in 0:\d\d, [\d,]+ tokens/s over all", interrupted[0])
    assert interrupted[2] == f"last checkpoint: {step_directory(Path(recipe.run.output), 5)}"
    shutil.rmtree(step_directory(Path(recipe.run.output), 5))
    resumed = said(recipe, capsys)
    assert resumed[0].startswith("trained steps 4 to 6: 192 tokens in ")
    shares = [int(share) for share in re.findall(r"(\d+)%", resumed[1])]
    assert shares == sorted(shares, reverse=True) and 90 < sum(shares) < 106


def test_the_lines_show_the_recorded_mfu(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe()
    Trainer(recipe, RunData(recipe), Mesh()).fit()
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = {record["step"]: record["mfu"] for record in map(json.loads, lines)}
    shown = re.findall(r"^step +(\d+)/.*  MFU ([\d.]+)%", capsys.readouterr().out, re.MULTILINE)
    assert [(int(step), share) for step, share in shown] == [
        (step, f"{100 * recorded[step]:.1f}") for step in (2, 4, 6)
    ]


def test_the_save_after_the_last_record_counts_in_the_summary(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(make_recipe(), tmp_path, 0, Peaks(1.0, None), {})
    log.step({"step": 1, "tokens": 64, "tokens_per_second": 64.0, "seconds": {"forward": 1.0}})
    log.summarize({"checkpoint": 3.0}, tmp_path / "step-00000001")
    log.close()
    assert "time: checkpoint 75%, forward 25%" in capsys.readouterr().out


@pytest.mark.parametrize("console", ["no reader", "full disk"])
def test_a_console_that_takes_nothing_costs_neither_the_run_nor_its_exit_code(
    make_recipe: MakeRecipe, tmp_path: Path, console: str
) -> None:
    recipe = make_recipe()
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    output = writing if console == "no reader" else full
    command = [sys.executable, str(ROOT / "tools/train.py"), str(path)]
    try:
        assert subprocess.run(command, stdout=output, stderr=output, timeout=300, check=False).returncode == 0
    finally:
        os.close(writing)
        os.close(full)
    assert list_steps(Path(recipe.run.output)) == [3, NUM_STEPS]


def test_what_a_console_takes_arrives_at_once_and_whole(tmp_path: Path) -> None:
    code = (
        "import sys, os; from vha_paddle.train.console import outlive_console; print('before'); outlive_console(); "
        "print('ä' * 20000); print('a line', file=sys.stderr); assert not sys.stdout.isatty(); os._exit(7)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (7, b"a line\n")
    assert result.stdout.decode() == f"before\n{'ä' * 20000}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_stream_that_was_closed_before_stays_so(closed: str) -> None:
    code = "from vha_paddle.train.console import outlive_console; outlive_console(); print('a line')"
    command = f"exec {sys.executable} -c {code!r} {closed}".replace("'a line'", "str(1)")
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
