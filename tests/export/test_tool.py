"""`tools/fold_export.py` as a user runs it: exit codes, one-line errors, dry run, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import SMALL_GROUPED, Exported, small_recipe, small_tokenizer, trained_weights
from tests.checkpoints import write_checkpoint as write

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "fold_export.py"

# The tool with logits that need no Paddle: those of the export are `error` away from the checkpoint's.
WITH_LOGITS = """
import runpy, sys, types
import numpy as np
from vha_paddle.export.verify import verify_logits

evaluate = types.ModuleType("vha_paddle.evaluate")
logits = lambda tokens: np.ones((*tokens.shape, 4))
evaluate.verify_export = lambda checkpoint, exported: verify_logits(
    logits, lambda tokens: logits(tokens) + {error}, np.zeros((1, 2), int), "float32"
)
sys.modules["vha_paddle.evaluate"] = evaluate
sys.argv = ["fold_export.py", *sys.argv[1:]]
runpy.run_path({tool!r}, run_name="__main__")
"""


def run(*arguments: object, error: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run the tool from a directory that is not the checkout."""
    program = [str(TOOL)]
    if error is not None:
        program = ["-c", WITH_LOGITS.format(error=error, tool=str(TOOL))]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT) if error is not None else ""}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


def test_an_export_succeeds_and_says_what_it_wrote(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--dtype", "bfloat16")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"wrote {tmp_path / 'out'}: 24 tensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_json_prints_the_report(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "fold_report.json").read_text())


def test_a_dry_run_lists_every_tensor_and_writes_nothing(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--dry-run", "--dtype", "float16")
    lines = result.stdout.splitlines()
    prefix = "model.layers.0.self_attn."
    assert f"{prefix}q_proj.weight [48, 20] 1,920 bytes <- {prefix}q_proj.weight + {prefix}premix" in lines
    assert lines[-1].startswith("24 tensors, ") and len(lines) == 25
    assert (result.returncode, result.stderr, list(tmp_path.iterdir())) == (0, "", [])


def test_a_dry_run_in_json_adds_up_to_the_export(exported: Exported, tmp_path: Path) -> None:
    rows = json.loads(run(exported.checkpoint, tmp_path / "out", "--dry-run", "--json").stdout)
    assert sum(row["bytes"] for row in rows) == exported.report["bytes"]
    assert {row["name"]: row["sources"] for row in rows if len(row["sources"]) > 1} == exported.report["folded"]


def test_a_verified_export_succeeds_and_prints_the_figure(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--verify", error=2.0**-20)
    assert result.returncode == 0, result.stderr
    assert "logits differ by 9.54e-07 of the largest, allowed 1.0e-05" in result.stdout


def test_a_failed_verification_exits_1_and_leaves_nothing(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--verify", error=0.5)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "error: verification failed in float32: logits differ by 5.00e-01 of the largest, the bound is 1.0e-05; "
        "nothing was kept"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize("case", ["no checkpoint", "output exists", "folded already", "nothing to fold"])
def test_wrong_input_exits_2_with_one_line(exported: Exported, tmp_path: Path, case: str, flags: list[str]) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    paths = {
        "no checkpoint": (tmp_path / "absent", tmp_path / "out"),
        "output exists": (exported.checkpoint, exported.directory),
        "folded already": (exported.directory, tmp_path / "out"),
        "nothing to fold": (tmp_path / "grouped", tmp_path / "out"),
    }
    if case == "nothing to fold":
        write(tmp_path / "grouped", recipe, trained_weights(recipe), small_tokenizer())
    result = run(*paths[case], *flags)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith("error: ")
    assert result.stdout == "" and not (tmp_path / "out").exists()


def test_a_grouped_baseline_is_exported_with_plain(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    checkpoint = write(tmp_path / "grouped", recipe, trained_weights(recipe), small_tokenizer())
    result = run(checkpoint, tmp_path / "out", "--plain")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out" / "fold_report.json").read_text())["folded"] == {}


def test_folding_needs_neither_paddle_nor_torch() -> None:
    heavy = "{'paddle', 'torch', 'transformers'}"
    program = f"import sys, vha_paddle.export.fold_export; print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
