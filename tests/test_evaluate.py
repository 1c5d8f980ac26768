"""Models read back from disk: their loss against transformers and the oracle, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import (
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    Exported,
    forward_spec,
    oracle_spec,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from tests.oracles import forward
from tests.oracles.decoder import decoder_loss_and_gradients
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from vha_paddle.checkpoint.layout import tensor_file
from vha_paddle.counts import folded
from vha_paddle.data.indexed import IndexedTokens, write_indexed
from vha_paddle.data.loader import ValidationWindows
from vha_paddle.errors import UserError
from vha_paddle.evaluate import (
    load_model,
    model_logits,
    sequence_lengths,
    sequence_means,
    tokenizer_digest,
    validation_loss,
)
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.fold_export import export_checkpoint, write_export
from vha_paddle.export.prepare import Fold, prepare_export
from vha_paddle.export.verify import BOUNDS
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.sources.hf_config import read_hf_model
from vha_paddle.sources.own import open_own

VOCABULARY = 330  # of `small_recipe`


def make(folder: Path, attention: dict[str, Any], dtype: ExportDtype = "float32", **model: Any) -> Exported:
    """A checkpoint in a run directory, and its export."""
    recipe = small_recipe(attention, **model)
    weights = trained_weights(recipe)
    path = folder / "run" / "checkpoints" / "step-00000007"
    checkpoint = write_checkpoint(path, recipe, weights, small_tokenizer())
    report = export_checkpoint(checkpoint, folder / "out", dtype, plain=not recipe.model.has_maps)
    return Exported(recipe, weights, checkpoint, folder / "out", report)


@pytest.fixture(scope="module")
def vha(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(tmp_path_factory.mktemp("vha"), SMALL_VHA)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(tmp_path_factory.mktemp("hybrid"), SMALL_VHA, **SMALL_HYBRID)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(tmp_path_factory.mktemp("mixture"), SMALL_VHA, **SMALL_MIXTURE)


def random_tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, shape)


def our_loss(directory: Path, tokens_BS: np.ndarray) -> np.ndarray:
    loss = sequence_means(load_model(directory), [(tokens_BS[:, :-1], tokens_BS[:, 1:])]).mean()
    return np.array(loss)


def loss_of_transformers(directory: Path, tokens_BS: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32)
    tokens = torch.tensor(tokens_BS)
    with torch.no_grad():
        return model(input_ids=tokens, labels=tokens).loss.numpy()


@pytest.mark.parametrize(
    ("attention", "model"),
    [
        (SMALL_VHA, {}),
        (SMALL_GROUPED | {"num_key_value_heads": 6}, {}),
        (SMALL_GROUPED, {}),
        (SMALL_GROUPED | {"num_key_value_heads": 1}, {}),
        (SMALL_VHA, SMALL_HYBRID),
        (SMALL_VHA, SMALL_MIXTURE),
    ],
    ids=["folded VHA", "MHA", "GQA", "MQA", "hybrid", "mixture"],
)
def test_the_loss_of_an_exported_directory_equals_that_of_transformers(
    attention: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    directory, tokens_BS = make(tmp_path, attention, **model).directory, random_tokens(3, 18)
    assert_close(our_loss(directory, tokens_BS), loss_of_transformers(directory, tokens_BS), FLOAT32, "loss")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_export_is_evaluated_in_float32(dtype: ExportDtype, tmp_path: Path) -> None:
    directory, tokens_BS = make(tmp_path, SMALL_VHA, dtype).directory, random_tokens(3, 18)
    assert_close(our_loss(directory, tokens_BS), loss_of_transformers(directory, tokens_BS), FLOAT32, "loss")


@pytest.mark.parametrize("case", ["vha", "hybrid", "mixture"])
def test_logits_of_a_checkpoint_and_of_its_export_equal_the_oracle(case: str, request: pytest.FixtureRequest) -> None:
    made, tokens_BS = request.getfixturevalue(case), random_tokens(2, 11)
    weights = {name: array.astype(np.float64) for name, array in made.weights.items()}
    expected = forward.logits(weights, tokens_BS, forward_spec(made.recipe.model))
    assert_close(model_logits(made.checkpoint)(tokens_BS), expected, FLOAT32, "checkpoint")
    assert_close(model_logits(made.directory)(tokens_BS), expected, FLOAT32, "export")


@pytest.mark.parametrize("case", ["vha", "hybrid", "mixture"])
def test_the_model_of_an_export_is_the_folded_one(case: str, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(case)
    assert read_hf_model(made.directory) == folded(made.recipe.model)


MLA = {"kind": "mla", "num_attention_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
OTHER_FORMS: dict[str, tuple[dict[str, Any], ExportDtype, Fold, dict[str, Any], float]] = {
    "unfolded": (SMALL_VHA, "float32", "none", {}, FLOAT32),
    "folded in part": (SMALL_VHA | {"output_gate": "after_postmix"}, "float32", "partial", SMALL_HYBRID, FLOAT32),
    "MLA": (MLA | {"v_head_dim": 6}, "float32", "all", {"rms_norm_eps": 1e-6}, FLOAT32),
    "FP8": (SMALL_VHA, "fp8", "all", {}, BOUNDS["fp8"]),
}


@pytest.mark.parametrize(("attention", "dtype", "fold", "model", "bound"), OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_every_form_of_an_export_is_evaluated_as_its_checkpoint(
    attention: dict[str, Any], dtype: ExportDtype, fold: Fold, model: dict[str, Any], bound: float, tmp_path: Path
) -> None:
    recipe = small_recipe(attention, **model)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    plain = fold == "all" and not recipe.model.has_maps
    write_export(prepare_export(open_own(checkpoint), dtype, fold=fold, plain=plain), tmp_path / "out")
    tokens_BS = random_tokens(2, 11)
    found = model_logits(tmp_path / "out")(tokens_BS)
    assert_close(found, model_logits(checkpoint)(tokens_BS), bound, "logits")
    assert sequence_lengths(tmp_path / "out") == sequence_lengths(checkpoint) == (32, 64)
    assert tokenizer_digest(tmp_path / "out") == tokenizer_digest(checkpoint)


def test_a_stock_directory_without_our_report_is_read_too(vha: Exported, tmp_path: Path) -> None:
    directory = shutil.copytree(vha.directory, tmp_path / "released")
    (directory / "fold_report.json").unlink()
    tokens_BS = random_tokens(1, 7)
    assert np.array_equal(model_logits(directory)(tokens_BS), model_logits(vha.directory)(tokens_BS))
    assert sequence_lengths(directory) == (None, 64)


def test_a_run_directory_stands_for_its_newest_checkpoint(vha: Exported, tmp_path: Path) -> None:
    run = shutil.copytree(vha.checkpoint.parents[1], tmp_path / "run")
    older = trained_weights(vha.recipe, seed=9)
    write_checkpoint(run / "checkpoints" / "step-00000003", vha.recipe, older, small_tokenizer())
    tokens_BS = random_tokens(1, 5)
    newest = model_logits(vha.checkpoint)(tokens_BS)
    assert np.array_equal(model_logits(run)(tokens_BS), newest)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
def test_the_validation_loss_is_the_mean_over_all_tokens_of_the_windows(
    batch_size: int, vha: Exported, tmp_path: Path
) -> None:
    stream = random_tokens(5 * 12 + 1)
    write_indexed(tmp_path / "data", [stream], VOCABULARY, eod_id=None, tokenizer_sha256=None, source="test")
    windows = ValidationWindows(IndexedTokens(tmp_path / "data"), 12)
    found = validation_loss(load_model(vha.checkpoint), windows, num_sequences=9, batch_size=batch_size, mesh=Mesh())
    weights = {name: array.astype(np.float64) for name, array in vha.weights.items()}
    tokens_BS, labels_BS = stream[:-1].reshape(5, 12), stream[1:].reshape(5, 12)
    expected, _, _ = decoder_loss_and_gradients(weights, tokens_BS, labels_BS, oracle_spec(vha.recipe))
    assert_close(np.array(found), np.array(expected), FLOAT32, "loss")


def test_no_more_windows_than_asked_for_are_used(vha: Exported, tmp_path: Path) -> None:
    stream = random_tokens(4 * 6 + 1)
    write_indexed(tmp_path / "data", [stream], VOCABULARY, eod_id=None, tokenizer_sha256=None, source="test")
    windows = ValidationWindows(IndexedTokens(tmp_path / "data"), 6)
    model = load_model(vha.checkpoint)
    first_two = sequence_means(model, [windows.samples(0, 2)]).mean()
    two = validation_loss(model, windows, num_sequences=2, batch_size=2, mesh=Mesh())
    assert two == pytest.approx(first_two, rel=FLOAT64)


def _edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def _edit_weights(directory: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _name_a_shard_outside(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


# What is done to an exported directory, and what the refusal must name.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another architecture": (
        lambda directory: _edit_config(directory, model_type="qwen2"),
        'config.json: model_type="qwen2": must be one of qwen3',
    ),
    "a key left out": (
        lambda directory: _edit_config(directory, vocab_size=None),
        "config.json: vocab_size is missing",
    ),
    "a size of the wrong type": (
        lambda directory: _edit_config(directory, hidden_size="20"),
        'config.json: hidden_size="20": Input should be',
    ),
    "a configuration that is no JSON": (
        lambda directory: (directory / "config.json").write_text("{"),
        "config.json: cannot be read",
    ),
    "a configuration that is no object": (
        lambda directory: (directory / "config.json").write_text("[]"),
        "config.json: must hold a JSON object",
    ),
    "no weights": (
        lambda directory: (directory / "model.safetensors").unlink(),
        "has no .safetensors file",
    ),
    "half-copied weights": (
        lambda directory: _truncate(directory / "model.safetensors"),
        "model.safetensors: .*the file is damaged",
    ),
    "a tensor left out": (
        lambda directory: _edit_weights(directory, lambda tensors: tensors.pop("model.norm.weight")),
        "missing model.norm.weight",
    ),
    "a tensor too many": (
        lambda directory: _edit_config(directory, num_hidden_layers=1, layer_types=None),
        "unexpected model.layers.1.input_layernorm.weight",
    ),
    "sizes of another model": (
        lambda directory: _edit_config(directory, intermediate_size=29),
        r"mlp.\w+_proj.weight has shape .*28.*, the described model needs .*29",
    ),
    "a shard outside the directory": (_name_a_shard_outside, "has no weight_map of tensors to files"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_export_is_refused_by_name(
    damage: Callable[[Path], Any], message: str, vha: Exported, tmp_path: Path
) -> None:
    directory = shutil.copytree(vha.directory, tmp_path / "damaged")
    damage(directory)
    with pytest.raises(UserError, match=message):
        load_model(directory)


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint: "):
        load_model(tmp_path)


def test_a_checkpoint_with_a_changed_byte_is_refused(vha: Exported, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(vha.checkpoint, tmp_path / "checkpoint")
    file = checkpoint / tensor_file("model", 0, 1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file.name}: differs from the manifest"):
        load_model(checkpoint)
