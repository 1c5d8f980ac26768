"""The model card states where a model came from and how to use it."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    Exported,
    small_model,
    small_recipe,
)
from vha_paddle.config import load_recipe
from vha_paddle.export.card import cache_bytes, model_card
from vha_paddle.export.readers import NO_TOKENIZER
from vha_paddle.export.stock import partial_target, stock_target, unfolded_target

LATENT = {"kind": "mla", "num_attention_heads": 2, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8}


@pytest.fixture(scope="module")
def card(exported: Exported) -> str:
    return (exported.directory / "README.md").read_text(encoding="utf-8")


def test_the_cache_of_the_papers_1p7b_model_is_a_quarter_of_gqa8() -> None:
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "postmix_rank": 4}
    assert cache_bytes(small_model(SMALL_VHA | sizes)) == {"this_model": 1024, "gqa_8": 4096, "mha": 8192}


def test_gqa8_is_not_compared_where_there_are_fewer_heads() -> None:
    assert cache_bytes(small_model(SMALL_VHA)) == {"this_model": 64, "mha": 192}


def test_the_front_matter_is_what_model_hubs_read(card: str) -> None:
    _, front_matter, _ = card.split("---\n", 2)
    values = YAML(typ="safe").load(io.StringIO(front_matter))
    assert values["library_name"] == "transformers" and values["pipeline_tag"] == "text-generation"


def test_the_card_names_source_fold_and_cache(card: str, exported: Exported) -> None:
    for fact in (
        "checkpoint `step-00000007`, seed 3",
        "7 optimizer steps, 1,792 tokens",
        exported.report["source"]["manifest_sha256"],
        "trained with vha_paddle 0.0.9",
        "6 query heads on 2 key/value heads",
        "| Premix | `q_proj` | 2 |",
        "| Postmix | `o_proj` | 2 |",
        "| this model, before and after the fold | 64 |",
        "Not run; `--verify`",
        "tokenizer.ggml.add_space_prefix=bool:false",
    ):
        assert fact in card, fact


def test_the_recipe_in_the_card_is_the_one_that_was_trained(card: str, exported: Exported, tmp_path: Any) -> None:
    (tmp_path / "recipe.yaml").write_text(card.split("```yaml\n")[1].split("```")[0])
    assert load_recipe(tmp_path / "recipe.yaml") == exported.recipe


FIGURES: dict[str, Any] = {
    "num_tokens": 256,
    "text": "built in",
    "num_text_tokens": 128,
    "max_abs_difference": 3e-6,
    "mean_abs_difference": 4e-7,
    "scale": 12.0,
    "relative": 2.5e-7,
    "kl_mean": 1.5e-9,
    "kl_max": 2.5e-8,
    "top1_agreement": 0.9975,
    "bound": 1e-5,
    "fold_relative": 6.25e-7,
    "storage": {"relative": 7.5e-3},
    "cast": {"relative": 8.5e-3},
    "checkpoint_loss": 2.25,
    "export_loss": 2.5,
    "attention": {"export": [1.5e-3, 3.5e-3], "fold": [1e-15, 2e-15], "cast": None},
    "expert_agreement": None,
}


def card_of(exported: Exported, attention: Mapping[str, Any] = SMALL_VHA, **keys: Any) -> str:
    recipe = small_recipe(attention, **keys)
    return model_card(exported.report, stock_target(recipe.model, "test"), recipe.model, recipe)


def with_report(exported: Exported, **values: Any) -> str:
    model = exported.recipe.model
    return model_card(exported.report | values, stock_target(model, "test"), model, exported.recipe)


def test_the_figures_of_a_verification_are_in_the_card(exported: Exported) -> None:
    card = with_report(exported, verification=FIGURES)
    for fact in (
        "at 256\npositions (128 of built-in text, 128 random ids):",
        "loss on the text, of checkpoint and export | 2.250000 and 2.500000 nats per token",
        "3.000e-06",
        "4.000e-07",
        "1.200e+01",
        "2.500e-07, allowed 1.0e-05",
        "1.500e-09 and 2.500e-08 nats",
        "of it by the fold, before rounding | 6.250e-07, allowed 1.0e-05",
        "of it by storage | 7.500e-03",
        "in the same dtype, unfolded | 8.500e-03",
        "attention of a layer, largest difference | 3.500e-03",
        "the same of the fold, in float64 | 2.000e-15",
        "99.75%",
    ):
        assert fact in card, fact


def test_figures_that_were_not_measured_are_not_in_the_card(exported: Exported) -> None:
    attention = {"export": [1.5e-3], "fold": None, "cast": None}
    figures = FIGURES | {"fold_relative": None, "cast": None, "text": None, "attention": attention}
    figures |= {"num_text_tokens": 0, "checkpoint_loss": None, "export_loss": None}
    card = with_report(exported, verification=figures)
    assert "positions (256 random ids):" in card
    for absent in ("by the fold", "by storage", "unfolded |", "of the fold, in float64", "experts", "loss on"):
        assert absent not in card, absent


def test_a_plain_model_claims_no_fold(exported: Exported) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    card = model_card(exported.report | {"folded": {}}, stock_target(recipe.model, "test"), recipe.model, recipe)
    assert "None: the model was trained as it is here." in card
    assert "folded virtual head attention" not in card and "before and after the fold" not in card


def test_the_card_of_a_hybrid_names_the_window_and_the_readers_that_obey_it(exported: Exported) -> None:
    card = card_of(exported, **SMALL_HYBRID)
    assert "Of each 2 layers the last sees all, the others the last 5 tokens." in card
    assert "A sliding layer needs no more than its last 5 tokens." in card
    assert 'model_impl="transformers"' in card and "convert_hf_to_gguf.py" not in card


def test_the_card_of_a_mixture_names_its_class_and_experts(exported: Exported) -> None:
    card = card_of(exported, **SMALL_MIXTURE)
    assert "Each layer has 5 experts, of which a token uses 2." in card
    assert "`Qwen3MoeForCausalLM`" in card and "\n- qwen3_moe\n" in card
    assert "convert_hf_to_gguf.py" in card


def test_the_card_of_a_mixture_says_where_its_probabilities_are_divided_without_asking(exported: Exported) -> None:
    card = card_of(exported, **SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"norm_topk_prob": False}})
    assert "another model" in card and "convert_hf_to_gguf.py" not in card


def test_the_share_of_equal_choices_of_experts_is_in_the_card(exported: Exported) -> None:
    assert "98.77%" in with_report(exported, verification=FIGURES | {"expert_agreement": 0.98765})


@pytest.mark.parametrize(
    ("attention", "keys", "dtype", "fact"),
    [
        (SMALL_VHA | {"attention_bias": True}, {}, "float32", "leave the bias of o_proj out without a word"),
        (SMALL_VHA, {}, "fp8", "FP8 weights need a GPU"),
        (SMALL_VHA, {}, "fp8", "Some FP8 matrices have fewer rows than a block, and vLLM refuses them"),
        (SMALL_VHA, {}, "fp8", "## FP8"),
        (SMALL_VHA, {}, "fp8", "transformers needs the package `accelerate`"),
        (LATENT, {"rms_norm_eps": 1e-6}, "float32", "The embedding is stored a second time as output projection"),
        (LATENT, {"rms_norm_eps": 1e-6}, "float32", "(10 + 8) channels x 2 bytes = 36"),
        (LATENT, {"rms_norm_eps": 1e-6}, "float32", "stock `DeepseekV3ForCausalLM`"),
    ],
    ids=["biases", "fp8", "fp8 blocks", "fp8 section", "fp8 package", "embedding", "cache", "class"],
)
def test_the_card_says_what_readers_make_of_it(
    exported: Exported, attention: dict[str, Any], keys: dict[str, Any], dtype: str, fact: str
) -> None:
    recipe = small_recipe(attention, **keys)
    report = exported.report | {"dtype": dtype, "kv_cache_bytes_per_token_per_layer": cache_bytes(recipe.model)}
    assert fact in model_card(report, stock_target(recipe.model, "test"), recipe.model, recipe)


def test_the_card_of_a_partial_fold_says_what_is_left_and_why(exported: Exported) -> None:
    recipe = small_recipe(SMALL_VHA | {"output_gate": "after_postmix"})
    folded_into = {"model.layers.0.self_attn.q_proj.weight": ["q_proj.weight", "model.layers.0.self_attn.premix"]}
    report = exported.report | {"folded": folded_into, "fold": "partial"}
    card = model_card(report, partial_target(recipe.model, "test"), recipe.model, recipe)
    for fact in (
        "virtual head attention, folded in part",
        "It is NO stock model: `VHAQwen3ForCausalLM`",
        "| Premix | `q_proj` | 1 |",
        "| Postmix | `o_proj` | 0 |",
        "- model.attention: Postmix does not fold: the gate lies between Postmix and W_O.",
        "transformers, vLLM and llama.cpp refuse it",
        "library_name: vha-paddle",
    ):
        assert fact in card, fact


def test_the_card_of_another_projects_checkpoint_says_what_is_known(exported: Exported) -> None:
    source = {
        "directory": "checkpoint-100",
        "step": 100,
        "revision": "7218402d",
        "config_sha256": "ab12",
        "tokens": None,
        "bytes": 1234,
        "config": "config.json",
        "masters": True,
        "norm_order": "premix-norm",
    }
    report = exported.report | {
        "verification": FIGURES,
        "source": source,
        "kind": "PaddleFleet core, flex folder",
        "warnings": ["eps is assumed"],
    }
    model = exported.recipe.model
    card = model_card(report, stock_target(model, "test"), model, None)
    for fact in (
        "# checkpoint-100",
        "| checkpoint | PaddleFleet core, flex folder |",
        "| step | 100 |",
        "| revision | 7218402d |",
        "sha256 `ab12`",
        "\n- eps is assumed.\n",
        "| weights | from float32 masters |",
        "| order of norm and Premix, as stated | premix-norm |",
        "does not show that the configuration, and an order of norm and Premix",
    ):
        assert fact in card, fact
    for absent in ("## Recipe", "None |", "| directory |", "| bytes |", "| config |", "| masters |"):
        assert absent not in card, absent


def test_of_a_text_that_was_given_the_card_names_the_file(exported: Exported) -> None:
    card = with_report(exported, verification=FIGURES | {"text": "held_out.txt", "num_text_tokens": 256})
    assert "positions (256 of text, held_out.txt):" in card


def test_a_verification_of_a_recipe_of_ours_needs_no_word_on_the_configuration(exported: Exported) -> None:
    assert "It does not show" not in with_report(exported, verification=FIGURES)


def test_positions_that_training_never_reached_are_named(card: str, exported: Exported) -> None:
    warning = "Trained on sequences of 32 tokens: positions beyond were never seen."
    assert exported.recipe.model.max_position_embeddings == 64 and warning in card
    whole = exported.report["source"] | {"sequence_length": 64}
    assert "never seen" not in with_report(exported, source=whole)
    unknown = {key: value for key, value in whole.items() if key != "sequence_length"}
    assert "never seen" not in with_report(exported, source=unknown)


@pytest.mark.parametrize("is_stock", [True, False])
def test_a_card_without_a_tokenizer_shows_none(is_stock: bool, exported: Exported) -> None:
    model, named = exported.recipe.model, {"config.json": {}, "model.safetensors": {}}
    target = stock_target(model, "test") if is_stock else unfolded_target(model, "test")
    card = model_card(exported.report | {"files": named, "warnings": [NO_TOKENIZER]}, target, model, exported.recipe)
    remedy = "give one to `AutoTokenizer`, or export again with" if is_stock else "export again with"
    assert f"This directory has no tokenizer: {remedy} `--tokenizer PATH`" in card
    assert "convert_hf_to_gguf.py" not in card
    for absent in (
        "AutoTokenizer.from_pretrained",
        "The tokenizer is the one",
        "No begin token",
        "tools/generate.py .",
    ):
        assert absent not in card, absent
    assert 'AutoModelForCausalLM.from_pretrained("."' in card or not is_stock
    assert "had to assume" not in card


def test_the_card_of_our_own_class_has_commands_that_run(exported: Exported) -> None:
    card = model_card(exported.report, unfolded_target(exported.recipe.model, "t"), exported.recipe.model, None)
    assert 'python tools/generate.py . --prompt "Once upon a time"\npython tools/analyze_maps.py .' in card
    assert "This directory has no tokenizer" not in card


def test_the_model_is_loaded_in_its_own_dtype_by_every_transformers(card: str) -> None:
    """Before 4.56 `dtype` is not known and passed over; 5 still takes `torch_dtype`."""
    assert 'AutoModelForCausalLM.from_pretrained(".", torch_dtype="auto")' in card


def test_an_import_is_not_called_trained(exported: Exported) -> None:
    origin = {"directory": "Qwen3-0.6B-Base", "architecture": "Qwen3ForCausalLM", "files_sha256": "ab34"}
    card = with_report(exported, source=exported.report["source"] | {"imported_from": origin, "step": 0, "tokens": 0})
    row = "| imported from | Qwen3-0.6B-Base (Qwen3ForCausalLM), the list of its files' digests has sha256 `ab34` |"
    assert row in card and "| software | imported with vha_paddle 0.0.9, exported with" in card
    for absent in ("trained for", "trained with vha_paddle", "optimizer steps", "## Recipe", "| run |", "| samples |"):
        assert absent not in card, absent
    assert "never seen" not in card  # the sequence length is that of a recipe to be edited


def test_what_training_started_from_is_named(card: str, exported: Exported) -> None:
    start = "gqa, checkpoint step-00000300"
    assert f"| started from | {start} |" in with_report(
        exported, source=exported.report["source"] | {"started_from": start}
    )
    assert "started from" not in card


def test_the_files_that_were_read_have_one_digest(exported: Exported) -> None:
    files = {"b.safetensors": "22", "a.json": "11"}
    listed = hashlib.sha256(b"11  a.json\n22  b.safetensors\n").hexdigest()
    assert f"| files read | 2, the list of their digests has sha256 `{listed}` |" in with_report(
        exported, source_files=files
    )


def test_a_layer_whose_bias_folds_too_is_one_layer(exported: Exported) -> None:
    prefix = "model.layers.0.self_attn"
    folded_into = {
        f"{prefix}.q_proj.{part}": [f"{prefix}.q_proj.{part}", f"{prefix}.premix"] for part in ("weight", "bias")
    }
    assert "| Premix | `q_proj` | 1 |" in with_report(exported, folded=folded_into)


def test_neither_card_nor_report_names_a_path_of_this_machine(card: str, exported: Exported) -> None:
    folder = str(exported.checkpoint.parents[2])
    assert folder not in card and folder not in json.dumps(exported.report)
