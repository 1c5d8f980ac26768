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
    SMALL_EXPERTS,
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
from vha_paddle.evaluate import load_model, model_logits, sequence_means, validation_loss, verify_export
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.reader import read_hf_model
from vha_paddle.parallel.mesh import Mesh

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", [{}, SMALL_HYBRID, SMALL_MIXTURE], ids=["dense", "hybrid", "mixture"])
def test_an_export_verifies_in_every_dtype(model: dict[str, Any], dtype: ExportDtype, tmp_path: Path) -> None:
    made = make(tmp_path, SMALL_VHA, dtype, **model)
    result = verify_export(made.checkpoint, made.directory)
    assert result.passed, result.figures()
    assert (result.expert_agreement is None) == (model is not SMALL_MIXTURE)


def test_a_lost_postmix_that_has_learned_little_does_not_verify_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it moves is far below the rounding of the files, so it must be seen before they are rounded."""
    recipe = small_recipe(SMALL_VHA)
    weights = trained_weights(recipe)
    for name in [name for name in weights if name.endswith("postmix_b")]:
        weights[name] *= np.float32(1e-3)
    path = tmp_path / "run" / "checkpoints" / "step-00000007"
    checkpoint = write_checkpoint(path, recipe, weights, small_tokenizer())
    export_checkpoint(checkpoint, tmp_path / "right", "bfloat16")
    assert verify_export(checkpoint, tmp_path / "right").passed
    monkeypatch.setattr("vha_paddle.fold.postmix_matrix", lambda a, b: np.eye(len(a)))
    export_checkpoint(checkpoint, tmp_path / "wrong", "bfloat16")
    result = verify_export(checkpoint, tmp_path / "wrong")
    assert result.relative <= result.bound and not result.passed
    assert "before rounding, logits differ" in str(result.fault)


@pytest.mark.parametrize(("factor", "passed"), [(1 + 2.0**-10, True), (1 + 2.0**-6, False)])
def test_a_weight_that_is_not_the_fold_rounded_does_not_verify(factor: float, passed: bool, tmp_path: Path) -> None:
    made = make(tmp_path, SMALL_VHA, "bfloat16")
    name = "model.layers.0.self_attn.o_proj.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        changed = tensors[name].astype(np.float32)
        changed[3, 2] *= factor
        tensors[name] = changed.astype(tensors[name].dtype)

    _edit_weights(made.directory, change)
    result = verify_export(made.checkpoint, made.directory)
    assert result.relative <= result.bound
    assert result.passed == passed, result.figures()


def _reversed_experts(tensors: dict[str, np.ndarray]) -> None:
    last = SMALL_MIXTURE["experts"]["num_experts"] - 1
    for name in [name for name in tensors if ".experts.0." in name]:
        other = name.replace(".experts.0.", f".experts.{last}.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def _exchanged_gate_and_up(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if ".experts." in name and "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def _reversed_router(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name] = tensors[name][::-1].copy()


@pytest.mark.parametrize("fault", [_reversed_experts, _exchanged_gate_and_up, _reversed_router])
def test_experts_in_a_wrong_place_do_not_verify(fault: Callable[..., None], mixture: Exported, tmp_path: Path) -> None:
    directory = shutil.copytree(mixture.directory, tmp_path / "wrong")
    _edit_weights(directory, fault)
    result = verify_export(mixture.checkpoint, directory)
    assert result.relative > 0.1, result.figures()


def test_a_router_whose_experts_count_alike_is_verified_by_its_choices(tmp_path: Path) -> None:
    """The one chosen expert counts 1, whatever its probability."""
    top_1 = SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"num_experts_per_tok": 1}}
    made = make(tmp_path, SMALL_VHA, **top_1)
    _edit_weights(made.directory, _reversed_router)
    result = verify_export(made.checkpoint, made.directory)
    assert result.relative <= result.bound and not result.passed
    assert "the routers choose" in str(result.fault)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 6},
        {"sliding_window": 4},
        {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"use_sliding_window": False},
    ],
    ids=str,
)
def test_windows_in_a_wrong_place_do_not_verify(change: dict[str, Any], hybrid: Exported, tmp_path: Path) -> None:
    directory = shutil.copytree(hybrid.directory, tmp_path / "wrong")
    _edit_config(directory, **change)
    result = verify_export(hybrid.checkpoint, directory)
    assert result.relative > 0.1, result.figures()


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
        lambda directory: _edit_config(directory, model_type="llama"),
        "config.json: model_type=llama: only qwen3",
    ),
    "a key left out": (
        lambda directory: _edit_config(directory, rope_theta=None),
        "config.json: rope_theta is missing",
    ),
    "a size of the wrong type": (
        lambda directory: _edit_config(directory, hidden_size="20"),
        "config.json: not a Qwen3 configuration .*hidden_size",
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
        "model.safetensors: cannot be read",
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
        lambda directory: _edit_config(directory, num_hidden_layers=1),
        "unexpected model.layers.1.input_layernorm.weight",
    ),
    "sizes of another model": (
        lambda directory: _edit_config(directory, intermediate_size=29),
        r"mlp.\w+_proj.weight has shape .*28.*, the described model needs .*29",
    ),
    "a shard outside the directory": (_name_a_shard_outside, "weight_map must name files of this directory"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_export_is_refused_by_name(
    damage: Callable[[Path], Any], message: str, vha: Exported, tmp_path: Path
) -> None:
    directory = shutil.copytree(vha.directory, tmp_path / "damaged")
    damage(directory)
    with pytest.raises(UserError, match=message):
        load_model(directory)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("vha", {"rope_scaling": {"rope_type": "yarn"}}, 'rope_scaling={"rope_type": "yarn"}: only null'),
        ("vha", {"attention_bias": True}, "attention_bias=true: only false"),
        ("hybrid", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types: only one full layer"),
        ("hybrid", {"layer_types": ["sliding_attention"] * 4}, "layer_types: only one full layer"),
        ("hybrid", {"layer_types": ["sliding_attention", *["full_attention"] * 3]}, "layer_types: only one full layer"),
        ("hybrid", {"layer_types": 5}, "config.json: not a Qwen3 configuration"),
        ("mixture", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]: only \[\]"),
        ("mixture", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: only 1"),
        ("mixture", {"use_sliding_window": True}, "use_sliding_window=true: only false"),
        ("mixture", {"num_experts": 4}, r"unexpected model.layers.0.mlp.experts.4.gate_proj.weight"),
    ],
    ids=str,
)
def test_a_configuration_beyond_this_architecture_is_refused(
    case: str, change: dict[str, Any], message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory = shutil.copytree(request.getfixturevalue(case).directory, tmp_path / "changed")
    _edit_config(directory, **change)
    with pytest.raises(UserError, match=message):
        load_model(directory)


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a checkpoint .* nor a run"):
        load_model(tmp_path)


def test_a_checkpoint_with_a_changed_byte_is_refused(vha: Exported, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(vha.checkpoint, tmp_path / "checkpoint")
    file = checkpoint / tensor_file("model", 0, 1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file.name}: differs from the manifest"):
        load_model(checkpoint)
