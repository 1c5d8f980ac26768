"""`tools/fold_export.py --verify-only`: the proof of an export that is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import SMALL_VHA
from tests.proof.exports import Made, edit_stored, make, next_number

ROOT = Path(__file__).resolve().parents[2]


def tool(made: Made, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/fold_export.py"), str(made.source.path), str(made.directory)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make(tmp_path, SMALL_VHA, "bfloat16")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_export_that_is_there_is_compared_and_left_as_it_is(made: Made) -> None:
    before = contents(made.directory)
    result = tool(made, "--verify-only", "--json", "--verify-tokens", "64")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["passed"] and figures["num_tokens"] == 64 and figures["dtype"] == "bfloat16"
    assert contents(made.directory) == before


def test_a_fault_is_exit_code_1_and_its_line(made: Made) -> None:
    edit_stored(made.directory, lambda stored: next_number(stored["model.layers.1.mlp.up_proj.weight"], (3, 2)))
    result = tool(made, "--verify-only")
    assert result.returncode == 1 and "storage error" in result.stdout
    assert "model.layers.1.mlp.up_proj.weight: a weight is" in result.stderr


def test_a_damaged_checkpoint_proves_nothing(made: Made) -> None:
    file = max(made.source.path.glob("model*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = tool(made, "--verify-only")
    assert result.returncode == 2 and file.name in result.stderr


@pytest.mark.parametrize("flag", ["--verify", "--dry-run", "--overwrite", "--plain"])
def test_flags_about_what_is_written_have_no_effect_and_are_refused(flag: str, made: Made) -> None:
    result = tool(made, "--verify-only", flag)
    assert result.returncode == 2
    assert f"error: {flag}: has no effect with --verify-only; drop one of them" in result.stderr
