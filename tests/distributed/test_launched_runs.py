"""Runs on two ranks under Paddle's launcher: the same numbers as one process, and bit-exact resuming."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.cases import LAYOUTS
from tests.distributed.launch import run_ranks
from tests.tolerances import FLOAT32, assert_close
from tests.train.conftest import NUM_STEPS, MakeRecipe, dataset, make_recipe, write_recipe
from vha_paddle.checkpoint.layout import MODEL_FILE, OPTIMIZER_FILE, step_directory
from vha_paddle.config import Recipe
from vha_paddle.tensor_file import read_tensors

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["dataset", "make_recipe"]  # fixtures


def launch(recipe: Recipe, tmp_path: Path, num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Run tools/train.py under the launcher; the whole process group ends with the call."""
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks)]
    command = [*launcher, "--log_dir", str(tmp_path / "logs"), str(ROOT / "tools/train.py"), str(path)]
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


def num_ranks_of(layout: str) -> int:
    return math.prod(degree for axis, degree in LAYOUTS[layout].items() if axis != "sequence")


def losses(recipe: Recipe) -> np.ndarray:
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values: list[Any] = [json.loads(line) for line in lines]
    return np.array([[value["loss"], value["grad_norm"]] for value in values])


def test_two_ranks_train_as_one_process_and_resume_bit_exactly(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    one = make_recipe(run__output=str(tmp_path / "one"))
    two = make_recipe(run__output=str(tmp_path / "two"), parallel__tensor=2)
    for recipe, num_ranks in ((one, 1), (two, 2)):
        result = launch(recipe, tmp_path, num_ranks)
        assert result.returncode == 0, result.stdout[-3000:]
    assert_close(losses(two), losses(one), FLOAT32, "losses and norms")
    directories = [step_directory(Path(recipe.run.output), NUM_STEPS) for recipe in (one, two)]
    files = [read_tensors(directory / "model.safetensors") for directory in directories]
    for name in files[0]:
        assert_close(files[1].array(name), files[0].array(name), FLOAT32, name)

    unbroken = losses(two)
    expected = {file.name: file.read_bytes() for file in directories[1].iterdir()}
    shutil.rmtree(directories[1])
    result = launch(two, tmp_path, 2)
    assert result.returncode == 0 and "from step 3" in result.stdout, result.stdout[-3000:]
    assert np.array_equal(losses(two), unbroken)
    assert {file.name: file.read_bytes() for file in directories[1].iterdir()} == expected


def test_a_run_continues_under_another_layout(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """tensor 2, then sharding 2, then one process: the loss curve is that of an unbroken run."""
    recipe = make_recipe(parallel={"tensor": 2}, checkpoint__interval=2, checkpoint__keep=3)
    assert launch(recipe, tmp_path, 2).returncode == 0
    unbroken = losses(recipe)
    for step, layout, num_ranks in ((2, {"sharding": 2}, 2), (4, {}, 1)):
        for later in range(step + 1, NUM_STEPS + 1):
            shutil.rmtree(step_directory(Path(recipe.run.output), later), ignore_errors=True)
        result = launch(make_recipe(parallel=layout, checkpoint__interval=2, checkpoint__keep=3), tmp_path, num_ranks)
        assert result.returncode == 0 and f"from step {step}" in result.stdout, result.stdout[-3000:]
        assert_close(losses(recipe), unbroken, FLOAT32, "losses and norms")


def test_a_checkpoint_read_and_written_under_any_layout_keeps_its_bits(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(model__attention__num_attention_heads=8)
    assert launch(recipe, tmp_path, 1).returncode == 0
    source = step_directory(Path(recipe.run.output), NUM_STEPS)
    expected = {name: (source / name).read_bytes() for name in (MODEL_FILE, OPTIMIZER_FILE)}
    layouts = ("tensor_4", "sharding_2", "tensor_2_sequence_sharding_2", "data_2", "one")
    for number, layout in enumerate(layouts):
        output = tmp_path / f"copy{number}"
        worker = Path(__file__).with_name("reshard_worker.py")
        run_ranks(worker, num_ranks_of(layout), [str(source), str(output), layout])
        source = step_directory(output, NUM_STEPS)  # the next layout reads what this one wrote
        for name, content in expected.items():
            assert (source / name).read_bytes() == content, f"{name} under {layout}"


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
