"""Runs that start from given weights: which they are, what is fresh, what is said, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from tests.checkpoints import write_checkpoint
from tests.tolerances import FLOAT32
from tests.train.conftest import NUM_STEPS, MakeRecipe
from tests.weights import trained_weights
from vha_paddle.checkpoint.layout import open_checkpoint
from vha_paddle.checkpoint.load import load_masters
from vha_paddle.checkpoint.logical import LogicalTensors
from vha_paddle.config import Recipe
from vha_paddle.errors import UserError
from vha_paddle.evaluate import load_model, validation_loss
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.tensor_file import read_tensors, write_tensors
from vha_paddle.train.trainer import RunData, Trainer


def trainer_of(recipe: Recipe) -> Trainer:
    return Trainer(recipe, RunData(recipe), Mesh())


@pytest.fixture
def start(make_recipe: MakeRecipe, dataset: Path, tmp_path: Path) -> Path:
    """A checkpoint of the recipe's model at trained size."""
    recipe = make_recipe()
    weights = {name: array.astype(np.float32) for name, array in trained_weights(recipe.model, seed=1).items()}
    return write_checkpoint(tmp_path / "start", recipe, weights, (dataset / "tokenizer.model").read_bytes())


def test_every_weight_is_the_checkpoints_and_the_optimizer_is_fresh(make_recipe: MakeRecipe, start: Path) -> None:
    trainer = trainer_of(make_recipe(run__start_from=str(start)))
    tensors = open_checkpoint(start).model_tensors()
    for name, parameter in trainer.model.named_tensors().items():
        assert np.array_equal(parameter.numpy(), tensors.array(name)), name
    for states in trainer.optimizer.slots().values():
        assert not any(state.numpy().any() for state in states.values())
    assert trainer.step == 0


def test_the_loss_before_the_first_step_is_the_sources(make_recipe: MakeRecipe, start: Path) -> None:
    trainer = trainer_of(make_recipe(run__start_from=str(start)))
    windows = trainer.data.validation["validation"].windows
    expected = validation_loss(load_model(start), windows, 4, 2, Mesh())
    assert trainer.evaluate() == {"validation": pytest.approx(expected, rel=FLOAT32)}


def test_a_run_directory_stands_for_its_newest_checkpoint_and_the_opening_line_names_it(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_recipe(run__output=str(tmp_path / "first"))
    trainer_of(first).fit()
    capsys.readouterr()
    trainer_of(make_recipe(run__start_from=first.run.output, run__output=str(tmp_path / "second"))).fit()
    newest = tmp_path / "first" / "checkpoints" / f"step-{NUM_STEPS:08d}"
    opening = capsys.readouterr().out.splitlines()[0]
    assert f"on 1 rank, from the weights of {newest}; output in" in opening


def test_a_runs_own_checkpoint_wins_even_if_the_start_is_gone(
    make_recipe: MakeRecipe, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(run__start_from=str(start))
    trainer_of(recipe).fit()
    shutil.rmtree(start)
    shutil.rmtree(Path(recipe.run.output) / "checkpoints" / f"step-{NUM_STEPS:08d}")
    capsys.readouterr()
    again = trainer_of(recipe)
    assert again.step == 3
    again.fit()
    assert "on 1 rank, from step 3; output in" in capsys.readouterr().out.splitlines()[0]


def test_training_starts_at_step_1_of_its_own_schedule_and_data(make_recipe: MakeRecipe, start: Path) -> None:
    recipe = make_recipe(run__start_from=str(start))
    trainer_of(recipe).fit()
    state = open_checkpoint(Path(recipe.run.output)).state
    assert (state.step, state.samples) == (NUM_STEPS, NUM_STEPS * recipe.data.global_batch_size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__hidden_size": 24}, r"model\.embed_tokens\.weight has shape \[320, 16\], the model needs \[320, 24\]"),
        ({"model__attention__postmix_rank": 3}, r"layers\.0\.self_attn\.postmix_a has shape \[4, 2\], .*\[4, 3\]"),
        ({"model__num_hidden_layers": 1}, r"unexpected tensor model\.layers\.1\."),
        ({"model__tie_word_embeddings": False}, r"tensor lm_head\.weight is missing"),
    ],
)
def test_another_shape_is_refused_naming_key_and_tensor(
    changes: dict[str, Any], words: str, make_recipe: MakeRecipe, start: Path
) -> None:
    with pytest.raises(UserError, match=rf"run\.start_from={start}: .*{words}"):
        trainer_of(make_recipe(run__start_from=str(start), **changes))


def test_a_path_without_a_checkpoint_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"run\.start_from={tmp_path}: .*neither a checkpoint .* nor a run"):
        trainer_of(make_recipe(run__start_from=str(tmp_path)))


def test_another_tokenizer_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    weights = {name: array.astype(np.float32) for name, array in trained_weights(recipe.model, seed=1).items()}
    other = write_checkpoint(tmp_path / "other", recipe, weights, b"another tokenizer")
    with pytest.raises(UserError, match="its tokenizer differs from data.tokenizer=.*the same ids mean other text"):
        trainer_of(make_recipe(run__start_from=str(other)))


def test_keys_that_change_what_the_weights_mean_are_said(
    make_recipe: MakeRecipe, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_of(make_recipe(run__start_from=str(start), model__rope_theta=500.0, optim__lr=5e-4)).fit()
    assert "changed since the checkpoint: model.rope_theta 1000000.0 -> 500.0\n" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [False, True])
def test_master_weights_start_as_the_checkpoints_masters_or_weights_do(
    kept: bool, make_recipe: MakeRecipe, start: Path, tmp_path: Path
) -> None:
    """An optimizer makes its masters from random weights, and its first step would write them over the given ones."""
    model = trainer_of(make_recipe()).model
    masters = {name: paddle.zeros(parameter.shape) for name, parameter in model.named_tensors().items()}
    optimizer: Any = SimpleNamespace(parameters=model.parameters(), slots=lambda: {"moment1": {}, "master": masters})
    checkpoint: Any = open_checkpoint(start)
    expected = {name: checkpoint.model_tensors().array(name) for name in masters}
    if kept:  # as a bfloat16 run leaves them, with digits of their own
        expected = {name: array + np.float32(1e-3) for name, array in expected.items()}
        path = tmp_path / "masters.safetensors"
        specs = {f"{name}.master": (array.dtype, array.shape) for name, array in expected.items()}
        write_tensors(path, specs, expected.values(), {})
        kept_tensors = LogicalTensors(path, [read_tensors(path)])
        checkpoint = SimpleNamespace(
            model_tensors=checkpoint.model_tensors, optimizer_tensors=lambda: kept_tensors, path=start
        )
    load_masters(optimizer, checkpoint, Mesh())
    for name, master in masters.items():
        assert np.array_equal(master.numpy(), expected[name]), name
