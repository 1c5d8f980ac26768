"""An exported directory against its checkpoint: transformers runs the one, the numpy oracle the other."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, GenerationConfig

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    Exported,
    forward_spec,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from tests.export.stock_directories import their_model
from tests.oracles import forward
from tests.tolerances import FLOAT32, assert_close, relative_error
from vha_paddle.checkpoint import layout
from vha_paddle.config import Recipe
from vha_paddle.errors import UserError
from vha_paddle.export.fold_export import export_checkpoint, write_export
from vha_paddle.export.prepare import prepare_export
from vha_paddle.sources.own import open_own
from vha_paddle.tensor_file import read_tensors, write_tensors

PREMIX_ONLY = {key: value for key, value in SMALL_VHA.items() if key != "postmix_rank"} | {"postmix": "none"}
WIDE = SMALL_VHA | {"physical_head_dim": 12, "premix_init": "orthogonal"}
SLIDING = SMALL_HYBRID["sliding_window"]
UNTIED = {"tie_word_embeddings": False}

# Attention and other keys of the model.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied, 2 groups": (SMALL_VHA, {}),
    "untied, 3 groups": (SMALL_VHA | {"num_key_value_heads": 3}, UNTIED),
    "1 group": (SMALL_VHA | {"num_attention_heads": 3, "num_key_value_heads": 1}, {}),
    "1 physical head": (SMALL_VHA | {"num_attention_heads": 4, "num_key_value_heads": 4}, UNTIED),
    "full rank": (SMALL_VHA | {"postmix_rank": 6}, {}),
    "premix only": (PREMIX_ONLY, {}),
    "postmix only": (SMALL_VHA | {"premix": "none"}, UNTIED),
    "wide physical heads": (WIDE, {}),
    "plain": (SMALL_GROUPED, {}),
    "hybrid": (SMALL_VHA, SMALL_HYBRID),
    "hybrid, 2 sliding to 1": (SMALL_VHA, SMALL_HYBRID | UNTIED | {"sliding_window": SLIDING | {"full_every": 3}}),
    "hybrid, window of 1": (SMALL_VHA, SMALL_HYBRID | {"sliding_window": SLIDING | {"window": 1}}),
    "hybrid, sliding plain": (SMALL_VHA, SMALL_HYBRID | {"sliding_window": SLIDING | {"attention": SMALL_GROUPED}}),
    "hybrid, full plain": (SMALL_GROUPED, SMALL_HYBRID | {"sliding_window": SLIDING | {"attention": PREMIX_ONLY}}),
    "hybrid, all plain": (SMALL_GROUPED, SMALL_HYBRID),
    "mixture": (SMALL_VHA, SMALL_MIXTURE),
    "mixture, untied, top 1 of 3": (
        SMALL_VHA | {"premix": "none"},
        SMALL_MIXTURE | UNTIED | {"experts": SMALL_EXPERTS | {"num_experts": 3, "num_experts_per_tok": 1}},
    ),
    "mixture, not normalised": (PREMIX_ONLY, SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"norm_topk_prob": False}}),
    "mixture, plain": (SMALL_GROUPED, SMALL_MIXTURE),
}
TOKENS_BS = np.random.default_rng(1).integers(0, 330, (2, 11))


def their_logits(directory: Path) -> np.ndarray:
    with torch.no_grad():
        return their_model(directory)(torch.tensor(TOKENS_BS)).logits.double().numpy()


def our_logits(weights: Mapping[str, np.ndarray], recipe: Recipe) -> np.ndarray:
    in_float64 = {name: array.astype(np.float64) for name, array in weights.items()}
    return forward.logits(in_float64, TOKENS_BS, forward_spec(recipe.model))


@pytest.mark.parametrize("case", CASES)
def test_transformers_gives_the_logits_of_the_unfolded_model(case: str, tmp_path: Path) -> None:
    attention, keys = CASES[case]
    recipe = small_recipe(attention, **keys)
    weights = trained_weights(recipe)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, small_tokenizer())
    export_checkpoint(checkpoint, tmp_path / "out", "float32", plain=not recipe.model.has_maps)
    assert_close(their_logits(tmp_path / "out"), our_logits(weights, recipe), FLOAT32, case)


def test_shards_hold_the_same_model(exported: Exported, tmp_path: Path) -> None:
    export_checkpoint(exported.checkpoint, tmp_path / "out", "float32", max_shard_bytes=20_000)
    names = sorted(path.name for path in (tmp_path / "out").glob("model-*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert not (tmp_path / "out" / "model.safetensors").exists()
    np.testing.assert_array_equal(their_logits(tmp_path / "out"), their_logits(exported.directory))


@pytest.mark.parametrize("keys", [SMALL_HYBRID, SMALL_MIXTURE], ids=["hybrid", "mixture"])
def test_the_data_can_see_windows_and_experts(keys: dict[str, Any]) -> None:
    """The same weights without windows, or with experts in the reverse order, are another model."""
    recipe = small_recipe(SMALL_GROUPED, **keys)
    weights = trained_weights(recipe)
    if keys is SMALL_HYBRID:
        other, other_weights = small_recipe(SMALL_GROUPED, num_hidden_layers=4), weights
    else:
        other = recipe
        other_weights = {name: array[::-1] if ".experts." in name else array for name, array in weights.items()}
    assert relative_error(our_logits(other_weights, other), our_logits(weights, recipe)) > 0.05


def test_experts_may_be_split_over_shards(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_VHA, **SMALL_MIXTURE)
    weights = trained_weights(recipe)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, small_tokenizer())
    export_checkpoint(checkpoint, tmp_path / "out", "float32", max_shard_bytes=4_000)
    files = [read_tensors(path) for path in (tmp_path / "out").glob("model-*.safetensors")]
    experts = [file for file in files if any(".experts." in name for name in file)]
    assert len(experts) > 2 * recipe.model.num_hidden_layers
    assert_close(their_logits(tmp_path / "out"), our_logits(weights, recipe), FLOAT32, "shards")


def test_one_directory_holds_model_tokenizer_and_generation_settings(exported: Exported) -> None:
    model = their_model(exported.directory)
    tokenizer = AutoTokenizer.from_pretrained(exported.directory)
    inputs = tokenizer("The quick brown", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=4)
    assert output.shape[1] <= inputs["input_ids"].shape[1] + 4
    settings = GenerationConfig.from_pretrained(exported.directory)
    assert (settings.eos_token_id, settings.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype", "torch_dtype"),
    [("bfloat16", ml_dtypes.bfloat16, torch.bfloat16), ("float16", np.float16, torch.float16)],
)
def test_low_precision_is_the_float64_fold_rounded_once(
    exported: Exported, tmp_path: Path, dtype: Any, numpy_dtype: Any, torch_dtype: torch.dtype
) -> None:
    export_checkpoint(exported.checkpoint, tmp_path / "out", dtype)
    attention = exported.recipe.model.attention
    heads, groups, width = attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim
    prefix = "model.layers.1.self_attn."
    layer = {
        name.removeprefix(prefix): array.astype(np.float64)
        for name, array in exported.weights.items()
        if name.startswith(prefix)
    }
    query = np.hstack(
        [
            layer["q_proj.weight"][:, head * width : (head + 1) * width] @ layer["premix"][group]
            for group in range(groups)
            for head in range(heads // groups)
        ]
    )
    mix = np.kron((np.eye(heads) + layer["postmix_b"] @ layer["postmix_a"].T).T, np.eye(width))
    expected = {
        f"{prefix}q_proj.weight": query.T,
        f"{prefix}o_proj.weight": (mix @ layer["o_proj.weight"]).T,
        f"{prefix}k_proj.weight": layer["k_proj.weight"].T,
        f"{prefix}q_norm.weight": layer["q_norm.weight"],
    }
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch_dtype}  # noqa: SIM118
        for name, array in expected.items():
            np.testing.assert_allclose(
                file.get_tensor(name).double().numpy(),
                array.astype(numpy_dtype).astype(np.float64),
                rtol=1e-12,  # two float64 sums may round to neighbours only where they straddle a midpoint
                err_msg=name,
            )
    assert their_model(tmp_path / "out").dtype == torch_dtype


def test_masters_are_folded_and_rounded_once(tmp_path: Path) -> None:
    """The rounded weights lie beside them, and are wrong here."""
    recipe = small_recipe(SMALL_VHA)
    masters = trained_weights(recipe)
    rounded = {name: np.zeros(array.shape, ml_dtypes.bfloat16) for name, array in masters.items()}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, rounded, small_tokenizer())
    specs = {f"{name}.master": (array.dtype, array.shape) for name, array in masters.items()}
    write_tensors(checkpoint / layout.tensor_file("optimizer", 0, 1), specs, masters.values(), layout.TENSOR_METADATA)
    files = (path for path in checkpoint.iterdir() if path.name != layout.MANIFEST_FILE)
    layout.write_manifest(checkpoint, {path.name: layout.record_of(path) for path in files})
    report = export_checkpoint(checkpoint, tmp_path / "out", "float32")
    assert_close(their_logits(tmp_path / "out"), our_logits(masters, recipe), FLOAT32, "masters")
    assert report["left_out"]["model.norm.weight"] == "rounded from model.norm.weight.master"
    assert len(report["left_out"]) == len(masters)


def test_another_tokenizer_takes_the_place_of_the_checkpoints(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "other.model").write_bytes(small_tokenizer(300))
    source = open_own(exported.checkpoint, with_digests=False)
    export = prepare_export(source, "float32", tokenizer=tmp_path / "other.model")
    write_export(export, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == small_tokenizer(300)
    assert export.source.tokenizer == tmp_path / "other.model"


def test_a_checkpoint_without_tokenizer_is_exported_without_one(exported: Exported, tmp_path: Path) -> None:
    source = replace(open_own(exported.checkpoint, with_digests=False), tokenizer=None, warnings=("an assumption",))
    report = write_export(prepare_export(source, "float32"), tmp_path / "out")
    assert report["warnings"][0] == "an assumption" and "--tokenizer PATH" in report["warnings"][1]
    assert not list((tmp_path / "out").glob("tokenizer*"))
    assert their_model(tmp_path / "out").config.eos_token_id is None
    np.testing.assert_array_equal(their_logits(tmp_path / "out"), their_logits(exported.directory))


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_VHA)
    weights = trained_weights(recipe)
    weights["model.norm.weight"][3] = 7e4
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, small_tokenizer())
    with pytest.raises(UserError, match=r"model\.norm\.weight exceeds the range of float16; choose bfloat16"):
        export_checkpoint(checkpoint, tmp_path / "out", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(("value", "fault"), [(np.nan, "not finite"), (7e4, "exceeds the range of float16")])
def test_plain_weights_are_checked_like_folded_ones(tmp_path: Path, value: float, fault: str) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    weights = trained_weights(recipe)
    weights["model.norm.weight"][3] = value
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, small_tokenizer())
    with pytest.raises(UserError, match=rf"model\.norm\.weight.*{fault}"):
        export_checkpoint(checkpoint, tmp_path / "out", "float16", plain=True)


def test_the_newest_checkpoint_of_a_run_is_taken(exported: Exported, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(exported.checkpoint, run / "checkpoints" / "step-00000007")
    write_checkpoint(run / "checkpoints" / "step-00000009", exported.recipe, exported.weights, small_tokenizer())
    assert export_checkpoint(run, tmp_path / "out", "float32")["source"]["checkpoint"] == "step-00000009"


def test_the_same_checkpoint_gives_the_same_bytes(exported: Exported, tmp_path: Path) -> None:
    export_checkpoint(exported.checkpoint, tmp_path / "out", "float32")
    first = {path.name: path.read_bytes() for path in exported.directory.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first


def test_the_report_says_where_the_model_came_from(exported: Exported) -> None:
    report = exported.report
    assert report["source"] == {
        "run": "small",
        "checkpoint": "step-00000007",
        "step": 7,
        "tokens": 1792,
        "samples": 56,
        "seed": 3,
        "sequence_length": 32,
        "vha_paddle": "0.0.9",
        "manifest_sha256": layout.sha256_of(exported.checkpoint / layout.MANIFEST_FILE),
        "attention": "vha",
        "parameters": sum(array.size for array in exported.weights.values()),
    }
    assert report["kind"] == "vha_paddle checkpoint" and report["warnings"] == [] and report["left_out"] == {}
    assert (report["architecture"], report["fold"]) == ("Qwen3ForCausalLM", "all")
    manifest = layout.read_manifest(exported.checkpoint)
    unused = layout.tensor_file("optimizer", 0, 1)
    assert report["source_files"] == {name: file.sha256 for name, file in manifest.items() if name != unused}
    tensors = read_tensors(exported.directory / "model.safetensors")
    assert report["tensors"] == len(tensors.entries)
    assert report["parameters"] * 4 == report["bytes"] == sum(e.num_bytes for e in tensors.entries.values())
    assert report["folded"]["model.layers.0.self_attn.o_proj.weight"] == [
        f"model.layers.0.self_attn.{name}" for name in ("o_proj.weight", "postmix_a", "postmix_b")
    ]
    for name, entry in report["files"].items():
        assert layout.sha256_of(exported.directory / name) == entry["sha256"]
    on_disk = {path.name for path in exported.directory.iterdir()}
    assert on_disk == set(report["files"]) | {"README.md", "fold_report.json"}
