"""`config.json` says the same to every reader, in the spelling that each one knows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig

from tests.checkpoints import SMALL_GROUPED, SMALL_VHA, Exported, small_recipe
from vha_paddle.export.config import SpecialTokens, generation_config, hf_config

SPECIAL = SpecialTokens(eos_id=2, pad_id=3, vocab_size=320)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return hf_config(small_recipe(SMALL_VHA).model, "bfloat16", SPECIAL)


def test_both_spellings_of_renamed_keys_are_there_and_agree(config: dict[str, Any]) -> None:
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 3e4
    assert config["rope_parameters"]["rope_type"] == "default" and config["rope_scaling"] is None
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_every_layer_attends_fully_in_every_spelling(config: dict[str, Any]) -> None:
    assert config["layer_types"] == ["full_attention", "full_attention"]
    assert config["max_window_layers"] == config["num_hidden_layers"] == 2
    assert config["sliding_window"] is None and config["use_sliding_window"] is False


def test_heads_are_the_virtual_ones_and_their_width_is_written(config: dict[str, Any]) -> None:
    heads = {key: config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    assert heads == {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}


def test_a_fold_and_a_plain_model_of_its_sizes_have_one_config(config: dict[str, Any]) -> None:
    assert hf_config(small_recipe(SMALL_GROUPED).model, "bfloat16", SPECIAL) == config


def test_no_key_of_transformers_is_left_to_its_default(exported: Exported) -> None:
    written = json.loads((exported.directory / "config.json").read_text())
    read = AutoConfig.from_pretrained(exported.directory)
    differing = {key for key, value in read.to_diff_dict().items() if key in written and written[key] != value}
    assert differing <= {"dtype", "torch_dtype"}, differing
    expected = {"hidden_size": 20, "intermediate_size": 28, "rope_theta": 3e4, "rms_norm_eps": 1e-6}
    expected |= {"max_position_embeddings": 64, "tie_word_embeddings": True, "vocab_size": 330}
    assert {key: getattr(read, key) for key in expected} == expected


def test_untied_heads_are_declared() -> None:
    model = small_recipe(SMALL_VHA, tie_word_embeddings=False).model
    assert hf_config(model, "float32", SPECIAL)["tie_word_embeddings"] is False


def test_the_end_token_starts_and_ends_sequences(config: dict[str, Any]) -> None:
    settings = generation_config(SPECIAL)
    for key, token_id in {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 3}.items():
        assert config[key] == settings[key] == token_id
