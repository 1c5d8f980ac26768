"""`config.json` says the same to every reader, in the spelling that each one knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.checkpoints import (
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    Exported,
    small_model,
    small_recipe,
)
from vha_paddle.config import Model
from vha_paddle.errors import UserError
from vha_paddle.export.config import ExportDtype, SpecialTokens, generation_config, hf_config
from vha_paddle.export.stock import partial_target, stock_target, unfolded_target

SPECIAL = SpecialTokens(eos_id=2, pad_id=3, vocab_size=320)


def config_of(model: Model, dtype: ExportDtype = "float32") -> dict[str, Any]:
    return hf_config(stock_target(model, "test"), dtype, SPECIAL)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return config_of(small_recipe(SMALL_VHA).model, "bfloat16")


def test_both_spellings_of_renamed_keys_are_there_and_agree(config: dict[str, Any]) -> None:
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 3e4
    assert config["rope_parameters"]["rope_type"] == "default" and config["rope_scaling"] is None
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_every_layer_attends_fully_in_every_spelling(config: dict[str, Any]) -> None:
    assert config["layer_types"] == ["full_attention", "full_attention"]
    assert config["max_window_layers"] == config["num_hidden_layers"] == 2
    assert config["sliding_window"] is None and config["use_sliding_window"] is False


def test_a_hybrid_declares_its_windows_in_every_spelling() -> None:
    config = config_of(small_model(SMALL_VHA, **SMALL_HYBRID))
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert config["sliding_window"] == 5 and config["use_sliding_window"] is True
    # vLLM's own Qwen3 would compute full attention if this were the number of layers; so it refuses
    assert config["max_window_layers"] == 0


def test_a_mixture_declares_its_experts_in_every_spelling() -> None:
    config = config_of(small_model(SMALL_VHA, **SMALL_MIXTURE))
    expected = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 2e-3,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    assert {key: config[key] for key in expected} == expected
    assert "layer_types" not in config


@pytest.mark.parametrize("keys", [SMALL_HYBRID, SMALL_MIXTURE], ids=["hybrid", "mixture"])
def test_transformers_reads_back_what_was_written(keys: dict[str, Any], tmp_path: Path) -> None:
    written = config_of(small_model(SMALL_VHA, **keys))
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = AutoConfig.from_pretrained(tmp_path)
    del written["dtype"], written["torch_dtype"], written["architectures"]
    assert {key: getattr(read, key) for key in written} == written


def test_a_config_is_not_written_for_a_model_without_a_stock_class() -> None:
    with pytest.raises(UserError, match="output_gate=true: no stock Qwen3"):
        config_of(small_model(SMALL_GROUPED | {"output_gate": True}))


def test_heads_are_the_virtual_ones_and_their_width_is_written(config: dict[str, Any]) -> None:
    heads = {key: config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    assert heads == {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}


def test_a_fold_and_a_plain_model_of_its_sizes_have_one_config(config: dict[str, Any]) -> None:
    assert config_of(small_recipe(SMALL_GROUPED).model, "bfloat16") == config


def test_no_key_of_transformers_is_left_to_its_default(exported: Exported) -> None:
    written = json.loads((exported.directory / "config.json").read_text())
    read = AutoConfig.from_pretrained(exported.directory)
    differing = {key for key, value in read.to_diff_dict().items() if key in written and written[key] != value}
    assert differing <= {"dtype", "torch_dtype"}, differing
    expected = {"hidden_size": 20, "intermediate_size": 28, "rope_theta": 3e4, "rms_norm_eps": 1e-3}
    expected |= {
        "initializer_range": 0.03,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "vocab_size": 330,
    }
    assert {key: getattr(read, key) for key in expected} == expected


def test_untied_heads_are_declared() -> None:
    model = small_recipe(SMALL_VHA, tie_word_embeddings=False).model
    assert config_of(model)["tie_word_embeddings"] is False


def test_the_end_token_starts_and_ends_sequences(config: dict[str, Any]) -> None:
    settings = generation_config(SPECIAL)
    for key, token_id in {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 3}.items():
        assert config[key] == settings[key] == token_id


def test_without_a_tokenizer_no_id_is_that_of_another_model() -> None:
    config = hf_config(stock_target(small_model(SMALL_VHA), "test"), "float32", None)
    assert {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} == dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    )


def test_fp8_names_its_blocks_and_what_is_not_quantised() -> None:
    config = config_of(small_model(SMALL_VHA, **SMALL_MIXTURE), "fp8")
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert "quantization_config" not in config_of(small_model(SMALL_VHA))


@pytest.mark.parametrize("fold", ["none", "partial"])
def test_our_own_class_has_the_model_section_and_no_size_where_others_look(fold: str) -> None:
    model = small_model(SMALL_VHA | {"output_gate": "after_postmix"})
    target = (unfolded_target if fold == "none" else partial_target)(model, "test")
    config = hf_config(target, "float32", SPECIAL, is_folded=fold == "partial")
    assert (config["model_type"], config["architectures"]) == ("vha_qwen3", ["VHAQwen3ForCausalLM"])
    assert config["fold"] == fold and Model.model_validate(config["model"]) == target.model
    assert not {"hidden_size", "vocab_size", "num_attention_heads", "head_dim"} & config.keys()
