"""The comparison of an export with its checkpoint: figures against whole models, and that right ones pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    forward_spec,
)
from tests.oracles import forward
from tests.proof.exports import make
from tests.tolerances import FLOAT32
from vha_paddle.errors import RunError
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.verify import BOUNDS
from vha_paddle.proof import layers
from vha_paddle.proof.prove import prove_export
from vha_paddle.proof.tokens import tokens_to_compare

UNTIED = {"tie_word_embeddings": False}
DTYPES: tuple[ExportDtype, ...] = ("float32", "bfloat16", "float16", "fp8")
MLA = {
    "kind": "mla",
    "num_attention_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LATENT = {"rms_norm_eps": 1e-6}
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LATENT_EXPERTS = SMALL_EXPERTS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 24}
STOCK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "folded": (SMALL_VHA, {}),
    "folded, untied": (SMALL_VHA, UNTIED),
    "folded, biases": (SMALL_VHA | {"attention_bias": True}, {}),
    "folded hybrid": (SMALL_VHA, SMALL_HYBRID),
    "folded mixture": (SMALL_VHA, SMALL_MIXTURE),
    "top 1, not normalised": (
        SMALL_VHA,
        SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": False}},
    ),
    "narrow physical heads": (SMALL_VHA | {"physical_head_dim": 6, "premix_init": "orthogonal"}, {}),
    "Postmix only": (SMALL_VHA | {"premix": "none"}, {}),
    "plain": (SMALL_GROUPED, {}),
    "plain, without QK-norm": (SMALL_GROUPED | {"num_attention_heads": 4, "qk_norm": False}, UNTIED),
    "mla, tied": (MLA, LATENT),
    "mla, query latent": (MLA | {"q_lora_rank": 10}, LATENT | UNTIED),
    "mla mixture": (MLA, LATENT | SMALL_MIXTURE | {"experts": LATENT_EXPERTS}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("attention", "model"), STOCK.values(), ids=STOCK)
def test_a_right_export_passes(
    attention: dict[str, Any], model: dict[str, Any], dtype: ExportDtype, tmp_path: Path
) -> None:
    made = make(tmp_path, attention, dtype, **model)
    found = prove_export(made.source, made.directory)
    assert found.passed, found.fault
    folded = made.recipe.model.has_maps
    assert (found.fold is not None) == (found.attention.fold is not None) == folded
    assert (found.cast is not None) == (dtype != "float32")
    assert (found.expert_agreement is None) == (made.recipe.model.experts is None)
    assert found.checkpoint_loss is not None and found.text == "built in"
    assert 2 * found.num_text_tokens == found.num_tokens
    assert found.storage == found.export if not folded else True
    if found.cast is not None:  # what is paid for the dtype is paid folded or not
        assert 0.1 < found.export.relative / found.cast.relative < 10
    json.dumps(found.figures(), allow_nan=False)


OURS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unfolded": (SMALL_VHA, {}, "none"),
    "unfolded hybrid": (SMALL_VHA, SMALL_HYBRID, "none"),
    "unfolded, SiLU": (SMALL_VHA | {"premix": "silu", "postmix": "silu"}, {}, "none"),
    "gate after Postmix": (SMALL_VHA | {"output_gate": "after_postmix"}, {}, "partial"),
    "gate before Postmix": (SMALL_VHA | {"output_gate": "before_postmix"}, SMALL_MIXTURE, "partial"),
    "SiLU in Premix": (SMALL_VHA | {"premix": "silu"}, UNTIED, "partial"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("attention", "model", "fold"), OURS.values(), ids=OURS)
def test_a_right_directory_of_our_own_class_passes(
    attention: dict[str, Any], model: dict[str, Any], fold: Any, dtype: ExportDtype, tmp_path: Path
) -> None:
    made = make(tmp_path, attention, dtype, fold, **model)
    found = prove_export(made.source, made.directory)
    assert found.passed, found.fault
    assert (found.fold is not None) == (fold == "partial")


def reference_logits(made: Any, tokens_BS: np.ndarray) -> np.ndarray:
    weights = {name: array.astype(np.float64) for name, array in made.weights.items()}
    return forward.logits(weights, tokens_BS, forward_spec(made.recipe.model))


def logits_of_transformers(directory: Path, tokens_BS: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens_BS)).logits.numpy().astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("at_once", [3, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["folded", "folded, untied", "folded hybrid"])
def test_the_figures_are_those_of_the_oracle_and_of_transformers(
    case: str, dtype: ExportDtype, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's logits by an oracle in float64, the export's by transformers on the finished files."""
    monkeypatch.setattr("vha_paddle.proof.head._TOKENS_AT_ONCE", 100)
    monkeypatch.setattr(layers, "_TOKENS_AT_ONCE", at_once)
    attention, model = STOCK[case]
    made = make(tmp_path, attention, dtype, **model)
    found = prove_export(made.source, made.directory, num_tokens=90)
    tokens = tokens_to_compare(made.source.model, made.source.tokenizer, None, 90)
    expected, actual = (
        reference_logits(made, tokens.tokens_BS),
        logits_of_transformers(made.directory, tokens.tokens_BS),
    )
    scale = np.abs(expected).max()
    slack = FLOAT32 * scale  # of a logit
    assert found.scale == pytest.approx(scale, rel=FLOAT32)
    assert abs(found.export.max_abs - np.abs(expected - actual).max()) < slack
    assert abs(found.export.mean_abs - np.abs(expected - actual).mean()) < slack
    assert found.export.top1_agreement == (expected.argmax(-1) == actual.argmax(-1)).mean()
    log_p, log_q = log_softmax(expected), log_softmax(actual)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    # round-off of one model's logits moves KL by sqrt(2 KL) times as much
    for figure, value in ((found.export.kl_mean, kl.mean()), (found.export.kl_max, kl.max())):
        assert abs(figure - value) < 2 * slack * np.sqrt(2 * kl.max()) + slack**2
    if found.cast is not None:
        cast = {name: array.astype(NUMPY[dtype]).astype(np.float64) for name, array in made.weights.items()}
        rounded = forward.logits(cast, tokens.tokens_BS, forward_spec(made.recipe.model))
        assert abs(found.cast.max_abs - np.abs(expected - rounded).max()) < slack
        assert abs(found.cast.mean_abs - np.abs(expected - rounded).mean()) < slack
    labels_BS = tokens.labels_BS(-1)
    text = labels_BS >= 0
    for figure, log in ((found.checkpoint_loss, log_p), (found.export_loss, log_q)):
        loss = -np.take_along_axis(log, np.maximum(labels_BS, 0)[..., None], -1)[..., 0][text].mean()
        assert figure == pytest.approx(loss, abs=2 * slack)


@pytest.mark.parametrize("case", ["folded", "folded mixture"])
def test_parts_add_up_and_the_fold_itself_is_exact(case: str, tmp_path: Path) -> None:
    attention, model = STOCK[case]
    made = make(tmp_path, attention, "bfloat16", **model)
    found = prove_export(made.source, made.directory)
    assert found.fold is not None and found.attention.fold is not None
    assert 0 < found.fold.relative < BOUNDS["float32"] < found.storage.relative
    assert abs(found.export.max_abs - found.storage.max_abs) <= found.fold.max_abs * 1.01
    assert max(found.attention.fold) < 1e-13 and min(found.attention.export) > 1e-4
    assert len(found.attention.export) == made.recipe.model.num_hidden_layers


def test_float32_files_hold_the_fold_itself(tmp_path: Path) -> None:
    made = make(tmp_path, SMALL_VHA)
    found = prove_export(made.source, made.directory)
    assert found.storage.max_abs == 0 and found.largest_rounding <= 1


def test_a_plain_float32_export_is_the_checkpoint(tmp_path: Path) -> None:
    made = make(tmp_path, SMALL_GROUPED)
    found = prove_export(made.source, made.directory)
    assert found.export.max_abs == found.largest_rounding == 0 and found.export.top1_agreement == 1


def test_a_given_text_is_what_is_compared_on(tmp_path: Path) -> None:
    made = make(tmp_path, SMALL_VHA)
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    found = prove_export(made.source, made.directory, text=tmp_path / "text", num_tokens=40)
    assert (found.num_tokens, found.num_text_tokens, found.text) == (40, 40, str(tmp_path / "text"))
    other = prove_export(made.source, made.directory, num_tokens=40)
    assert found.checkpoint_loss != other.checkpoint_loss


def test_progress_is_told_by_layer(tmp_path: Path) -> None:
    made, told = make(tmp_path, SMALL_VHA), []
    prove_export(made.source, made.directory, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


def test_the_export_of_another_model_is_an_error(tmp_path: Path) -> None:
    made, other = make(tmp_path / "a", SMALL_VHA), make(tmp_path / "b", SMALL_VHA, intermediate_size=32)
    with pytest.raises(RunError, match="holds other tensors than the checkpoint's model has"):
        prove_export(made.source, other.directory)


def test_the_export_of_another_checkpoint_does_not_pass(tmp_path: Path) -> None:
    def other_weights(weights: dict[str, np.ndarray]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3] *= 1.5

    made, other = make(tmp_path / "a", SMALL_VHA), make(tmp_path / "b", SMALL_VHA, change=other_weights)
    fault = prove_export(made.source, other.directory).fault
    assert fault is not None and "model.layers.1.mlp.up_proj.weight" in fault


@pytest.mark.parametrize("model", [{}, SMALL_MIXTURE], ids=["dense", "mixture"])
def test_fp8_in_several_blocks_passes(model: dict[str, Any], tmp_path: Path) -> None:
    attention = SMALL_VHA | {"head_dim": 64}
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    if model:
        sizes = {"hidden_size": 256, **SMALL_MIXTURE, "experts": SMALL_EXPERTS | {"moe_intermediate_size": 128}}
    found = prove_export((made := make(tmp_path, attention, "fp8", **sizes)).source, made.directory)
    assert found.passed, found.fault
    assert 0.99 < found.largest_rounding and found.cast is not None
    assert 2.0**-6 < found.cast.relative, "something was stored in FP8"


def test_fp8_blocks_are_those_of_the_files_where_channels_have_another_order_there(tmp_path: Path) -> None:
    """Heads of 192 channels, whose rotary parts interleave across the blocks of 128."""
    widths = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 128, "v_head_dim": 64}
    made = make(tmp_path, MLA | widths, "fp8", hidden_size=256, intermediate_size=256, **LATENT)
    found = prove_export(made.source, made.directory)
    assert found.passed and 0.99 < found.largest_rounding, found.fault
