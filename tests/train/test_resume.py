"""Starting in a directory that holds a run: what continues, what is said, what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import MEASURED, NUM_STEPS, MakeRecipe
from tests.train.test_changes import WSD as LONG_WSD
from tests.train.test_experts import MIXTURE
from vha_paddle.checkpoint.layout import (
    MANIFEST_FILE,
    open_checkpoint,
    record_of,
    step_directory,
    write_json,
    write_manifest,
)
from vha_paddle.config import Recipe
from vha_paddle.config.schema import Precision
from vha_paddle.errors import UserError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.changes import changed_keys
from vha_paddle.train.resume import _check_fit, what_continues
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
    said = capsys.readouterr().out
    flag = "--allow-changed schedule.total_tokens"
    assert f"complete at step {NUM_STEPS}; to train on, raise schedule.total_tokens and add {flag}\n" in said
    assert files(recipe) == before


def test_what_a_complete_run_says_trains_on(make_recipe: MakeRecipe) -> None:
    fit(make_recipe())
    longer = make_recipe(schedule__total_tokens=8 * 64)
    trainer = Trainer(longer, RunData(longer), Mesh(), allow_changed=["schedule.total_tokens"])
    assert trainer.fit() and trainer.step == 8


@pytest.mark.parametrize(
    ("steps", "interval", "is_said"), [(1001, None, True), (1000, None, False), (1001, 500, False)]
)
def test_a_long_run_without_checkpoints_on_the_way_is_warned_of(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str], steps: int, interval: int | None, is_said: bool
) -> None:
    recipe = make_recipe(schedule__total_tokens=steps * 64, checkpoint__interval=interval)
    Trainer(recipe, RunData(recipe), Mesh()).fit(lambda: True)
    warning = "warning: checkpoint.interval is null: nothing is saved before the last step, and a failure costs all"
    assert (warning in capsys.readouterr().out) == is_said


def test_where_a_run_continues_is_said_by_the_name_of_its_checkpoint(make_recipe: MakeRecipe) -> None:
    output = Path(make_recipe().run.output)
    assert what_continues(output) == "nothing was saved yet, the same command starts anew"
    fit(make_recipe())  # saved at steps 3 and 6
    assert what_continues(output) == "last checkpoint step-00000006, the same command continues"


def test_a_schedule_that_ends_before_the_checkpoint_is_refused_and_nothing_is_touched(make_recipe: MakeRecipe) -> None:
    fit(make_recipe())
    shorter = make_recipe(schedule__total_tokens=3 * 64)
    before = files(shorter)
    with pytest.raises(UserError, match=r"schedule.total_tokens=192: 3 steps, but step-00000006 is beyond them"):
        fit(shorter)
    assert files(shorter) == before


def test_another_compute_dtype_is_refused_as_the_optimizers_state_is_another(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    fit(recipe)
    checkpoint = open_checkpoint(Path(recipe.run.output))
    in_bfloat16 = recipe.model_copy(update={"precision": Precision(compute="bfloat16")})
    with pytest.raises(UserError, match=r"precision.compute=bfloat16: step-00000006 was trained with float32"):
        _check_fit(checkpoint, in_bfloat16, checkpoint.state.data_fingerprint, allowed=["precision.compute"])


def test_a_damaged_newest_checkpoint_is_kept_aside_and_the_one_before_continued(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    fit(recipe)
    whole = files(recipe)
    newest = step_directory(Path(recipe.run.output), NUM_STEPS)
    for number in ("", "-2"):
        file = newest / "model-00000-of-00001.safetensors"
        damaged = file.read_bytes()[:-1]
        file.write_bytes(damaged)
        before = files(recipe)
        assert Trainer(recipe, RunData(recipe), Mesh()).step == 3
        assert files(recipe) == before  # nothing is touched before training begins
        capsys.readouterr()
        fit(recipe)
        said = capsys.readouterr().out
        aside = f"step-00000006.damaged{number}"
        assert f"{file}: differs from the manifest (damaged or edited): passed over, and kept as {aside}" in said
        assert "from step 3" in said and "dropped 3 records after step 3" in said
        assert (newest.with_name(aside) / file.name).read_bytes() == damaged
    kept = {name: content for name, content in files(recipe).items() if "damaged" not in name}
    assert kept.keys() == whole.keys()
    assert {name for name in kept if kept[name] != whole[name]} == {"metrics.jsonl"}  # times differ


def test_where_no_checkpoint_is_whole_it_is_an_error_and_nothing_is_touched(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    fit(recipe)
    for step in (3, NUM_STEPS):
        (step_directory(Path(recipe.run.output), step) / "manifest.json").unlink()
    before = files(recipe)
    with pytest.raises(UserError, match=r"step-00000006/manifest.json: .*, and no checkpoint before it is whole"):
        fit(recipe)
    assert files(recipe) == before


def test_a_checkpoint_of_another_version_is_not_passed_over(make_recipe: MakeRecipe) -> None:
    """Whole, and not understood: going on from an older one would train again what a newer version has trained."""
    recipe = make_recipe()
    fit(recipe)
    newest = step_directory(Path(recipe.run.output), NUM_STEPS)
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    write_json(newest / "state.json", state | {"a later version's": 1})
    names = [path.name for path in newest.iterdir() if path.name != MANIFEST_FILE]
    write_manifest(newest, {name: record_of(newest / name) for name in names})
    with pytest.raises(UserError, match="not the state this version writes"):
        fit(recipe)


def test_the_state_of_an_older_version_is_read(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    fit(recipe)
    newest = step_directory(Path(recipe.run.output), NUM_STEPS)
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    for later in ("skipped", "skipped_in_a_row", "losses"):
        del state[later]
    write_json(newest / "state.json", state)
    names = [path.name for path in newest.iterdir() if path.name != MANIFEST_FILE]
    write_manifest(newest, {name: record_of(newest / name) for name in names})
    assert open_checkpoint(newest).state.skipped == 0
    assert Trainer(recipe, RunData(recipe), Mesh()).step == NUM_STEPS


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


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_only_has_a_checkpoints_name_is_passed_over_and_said(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A file, or a link to a disk that is not mounted: not seen, the run would go back without a word."""
    recipe = make_recipe()
    fit(recipe)
    newest = step_directory(Path(recipe.run.output), NUM_STEPS)
    shutil.rmtree(newest)
    newest.symlink_to("nowhere") if kind == "link" else newest.write_text("a file", encoding="utf-8")
    capsys.readouterr()
    fit(recipe)
    said = capsys.readouterr().out
    assert f"{newest}/manifest.json: cannot be read" in said and "kept as step-00000006.damaged" in said
    assert open_checkpoint(newest).state.step == NUM_STEPS


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_run_whose_checkpoints_cannot_be_reached_does_not_begin_anew(make_recipe: MakeRecipe, kind: str) -> None:
    recipe = make_recipe()
    fit(recipe)
    directory = Path(recipe.run.output) / "checkpoints"
    directory.rename(directory.with_name("moved"))
    directory.symlink_to("nowhere") if kind == "link" else directory.write_text("a file", encoding="utf-8")
    before = files(recipe)
    with pytest.raises(UserError, match=r"run/checkpoints: cannot be read \((No such file|Not a directory).*mount"):
        fit(recipe)
    assert files(recipe) == before


def test_steps_without_a_record_are_counted(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe()
    fit(recipe)
    shutil.rmtree(step_directory(Path(recipe.run.output), NUM_STEPS))
    metrics = Path(recipe.run.output) / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text("".join([lines[0], *lines[2:]]), encoding="utf-8")
    capsys.readouterr()
    fit(recipe)
    assert "warning: metrics.jsonl: of the steps up to 3, 1 have no record" in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()] == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("line", [b"\xff\xfe\x00", b'{"step": Infinity}', b"[" * 100_000, b"\x00" * 40])
def test_what_is_no_record_is_named_by_its_line(make_recipe: MakeRecipe, line: bytes) -> None:
    recipe = make_recipe()
    fit(recipe)
    shutil.rmtree(step_directory(Path(recipe.run.output), NUM_STEPS))
    with open(Path(recipe.run.output) / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match=r"metrics.jsonl: line 7 is no record of a step; remove the line"):
        fit(recipe)


VARIANTS: dict[str, dict[str, Any]] = {
    "dropout, accumulation, clipping": {
        "model__hidden_dropout": 0.2,
        "data__micro_batch_size": 1,
        "optim__max_grad_norm": 0.1,
    },
    "experts, behind training": MIXTURE | {"checkpoint__asynchronous": True},
    "wsd, documents": {"schedule": LONG_WSD | {"total_tokens": NUM_STEPS * 64}, "data__document_mask": True},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_run_continued_after_any_step_is_bit_equal(make_recipe: MakeRecipe, changes: dict[str, Any]) -> None:
    recipe = make_recipe(**{"checkpoint__interval": 1, "checkpoint__keep": 9} | changes)

    def results() -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        found = files(recipe)
        records = [json.loads(line) for line in found.pop("metrics.jsonl").splitlines()]
        return [{k: v for k, v in record.items() if k not in MEASURED} for record in records], found

    fit(recipe)
    unbroken = results()
    for last in range(1, NUM_STEPS):
        for step in range(last + 1, NUM_STEPS + 1):
            shutil.rmtree(step_directory(Path(recipe.run.output), step))
        fit(recipe)
        assert results() == unbroken, f"from step {last}"
