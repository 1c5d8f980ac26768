"""`tools/calculate.py` as a user runs it, from any folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")


def calculate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "calculate.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_cache_is_printed_as_json(tmp_path: Path) -> None:
    result = calculate(tmp_path, "cache", RECIPE, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["bfloat16_bytes_per_token_per_layer"] == 2 * 2 * 32 * 2


def test_an_override_changes_the_parameters_of_a_rank(tmp_path: Path) -> None:
    result = calculate(tmp_path, "params", RECIPE, "--json", "parallel.tensor=1")
    found = json.loads(result.stdout)
    assert found["total_on_one_rank"] == found["total"]
    assert found["total_served_folded"] == found["total"] + 4 * (192 * 4 * 32 - 2 * 32 * 32 - 2 * 8 * 2)


def test_flops_are_printed_as_a_table_with_every_convention(tmp_path: Path) -> None:
    lines = dict(line.split() for line in calculate(tmp_path, "flops", RECIPE).stdout.splitlines())
    forward = sum(int(value.replace(",", "")) for name, value in lines.items() if name.startswith("forward."))
    assert lines["training.with_lm_head_full_scores"] == f"{3 * forward:,}"


def test_a_wrong_recipe_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = calculate(tmp_path, "params", RECIPE, "parallel.tensor=3")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
