"""Runs on two ranks under Paddle's launcher: the same numbers as one process, and bit-exact resuming."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.cases import num_ranks
from tests.distributed.launch import run_ranks
from tests.tolerances import FLOAT32, assert_close
from tests.train.conftest import NUM_STEPS, MakeRecipe, dataset, make_recipe, write_recipe
from vha_paddle.checkpoint.layout import open_checkpoint, step_directory
from vha_paddle.config import Recipe
from vha_paddle.export.fold_export import export_checkpoint

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["dataset", "make_recipe"]  # fixtures
RESHARDED = (
    "tensor_2",
    "one",
    "tensor_2_pipeline_2",
    "sharding_2",
    "tensor_4",
    "pipeline_2",
    "tensor_2_sequence_sharding_2",
    "context_2",
    "data_2",
    "pipeline_2_sharding_2",
    "sharding_2_stage_3",
    "one",
)
"""Layouts in the order in which a checkpoint goes through them."""


def launch(recipe: Recipe, tmp_path: Path, nproc: int) -> subprocess.CompletedProcess[str]:
    """Run tools/train.py under the launcher; launcher and ranks end with the call."""
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    tied = str(Path(__file__).with_name("tied.py"))
    launcher = [sys.executable, tied, "paddle.distributed.launch", "--nproc_per_node", str(nproc)]
    command = [*launcher, "--log_dir", str(tmp_path / "logs"), tied, str(ROOT / "tools/train.py"), str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def losses(recipe: Recipe) -> np.ndarray:
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values: list[Any] = [json.loads(line) for line in lines]
    return np.array([[value["loss"], value["grad_norm"]] for value in values])


def test_two_ranks_train_as_one_process_and_resume_bit_exactly(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    one = make_recipe(run__output=str(tmp_path / "one"))
    two = make_recipe(run__output=str(tmp_path / "two"), parallel__tensor=2)
    for recipe in (one, two):
        result = launch(recipe, tmp_path, recipe.num_ranks)
        assert result.returncode == 0, result.stdout[-3000:]
    assert_close(losses(two), losses(one), FLOAT32, "losses and norms")
    directories = [step_directory(Path(recipe.run.output), NUM_STEPS) for recipe in (one, two)]
    weights = [open_checkpoint(directory).model_tensors() for directory in directories]
    for name in weights[0]:
        assert_close(weights[1].array(name), weights[0].array(name), FLOAT32, name)

    unbroken = losses(two)
    expected = {file.name: file.read_bytes() for file in directories[1].iterdir()}
    shutil.rmtree(directories[1])
    result = launch(two, tmp_path, 2)
    assert result.returncode == 0 and "from step 3" in result.stdout, result.stdout[-3000:]
    assert np.array_equal(losses(two), unbroken)
    assert {file.name: file.read_bytes() for file in directories[1].iterdir()} == expected


def test_a_run_continues_under_another_layout(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """tensor 2, one process, tensor 2 x pipeline 2, sharding 2: the loss curve is that of an unbroken run."""
    changes = {"checkpoint__interval": 1, "checkpoint__keep": NUM_STEPS}
    worker, path = Path(__file__).with_name("training_worker.py"), tmp_path / "recipe.yaml"
    recipe = make_recipe(parallel={"tensor": 2}, **changes)
    run_ranks(worker, 2, [str(write_recipe(recipe, path))])
    unbroken = losses(recipe)
    for step, layout in ((1, {}), (2, {"tensor": 2, "pipeline": 2}), (4, {"sharding": 2})):
        for later in range(step + 1, NUM_STEPS + 1):
            shutil.rmtree(step_directory(Path(recipe.run.output), later))
        other = make_recipe(parallel=layout, **changes)
        run_ranks(worker, other.num_ranks, [str(write_recipe(other, path))])
        assert open_checkpoint(step_directory(Path(recipe.run.output), step + 1)).recipe.parallel == other.parallel
        assert_close(losses(recipe), unbroken, FLOAT32, "losses and norms")


def logical_digests(checkpoint: Path) -> dict[str, str]:
    """dtype, shape and digest of every logical tensor, moments included."""
    opened = open_checkpoint(checkpoint)
    digests = {}
    for tensors in (opened.model_tensors(), opened.optimizer_tensors()):
        for name in tensors:
            array = tensors.array(name)
            digests[name] = f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    return digests


def exported(checkpoint: Path, output: Path) -> dict[str, bytes]:
    """The weights of the folded export."""
    export_checkpoint(checkpoint, output, "float32")
    return {path.name: path.read_bytes() for path in output.glob("*.safetensors")}


def test_a_checkpoint_read_and_written_under_any_layout_keeps_its_bits(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(model__attention__num_attention_heads=8)
    assert launch(recipe, tmp_path, 1).returncode == 0
    source = step_directory(Path(recipe.run.output), NUM_STEPS)
    expected, folded = logical_digests(source), exported(source, tmp_path / "export")
    assert list(folded) == ["model.safetensors"]
    assert any(name.endswith("o_proj.weight.moment2") for name in expected)
    for number, layout in enumerate(RESHARDED):
        output = tmp_path / f"copy{number}"
        run_ranks(Path(__file__).with_name("reshard_worker.py"), num_ranks(layout), [str(source), str(output), layout])
        for mode in ("synchronous", "asynchronous"):
            source = step_directory(output / mode, NUM_STEPS)  # the next layout reads what this one wrote
            assert logical_digests(source) == expected, f"{layout}, {mode}"
        assert exported(source, tmp_path / f"export{number}") == folded, layout


def test_a_wrong_number_of_ranks_is_named_and_nothing_is_written(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(parallel__tensor=2)
    result = launch(recipe, tmp_path, 1)
    assert result.returncode != 0
    assert "the degrees multiply to 2 ranks but 1 process was started" in result.stdout
    assert not Path(recipe.run.output).exists()


def test_no_launcher_is_needed_for_one_process(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    path = write_recipe(make_recipe(), tmp_path / "recipe.yaml")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools/train.py"), str(path)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in result.stdout
