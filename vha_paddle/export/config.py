"""`config.json` and `generation_config.json` of the exported model.

ONE FILE FOR ALL READERS: transformers 4 reads `rope_theta` and `torch_dtype`, transformers 5
`rope_parameters` and `dtype`, and a reader that misses its own key takes a default without a word (RoPE's
base would be 10,000). So both spellings are written, and no key is left to a default that a version could
change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vha_paddle.config import Model

ExportDtype = Literal["float32", "bfloat16", "float16"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that the model's configuration names. The corpus has the end token between documents and no begin
    token, so the end token is also what a sequence begins after."""

    eos_id: int
    pad_id: int
    vocab_size: int
    """Ids that the tokenizer knows; the model may have more rows."""


def hf_config(model: Model, dtype: ExportDtype, special: SpecialTokens) -> dict[str, Any]:
    """Qwen3's configuration of the model that is served: N plain query heads on K KV heads.

    `model` is the recipe's, as it was trained: its `num_attention_heads` counts the virtual heads, which the
    fold makes plain, so nothing is converted.
    """
    attention = model.attention
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": special.eos_id,
        "dtype": dtype,
        "eos_token_id": special.eos_id,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": model.initializer_range,
        "intermediate_size": model.intermediate_size,
        "layer_types": ["full_attention"] * model.num_hidden_layers,
        "max_position_embeddings": model.max_position_embeddings,
        "max_window_layers": model.num_hidden_layers,  # layers from this one on would slide
        "num_attention_heads": attention.num_attention_heads,
        "num_hidden_layers": model.num_hidden_layers,
        "num_key_value_heads": attention.num_key_value_heads,
        "pad_token_id": special.pad_id,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": model.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": model.vocab_size,
    }


def generation_config(special: SpecialTokens) -> dict[str, Any]:
    """Greedy decoding that stops at the end token."""
    return {
        "bos_token_id": special.eos_id,
        "do_sample": False,
        "eos_token_id": special.eos_id,
        "pad_token_id": special.pad_id,
    }


def write_json(path: Path, value: Any) -> None:
    """Write `value` as the JSON files of a model directory are laid out."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
