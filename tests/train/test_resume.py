"""Starting in a directory that holds a run: what continues, what is said, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import NUM_STEPS, MakeRecipe
from vha_paddle.checkpoint.layout import open_checkpoint, step_directory
from vha_paddle.config import Recipe
from vha_paddle.config.schema import Precision
from vha_paddle.errors import UserError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.resume import _check_fit, changed_keys
from vha_paddle.train.trainer import RunData, Trainer

HOLD = """
import sys
from pathlib import Path
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.run_directory import run_directory
with run_directory(Path(sys.argv[1]), Mesh()):
    print("held", flush=True)
    sys.stdin.read()
"""


def fit(recipe: Recipe) -> None:
    Trainer(recipe, RunData(recipe), Mesh()).fit()


def files(recipe: Recipe) -> dict[str, bytes]:
    output = Path(recipe.run.output)
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_a_complete_run_says_so_and_touches_nothing(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    fit(recipe)
    before = files(recipe)
    capsys.readouterr()
    fit(recipe)
    assert f"complete at step {NUM_STEPS}; raise schedule.total_tokens" in capsys.readouterr().out
    assert files(recipe) == before


def test_a_schedule_that_ends_before_the_checkpoint_is_refused_and_nothing_is_touched(make_recipe: MakeRecipe) -> None:
    fit(make_recipe())
    shorter = make_recipe(schedule__total_tokens=3 * 64)
    before = files(shorter)
    with pytest.raises(UserError, match=r"schedule.total_tokens=192: 3 steps, but step-00000006 is beyond them"):
        fit(shorter)
    assert files(shorter) == before


def test_what_changed_since_the_checkpoint_is_said(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    fit(make_recipe())
    capsys.readouterr()
    fit(make_recipe(schedule__total_tokens=8 * 64, optim__lr=5e-4))
    said = capsys.readouterr().out
    assert "changed since the checkpoint: optim.lr 0.001 -> 0.0005, schedule.total_tokens 384 -> 512" in said


def test_a_changed_model_is_refused_naming_the_key(make_recipe: MakeRecipe) -> None:
    fit(make_recipe())
    with pytest.raises(UserError, match=r"another model section \(model.rope_theta 1000000.0 -> 500.0\)"):
        fit(make_recipe(model__rope_theta=500.0))


def test_another_compute_dtype_is_refused_as_the_optimizers_state_is_another(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    fit(recipe)
    checkpoint = open_checkpoint(Path(recipe.run.output))
    in_bfloat16 = recipe.model_copy(update={"precision": Precision(compute="bfloat16")})
    with pytest.raises(UserError, match=r"precision.compute=bfloat16: the checkpoint was trained in float32"):
        _check_fit(checkpoint, in_bfloat16, checkpoint.state.data_fingerprint)


def test_a_damaged_newest_checkpoint_names_the_one_to_continue_from(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    fit(recipe)
    file = step_directory(Path(recipe.run.output), NUM_STEPS) / "model-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="move step-00000006 away to continue from step-00000003"):
        fit(recipe)


def test_a_directory_in_which_another_process_trains_is_refused(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, recipe.run.output], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process is training there"):
            fit(recipe)
    finally:
        other.kill()
        other.wait()
    fit(recipe)  # the lock ended with its process


def test_an_output_that_is_a_file_is_refused_in_one_line(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("something else", encoding="utf-8")
    for output in (tmp_path / "taken", tmp_path / "taken" / "run"):
        with pytest.raises(UserError, match=r"run.output=.*: cannot be written \((File exists|Not a directory)\)"):
            fit(make_recipe(run__output=str(output)))


def test_changed_keys_are_named_with_both_values(make_recipe: MakeRecipe) -> None:
    before, after = make_recipe(), make_recipe(parallel__tensor=2)
    assert changed_keys(before, before) == []
    assert changed_keys(before, after) == ["parallel.tensor 1 -> 2"]
