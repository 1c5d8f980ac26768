"""Directories of our own class: read back as they were written, folded to the same bits, and refused by others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    forward_spec,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from tests.oracles import forward
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.config import Recipe
from vha_paddle.counts import folded
from vha_paddle.errors import UserError
from vha_paddle.evaluate import model_logits
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.fold_export import write_export
from vha_paddle.export.prepare import Fold, prepare_export
from vha_paddle.generate.model import TextModel
from vha_paddle.map_report.read import read_report
from vha_paddle.sources.open import open_source
from vha_paddle.sources.own import open_own
from vha_paddle.sources.unfolded import UnfoldedWeights, is_unfolded, open_unfolded

GATED = SMALL_VHA | {"output_gate": "after_postmix"}
GATED_BEFORE = SMALL_VHA | {"output_gate": "before_postmix"}
POSTMIX_ONLY = SMALL_VHA | {"premix": "none"}
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "mla": {"kind": "mla", "num_attention_heads": 2, "kv_lora_rank": 6, "q_lora_rank": 5, "qk_rope_head_dim": 4},
    "mfa": {"kind": "mfa", "num_attention_heads": 2, "head_dim": 8, "q_lora_rank": 6},
    "gva": {"kind": "gva", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "qk_rope_head_dim": 4},
    "dcmha": {"kind": "dcmha", "num_attention_heads": 4, "head_dim": 8, "num_groups": 2},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vha": (SMALL_VHA, {}),
    "vha, untied, biases": (SMALL_VHA | {"attention_bias": True}, {"tie_word_embeddings": False}),
    "without QK-norm": (SMALL_VHA | {"qk_norm": False}, {}),
    "wide physical heads": (SMALL_VHA | {"physical_head_dim": 12, "premix_init": "orthogonal"}, {}),
    "gate after postmix": (GATED, {}),
    "hybrid": (SMALL_VHA, SMALL_HYBRID),
    "mixture": (SMALL_VHA, SMALL_MIXTURE),
    "shared expert": (SMALL_VHA, SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"shared_expert_intermediate_size": 8}}),
    "silu": (SMALL_VHA | {"premix": "silu", "postmix": "silu"}, {}),
} | {kind: (attention, {}) for kind, attention in OTHER_KINDS.items()}
TOKENS_BS = np.random.default_rng(1).integers(0, 330, (2, 11))


def checkpoint_of(folder: Path, recipe: Recipe, weights: dict[str, np.ndarray]) -> Path:
    return write_checkpoint(folder / "checkpoint", recipe, weights, small_tokenizer())


def export(path: Path, out: Path, fold: Fold, dtype: ExportDtype = "float32", plain: bool = False) -> dict[str, Any]:
    return write_export(prepare_export(open_source(path), dtype, fold=fold, plain=plain), out)


def weights_in(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_what_was_written_is_read_back(case: str, tmp_path: Path) -> None:
    attention, keys = CASES[case]
    recipe = small_recipe(attention, **keys)
    weights = trained_weights(recipe)
    export(checkpoint_of(tmp_path, recipe, weights), tmp_path / "out", "none")
    source = open_source(tmp_path / "out")
    assert source.model == recipe.model and source.recipe is None
    assert list(source.weights.specs) == list(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(source.weights.read(name), array, err_msg=name)


@pytest.mark.parametrize("case", ["vha", "vha, untied, biases", "wide physical heads", "hybrid", "mixture"])
def test_a_fold_by_way_of_an_unfolded_directory_has_the_same_bits(case: str, tmp_path: Path) -> None:
    attention, keys = CASES[case]
    recipe = small_recipe(attention, **keys)
    checkpoint = checkpoint_of(tmp_path, recipe, trained_weights(recipe))
    export(checkpoint, tmp_path / "unfolded", "none")
    for dtype in ("float32", "bfloat16"):
        export(checkpoint, tmp_path / f"direct-{dtype}", "all", dtype)
        export(tmp_path / "unfolded", tmp_path / f"by-way-{dtype}", "all", dtype)
        assert weights_in(tmp_path / f"by-way-{dtype}") == weights_in(tmp_path / f"direct-{dtype}")


@pytest.mark.parametrize(
    ("attention", "left"),
    [
        (GATED, {"postmix_a", "postmix_b"}),
        (GATED_BEFORE, set()),
        (SMALL_VHA | {"postmix": "silu"}, {"postmix_a", "postmix_b"}),
        (SMALL_VHA | {"premix": "silu"}, {"premix"}),
    ],
    ids=["gate after", "gate before", "silu in postmix", "silu in premix"],
)
def test_a_partial_fold_folds_what_folds_and_says_so(attention: dict[str, Any], left: set[str], tmp_path: Path) -> None:
    recipe = small_recipe(attention)
    weights = trained_weights(recipe)
    checkpoint = checkpoint_of(tmp_path, recipe, weights)
    report = export(checkpoint, tmp_path / "out", "partial")
    source = open_source(tmp_path / "out")
    maps = {"premix", "postmix_a", "postmix_b"}
    assert {name.rpartition(".")[2] for name in source.weights.specs} & maps == left
    assert source.provenance["fold"] == "partial" and report["fold"] == "partial"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["fold"] == "partial"
    assert "NO stock model" in (tmp_path / "out" / "README.md").read_text()
    # our decoder gives the same logits for what was trained, and the oracle where it knows the variant
    expected = model_logits(checkpoint)(TOKENS_BS)
    assert_close(model_logits(tmp_path / "out")(TOKENS_BS), expected, FLOAT32, "logits")
    if "silu" not in attention.values():
        exact = {name: array.astype(np.float64) for name, array in weights.items()}
        oracle = forward.logits(exact, TOKENS_BS, forward_spec(recipe.model))
        assert_close(model_logits(tmp_path / "out")(TOKENS_BS), oracle, FLOAT32, "logits")


def test_without_the_flag_what_does_not_fold_is_refused(tmp_path: Path) -> None:
    recipe = small_recipe(GATED)
    checkpoint = checkpoint_of(tmp_path, recipe, trained_weights(recipe))
    with pytest.raises(
        UserError,
        match=r"after_postmix: no stock Qwen3 has a gate.*--allow-partial.*measured on these weights.* by 0\.\d+",
    ):
        export(checkpoint, tmp_path / "out", "all")


@pytest.fixture(scope="module", params=[SMALL_VHA, POSTMIX_ONLY], ids=["both maps", "postmix only"])
def unfolded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfolded directory; of Postmix alone all other tensors have the shapes of a stock model."""
    folder = tmp_path_factory.mktemp("unfolded")
    recipe = small_recipe(request.param)
    export(checkpoint_of(folder, recipe, trained_weights(recipe)), folder / "out", "none")
    return folder / "out"


def test_transformers_refuses_the_directory(unfolded: Path) -> None:
    for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="model type `vha_qwen3`"):
            load(unfolded)


@pytest.mark.filterwarnings("ignore")
def test_a_class_that_is_forced_on_the_directory_finds_no_sizes(
    unfolded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own defaults are billions of parameters; here of a size that is quickly made."""
    from transformers import Qwen3Config

    small = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 99, "head_dim": 4}
    config = Qwen3Config.from_pretrained(unfolded)
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (4096, 151936, 32)
    config.update(small)
    with pytest.raises(RuntimeError, match="ize mismatch"):
        Qwen3ForCausalLM.from_pretrained(unfolded, config=config)


def test_the_maps_of_the_directory_can_be_looked_at(unfolded: Path) -> None:
    report = read_report(unfolded)
    assert report.step == 7 and sorted(report.maps) == [0, 1]
    weights = open_unfolded(unfolded).weights
    for layer, maps in report.maps.items():
        for name, array in maps.items():
            np.testing.assert_array_equal(array, weights.read(f"model.layers.{layer}.self_attn.{name}"))


def test_text_is_written_with_the_maps_folded(unfolded: Path) -> None:
    model = TextModel.load(unfolded)
    assert model.config == folded(open_unfolded(unfolded).model) and not model.config.has_maps
    logits = model.model(paddle.to_tensor(TOKENS_BS)).numpy()
    assert_close(logits, model_logits(unfolded)(TOKENS_BS), FLOAT32, "logits")


def copied(unfolded: Path, out: Path, **changes: Any) -> Path:
    shutil.copytree(unfolded, out)
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | changes))
    return out


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model_type": "qwen3"}, "model_type=qwen3: must be vha_qwen3; give an unfolded export"),
        ({"fold": "all"}, "fold=all: must be one of none, partial"),
        ({"model": None}, "config.json: model: Input should be"),
        ({"model": {"vocab_size": 3}}, r"config\.json: model\.hidden_size: Field required"),
    ],
    ids=["type", "fold", "no model", "model"],
)
def test_a_config_that_does_not_describe_the_directory_is_refused(
    unfolded: Path, tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(UserError, match=fault):
        open_unfolded(copied(unfolded, tmp_path / "out", **changes))


def test_a_model_section_of_another_model_is_refused(unfolded: Path, tmp_path: Path) -> None:
    section = json.loads((unfolded / "config.json").read_text())["model"]
    with pytest.raises(UserError, match=r"hidden_size=24|has shape"):
        open_unfolded(copied(unfolded, tmp_path / "a", model=section | {"hidden_size": 24}))
    with pytest.raises(UserError, match=r"missing model\.layers\.2\."):
        open_unfolded(copied(unfolded, tmp_path / "b", model=section | {"num_hidden_layers": 3}))


def test_a_model_section_that_breaks_a_rule_is_refused(unfolded: Path, tmp_path: Path) -> None:
    section = json.loads((unfolded / "config.json").read_text())["model"]
    attention = section["attention"] | {"num_attention_heads": 7}
    with pytest.raises(UserError, match=r"config\.json: model\.attention\.num_attention_heads=7: must be a multiple"):
        open_unfolded(copied(unfolded, tmp_path / "out", model=section | {"attention": attention}))


def test_a_file_that_was_edited_is_found_when_it_is_exported(unfolded: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(unfolded, edited)
    content = bytearray(weights_in(edited))
    content[-3] ^= 1
    (edited / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: differs from the manifest"):
        export(edited, tmp_path / "out", "all")
    assert not (tmp_path / "out").exists()


def test_the_tensors_are_floating_point_of_one_dtype_each(unfolded: Path) -> None:
    source = open_unfolded(unfolded)

    class Wrong:
        path = unfolded
        files = ()
        entries = dict(source.weights.stored.entries)  # type: ignore[attr-defined]

    name = "model.norm.weight"
    from dataclasses import replace

    Wrong.entries[name] = replace(Wrong.entries[name], dtype=np.dtype(np.int32))
    with pytest.raises(UserError, match=r"model\.norm\.weight holds int32"):
        UnfoldedWeights(source.model, Wrong())  # type: ignore[arg-type]


def test_only_our_own_class_is_taken_for_one(unfolded: Path, tmp_path: Path) -> None:
    assert is_unfolded(unfolded)
    assert not is_unfolded(tmp_path)
    recipe = small_recipe(SMALL_GROUPED)
    checkpoint = checkpoint_of(tmp_path, recipe, trained_weights(recipe))
    export(checkpoint, tmp_path / "stock", "all", plain=True)
    assert not is_unfolded(tmp_path / "stock") and open_own(checkpoint).recipe == recipe
