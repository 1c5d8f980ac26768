"""A run in one process: its record, its checkpoints, resuming, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from tests.tolerances import FLOAT32
from tests.train.conftest import MEASURED, NUM_STEPS, MakeRecipe
from vha_paddle.checkpoint.layout import list_steps, open_checkpoint, step_directory, tensor_file
from vha_paddle.config import Recipe, load_recipe
from vha_paddle.errors import RunError, UserError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.tensor_file import read_tensors
from vha_paddle.train.trainer import RunData, Trainer


def train(recipe: Recipe) -> Trainer:
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    trainer.fit()
    return trainer


def records(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def without_speed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in MEASURED}


def test_metrics_hold_every_step_once_with_its_numbers(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    train(recipe)
    lines = records(recipe)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line in lines:
        assert {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"} <= set(line)
        assert line["tokens"] == line["step"] * recipe.tokens_per_step
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6]
    assert lines[-1]["lr"] == pytest.approx(recipe.schedule.min_lr)


def test_a_first_loss_is_that_of_a_uniform_guess(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    train(recipe)
    assert records(recipe)[0]["loss"] == pytest.approx(np.log(recipe.model.vocab_size), rel=0.02)


def test_the_console_shows_a_line_per_interval(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_recipe())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == NUM_STEPS // 2
    assert all(part in lines[0] for part in ("loss", "lr", "grad norm", "tokens/s", "MFU", "ETA"))


def test_the_last_step_is_saved_evaluated_and_shown_whatever_the_intervals(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(checkpoint__interval=4, logging__eval_interval=4, logging__interval=4)
    train(recipe)
    assert list_steps(Path(recipe.run.output)) == [4, NUM_STEPS]
    assert [line["step"] for line in records(recipe) if "val_loss" in line] == [4, NUM_STEPS]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in shown] == [f"4/{NUM_STEPS}", f"{NUM_STEPS}/{NUM_STEPS}"]


def test_the_runs_seed_decides_the_first_weights(make_recipe: MakeRecipe) -> None:
    def first_weights(seed: int) -> np.ndarray:
        recipe = make_recipe(run__seed=seed)
        return Trainer(recipe, RunData(recipe), Mesh()).model.embed_tokens.weight.numpy()

    assert np.array_equal(first_weights(1), first_weights(1))
    assert not np.array_equal(first_weights(1), first_weights(2))


def test_an_update_has_the_length_of_the_recorded_learning_rate(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(schedule__total_tokens=64, schedule__warmup_tokens=0)  # one step, at min_lr
    moved = np.abs(train(recipe).model.norm.weight.numpy() - 1)  # Adam's first step is +-rate, gains do not decay
    assert records(recipe)[0]["lr"] == recipe.schedule.min_lr
    assert moved.max() == pytest.approx(recipe.schedule.min_lr, rel=1e-2)


def test_gradients_are_clipped_to_the_recipes_norm(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(schedule__total_tokens=64, schedule__warmup_tokens=0, optim__max_grad_norm=0.01)
    means = train(recipe).optimizer.slots()["moment1"].values()
    norm = np.sqrt(sum(np.square(mean.numpy()).sum() for mean in means)) / (1 - recipe.optim.beta1)
    assert records(recipe)[0]["grad_norm"] > 0.01
    assert norm == pytest.approx(0.01, rel=FLOAT32)


def test_a_run_continues_from_its_newest_checkpoint(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    train(recipe)
    assert list_steps(Path(recipe.run.output)) == [3, NUM_STEPS]
    assert Trainer(recipe, RunData(recipe), Mesh()).step == NUM_STEPS


def test_a_line_of_metrics_cut_by_a_crash_is_written_anew(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    train(recipe)
    shutil.rmtree(step_directory(Path(recipe.run.output), NUM_STEPS))
    metrics = Path(recipe.run.output) / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-10])
    train(recipe)
    assert [line["step"] for line in records(recipe)] == list(range(1, NUM_STEPS + 1))


def test_a_run_resumed_in_the_middle_is_bit_equal_to_an_unbroken_one(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    train(recipe)
    unbroken = records(recipe)
    final = step_directory(Path(recipe.run.output), NUM_STEPS)
    expected = {file.name: file.read_bytes() for file in final.iterdir()}
    shutil.rmtree(final)
    assert train(recipe).step == NUM_STEPS
    assert [without_speed(line) for line in records(recipe)] == [without_speed(line) for line in unbroken]
    assert {file.name: file.read_bytes() for file in final.iterdir()} == expected


def test_a_checkpoint_is_read_by_the_safetensors_library_under_canonical_names(make_recipe: MakeRecipe) -> None:
    from safetensors.numpy import load_file

    recipe = make_recipe()
    trainer = train(recipe)
    directory = step_directory(Path(recipe.run.output), NUM_STEPS)
    model = load_file(directory / tensor_file("model", 0, 1))
    optimizer = load_file(directory / tensor_file("optimizer", 0, 1))
    parameters = trainer.model.named_tensors()
    assert set(model) == set(parameters)
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.premix", "model.norm.weight"} <= set(model)
    for name, parameter in parameters.items():
        assert np.array_equal(model[name], parameter.numpy())
        for slot, states in trainer.optimizer.slots().items():
            assert np.array_equal(optimizer[f"{name}.{slot}"], states[name].numpy())
    metadata = read_tensors(directory / tensor_file("model", 0, 1)).metadata
    assert metadata["linear_layout"] == "in_out" and metadata["head_order"] == "group_major"


def test_a_checkpoint_carries_recipe_tokenizer_and_position(make_recipe: MakeRecipe, dataset: Path) -> None:
    recipe = make_recipe()
    train(recipe)
    checkpoint = open_checkpoint(Path(recipe.run.output))
    assert checkpoint.recipe == recipe == load_recipe(Path(recipe.run.output) / "recipe.yaml")
    assert checkpoint.tokenizer_path.read_bytes() == (dataset / "tokenizer.model").read_bytes()
    assert checkpoint.state.step == NUM_STEPS
    assert checkpoint.state.samples == NUM_STEPS * recipe.data.global_batch_size
    assert checkpoint.state.tokens == NUM_STEPS * recipe.tokens_per_step


def test_only_the_newest_checkpoints_are_kept(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(checkpoint__interval=1, checkpoint__keep=2)
    train(recipe)
    found = sorted(entry.name for entry in (Path(recipe.run.output) / "checkpoints").iterdir())
    assert found == ["step-00000005", "step-00000006"]


def test_a_half_written_checkpoint_is_not_resumed_from(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    train(recipe)
    newest = step_directory(Path(recipe.run.output), NUM_STEPS)
    newest.rename(newest.parent / f".{newest.name}.tmp")  # as a run that died while saving leaves it
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    assert trainer.step == 3
    trainer.fit()
    assert open_checkpoint(Path(recipe.run.output)).state.step == NUM_STEPS
    assert not list(newest.parent.glob(".*"))


@pytest.mark.parametrize("damage", ["truncated", "edited", "missing"])
@pytest.mark.parametrize("name", [tensor_file("model", 0, 1), tensor_file("optimizer", 0, 1), "state.json"])
def test_a_damaged_checkpoint_is_passed_over(make_recipe: MakeRecipe, name: str, damage: str) -> None:
    recipe = make_recipe()
    train(recipe)
    file = step_directory(Path(recipe.run.output), NUM_STEPS) / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    else:
        content[-3] ^= 1
        file.write_bytes(content)
    assert Trainer(recipe, RunData(recipe), Mesh()).step == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model__intermediate_size": 32}, "model.intermediate_size=32: step-00000006 was trained with 24, and its w"),
        ({"run__seed": 12}, "run.seed=12: step-00000006 was trained with 11, and it orders the data"),
        ({"data__sequence_length": 8, "schedule__total_tokens": 24 * 32}, "data.sequence_length=8: .* with 16"),
        ({"data__global_batch_size": 2}, "data.global_batch_size=2: .* with 4"),
        ({"checkpoint__resume": "never"}, "checkpoint.resume=never"),
    ],
)
def test_a_run_that_is_not_the_checkpoints_is_refused(
    make_recipe: MakeRecipe, change: dict[str, Any], words: str
) -> None:
    train(make_recipe())
    changed = make_recipe(**change)
    with pytest.raises(UserError, match=words):
        Trainer(changed, RunData(changed), Mesh())


def test_a_run_on_other_data_is_refused(make_recipe: MakeRecipe, dataset: Path) -> None:
    train(make_recipe())
    changed = make_recipe(data__train=str(dataset / "validation"), data__validation=str(dataset / "train"))
    with pytest.raises(UserError, match="was trained on other data"):
        Trainer(changed, RunData(changed), Mesh())


def test_a_loss_that_is_not_finite_stops_a_run_that_may_skip_nothing(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(failure__max_skipped_steps=0)
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    with paddle.no_grad():
        trainer.model.norm.weight.set_value(paddle.full([16], float("nan")))
    with pytest.raises(RunError, match="step 1: .*not finite"):
        trainer.fit()
    assert not (Path(recipe.run.output) / "checkpoints").exists()


def test_the_vocabulary_must_hold_the_tokenizers(make_recipe: MakeRecipe) -> None:
    with pytest.raises(UserError, match=r"model.vocab_size=280: must be at least the 290 tokens"):
        RunData(make_recipe(model__vocab_size=280))


def test_bfloat16_on_cpu_is_refused_with_the_override(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(precision__compute="bfloat16")
    with pytest.raises(UserError, match="precision.compute=float32"):
        Trainer(recipe, RunData(recipe), Mesh())
