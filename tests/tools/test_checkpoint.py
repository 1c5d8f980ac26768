"""`tools/checkpoint.py` as a user runs it, from any folder, on what a run wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import SMALL_VHA, small_recipe, trained_weights, write_checkpoint
from tests.train.conftest import NUM_STEPS, MakeRecipe, dataset, make_recipe
from vha_paddle.checkpoint.layout import step_directory
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.trainer import RunData, Trainer

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["dataset", "make_recipe"]  # fixtures


def tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "checkpoint.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    recipe = small_recipe(SMALL_VHA)
    return write_checkpoint(tmp_path / "step-00000007", recipe, trained_weights(recipe), b"a tokenizer", num_files=2)


def test_inspect_shows_step_layout_files_and_tensors(checkpoint: Path, tmp_path: Path) -> None:
    lines = tool(tmp_path, "inspect", "step-00000007").stdout.splitlines()
    assert lines[0] == "step-00000007: small, step 7, 1,792 tokens"
    assert lines[1] == "written by vha_paddle 0.0.9 under one process"
    rows = [line.split("  ")[0] for line in lines]
    assert "model-00001-of-00002.safetensors" in rows
    assert rows.index("model.layers.0.self_attn.premix") < rows.index("model.layers.1.self_attn.premix")
    (row,) = [line for line in lines if line.startswith("model.embed_tokens.weight")]
    assert row.split() == [
        "model.embed_tokens.weight",
        *("330", "x", "20"),
        "float32",
        *("model-00000-of-00002.safetensors", "and", "1", "more"),
    ]


def test_inspect_prints_json_without_paddle(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['checkpoint', 'inspect', sys.argv[1], '--json'];"
        f"runpy.run_path({str(ROOT / 'tools' / 'checkpoint.py')!r}, run_name='__main__');"
        "assert 'paddle' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(checkpoint)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["step"] == 7


def test_verify_of_an_intact_checkpoint_exits_0(checkpoint: Path, tmp_path: Path) -> None:
    result = tool(tmp_path, "verify", str(checkpoint), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == {"intact": True, "faults": {}}


def test_verify_names_the_damaged_file_and_exits_1(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = tool(tmp_path, "verify", str(checkpoint))
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(f"error: {file}: differs from the manifest")
    assert not json.loads(tool(tmp_path, "verify", str(checkpoint), "--json").stdout)["intact"]


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["reshard", "out"]])
def test_what_is_no_checkpoint_exits_2(tmp_path: Path, command: list[str]) -> None:
    result = tool(tmp_path, command[0], str(tmp_path), *command[1:])
    assert result.returncode == 2 and "neither a checkpoint" in result.stderr and "Traceback" not in result.stderr


def test_reshard_refuses_an_existing_output(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = tool(tmp_path, "reshard", str(checkpoint), "out")
    assert result.returncode == 2 and "out: exists" in result.stderr


@pytest.mark.parametrize("command", [[], ["inspect"], ["verify"], ["reshard"]])
def test_help_teaches_by_example(tmp_path: Path, command: list[str]) -> None:
    result = tool(tmp_path, *command, "--help")
    assert result.returncode == 0 and "examples:" in result.stdout and "exit codes:" in result.stdout


def test_a_run_resumes_from_a_resharded_checkpoint(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(checkpoint__interval=3)
    output = Path(recipe.run.output)
    Trainer(recipe, RunData(recipe), Mesh()).fit()
    final, middle = step_directory(output, NUM_STEPS), step_directory(output, 3)
    expected = {file.name: file.read_bytes() for file in final.iterdir()}
    assert tool(tmp_path, "reshard", str(middle), "resharded", "--files", "3").returncode == 0
    shutil.rmtree(final)
    shutil.rmtree(middle)
    (tmp_path / "resharded").rename(middle)
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    assert trainer.step == 3
    trainer.fit()
    assert {file.name: file.read_bytes() for file in final.iterdir()} == expected
