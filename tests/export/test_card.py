"""The model card states where a model came from and how to use it."""

from __future__ import annotations

import io
import json
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


def test_the_figures_of_a_verification_are_in_the_card(exported: Exported) -> None:
    figures = {"num_tokens": 256, "max_abs_difference": 3e-6, "mean_abs_difference": 4e-7, "scale": 12.0}
    figures |= {"relative": 2.5e-7, "top1_agreement": 0.9975, "bound": 1e-5, "expert_agreement": None, "passed": True}
    figures |= {"fold_relative": 6.25e-7}
    card = model_card(exported.report | {"verification": figures}, exported.recipe)
    for fact in (
        "at 256 positions",
        "3.000e-06",
        "4.000e-07",
        "1.200e+01",
        "2.500e-07, allowed 1.0e-05",
        "before rounding to these files' dtype | 6.250e-07, allowed 1.0e-05",
        "99.75%",
    ):
        assert fact in card, fact


def test_a_plain_model_claims_no_fold(exported: Exported) -> None:
    card = model_card(exported.report | {"folded": {}}, small_recipe(SMALL_GROUPED))
    assert "None: the model was trained as it is here." in card
    assert "folded virtual head attention" not in card and "before and after the fold" not in card


def card_of(exported: Exported, **keys: Any) -> str:
    return model_card(exported.report, small_recipe(SMALL_VHA, **keys))


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
    figures = {"num_tokens": 256, "max_abs_difference": 3e-6, "mean_abs_difference": 4e-7, "scale": 12.0}
    figures |= {"relative": 2.5e-7, "top1_agreement": 0.9975, "bound": 1e-5, "expert_agreement": 0.98765}
    figures |= {"fold_relative": None}
    assert "98.77%" in model_card(exported.report | {"verification": figures}, exported.recipe)


def test_neither_card_nor_report_names_a_path_of_this_machine(card: str, exported: Exported) -> None:
    folder = str(exported.checkpoint.parents[2])
    assert folder not in card and folder not in json.dumps(exported.report)
