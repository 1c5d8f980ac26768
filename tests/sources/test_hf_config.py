"""Every spelling of config.json that transformers writes means one model; everything else is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hf_models import CONFIGS, as_transformers_5_writes, edit_config
from vha_paddle.config import GroupedAttention, SlidingWindow
from vha_paddle.errors import UserError
from vha_paddle.sources.hf_config import read_hf_model


def write_config(directory: Path, case: str, **changes: Any) -> Path:
    CONFIGS[case].save_pretrained(directory)
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}
    values = json.loads((directory / "config.json").read_text())
    added = {"architectures": [architecture[values["model_type"]]], "torch_dtype": "bfloat16"}
    edit_config(directory, **added | changes)
    return directory


@pytest.mark.parametrize("case", CONFIGS)
def test_both_generations_say_the_same_model(tmp_path: Path, case: str) -> None:
    write_config(tmp_path, case)
    model, config = read_hf_model(tmp_path), CONFIGS[case]
    as_transformers_5_writes(tmp_path)
    if "Qwen3-MoE" in case:
        edit_config(tmp_path, head_dim=8)
    assert read_hf_model(tmp_path) == model
    attention = model.attention
    assert isinstance(attention, GroupedAttention)
    assert (model.hidden_size, model.num_hidden_layers) == (config.hidden_size, config.num_hidden_layers)
    assert (model.rope_theta, model.rms_norm_eps) == (config.rope_theta, config.rms_norm_eps)
    assert model.tie_word_embeddings is config.tie_word_embeddings
    assert attention.num_attention_heads == config.num_attention_heads
    assert attention.num_key_value_heads == config.num_key_value_heads
    assert attention.head_dim == getattr(config, "head_dim", 8)
    assert attention.qk_norm is not case.startswith("Llama")
    assert attention.attention_bias is config.attention_bias
    if model.experts is not None:
        assert model.experts.norm_topk_prob is config.norm_topk_prob


@pytest.mark.parametrize(
    ("case", "change", "expected"),
    [
        ("Llama", {"head_dim": None}, ("attention", "head_dim", 4)),
        ("Llama", {"num_key_value_heads": None}, ("attention", "num_key_value_heads", 6)),
        ("Llama", {"rope_theta": None}, (None, "rope_theta", 10_000)),
        ("Qwen3", {"head_dim": None}, ("attention", "head_dim", 128)),
        ("Qwen3-MoE", {"head_dim": None}, ("attention", "head_dim", 4)),
        ("Qwen3-MoE", {"norm_topk_prob": None}, ("experts", "norm_topk_prob", False)),
        ("Qwen3-MoE", {"router_aux_loss_coef": None}, ("experts", "router_aux_loss_coef", 1e-3)),
        ("Qwen3", {"rms_norm_eps": None}, (None, "rms_norm_eps", 1e-6)),
        ("Qwen3", {"tie_word_embeddings": None}, (None, "tie_word_embeddings", False)),
        ("Qwen3", {"attention_bias": None}, ("attention", "attention_bias", False)),
        ("Qwen3", {"rope_scaling": {"rope_type": "default"}}, (None, "rope_theta", 3e4)),
        ("Qwen3", {"rope_parameters": {"rope_theta": 3e4, "type": "default"}}, (None, "rope_theta", 3e4)),
    ],
)
def test_an_absent_key_has_its_classs_default(
    tmp_path: Path, case: str, change: dict[str, Any], expected: tuple[str | None, str, Any]
) -> None:
    model = read_hf_model(write_config(tmp_path, case, **change))
    section, key, value = expected
    assert (model if section is None else getattr(model, section)).model_dump()[key] == value


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": None, "use_sliding_window": False, "max_window_layers": 0}, None),
        ({"layer_types": None, "max_window_layers": 4}, None),
        ({"layer_types": ["full_attention"] * 4}, None),
        ({}, SlidingWindow(window=5, full_every=2)),
        ({"layer_types": (["sliding_attention"] * 3 + ["full_attention"])}, SlidingWindow(window=5, full_every=4)),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], expected: SlidingWindow | None) -> None:
    assert read_hf_model(write_config(tmp_path, "Qwen3, hybrid", **changes)).sliding_window == expected


SCALED = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("Qwen3", {"model_type": "qwen2"}, 'model_type="qwen2": must be one of qwen3, qwen3_moe, llama'),
        ("Qwen3", {"model_type": None}, "model_type=null: must be one of"),
        ("Qwen3", {"architectures": ["Qwen3Model"]}, 'architectures=["Qwen3Model"]: only Qwen3ForCausalLM has'),
        ("Qwen3", {"hidden_act": "gelu"}, 'hidden_act="gelu": only "silu" can be read'),
        ("Llama", {"mlp_bias": True}, "mlp_bias=true: only false can be read"),
        ("Llama", {"rope_scaling": SCALED}, 'rope_scaling={"rope_type": "llama3", "factor": 8.0'),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_scaling={"type": "linear"'),
        ("Llama", {"rope_parameters": SCALED | {"rope_theta": 3e4}}, 'rope_parameters={"rope_type": "llama3"'),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: only 1.0 can be read"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "only plain RoPE can be read"),
        ("Qwen3", {"rope_theta": None}, "rope_theta is missing; add it"),
        (
            "Qwen3",
            {"rope_parameters": {"rope_theta": 1e6}},
            "rope_theta=30000.0 and rope_parameters.rope_theta=1000000.0",
        ),
        ("Qwen3-MoE", {"num_local_experts": 6}, "num_experts=5 and num_local_experts=6: must be one value"),
        ("Qwen3-MoE", {"num_experts": None}, "num_experts is missing"),
        ("Qwen3-MoE", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]: only [] can be read"),
        ("Qwen3-MoE", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: only 1 can be read"),
        ("Qwen3-MoE", {"use_sliding_window": True}, "use_sliding_window=true: only false can be read"),
        ("Qwen3", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
        ("Qwen3", {"auto_map": {"AutoModel": "x.Y"}}, "it names code of its own"),
        ("Qwen3", {"num_attention_heads": 7}, "num_attention_heads=7: must be a multiple"),
        ("Qwen3", {"num_attention_heads": "6"}, 'num_attention_heads="6": must be a positive integer'),
        ("Qwen3", {"vocab_size": -1}, "vocab_size=-1"),
        ("Qwen3", {"hidden_size": None}, "hidden_size is missing"),
        ("Qwen3, hybrid", {"use_sliding_window": False}, "with use_sliding_window=false"),
        ("Qwen3, hybrid", {"layer_types": None, "max_window_layers": 2}, 'layer_types=["full", "full", "sliding"'),
        ("Qwen3, hybrid", {"layer_types": ["sliding_attention"] * 4}, "only one full layer after equally many"),
        ("Qwen3, hybrid", {"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_what_is_not_computed_here_is_refused(tmp_path: Path, case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_hf_model(write_config(tmp_path, case, **changes))
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}/config.json: ") and "\n" not in str(error.value)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json: cannot be read .* give a Hugging Face model directory"):
        read_hf_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="must hold a JSON object"):
        read_hf_model(tmp_path)
