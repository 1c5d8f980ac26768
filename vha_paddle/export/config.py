"""`config.json` and `generation_config.json` of the exported model.

ONE FILE FOR ALL READERS: transformers 4 reads `rope_theta` and `torch_dtype`, transformers 5
`rope_parameters` and `dtype`, and the count of experts has two names; a reader that misses its own key takes a
default without a word (RoPE's base would be 10,000). So both spellings are written, and no key is left to a default
that a version could change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vha_paddle.config import MixtureOfExperts, Model
from vha_paddle.export.stock import served_attention, stock_class

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
    """Qwen3's or Qwen3-MoE's configuration of the model that is served: N plain query heads on K KV heads.

    Args:
        model: the recipe's, as it was trained.

    Raises:
        UserError: no stock class computes the model.
    """
    stock, attention = stock_class(model, "config.json"), served_attention(model)
    common = {
        "architectures": [stock.architecture],
        "model_type": stock.model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": special.eos_id,
        "dtype": dtype,
        "eos_token_id": special.eos_id,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": model.initializer_range,
        "max_position_embeddings": model.max_position_embeddings,
        "num_attention_heads": attention.num_attention_heads,
        "num_hidden_layers": model.num_hidden_layers,
        "num_key_value_heads": attention.num_key_value_heads,
        "pad_token_id": special.pad_id,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }
    feed_forward = _dense(model) if model.experts is None else _mixture(model.experts)
    return dict(sorted((common | _windows(model) | feed_forward).items()))


def _windows(model: Model) -> dict[str, Any]:
    """Which layers see a window.

    `max_window_layers` is the first of the layers that slide for readers from before `layer_types`. Where all layers
    see everything it is past the last. No number describes a hybrid; with 0, vLLM's own Qwen3 refuses it, where it
    would compute full attention with the count of layers.
    """
    sliding = model.sliding_window
    return {
        "max_window_layers": model.num_hidden_layers if sliding is None else 0,
        "sliding_window": None if sliding is None else sliding.window,
        "use_sliding_window": sliding is not None,
    }


def _dense(model: Model) -> dict[str, Any]:
    layers = range(model.num_hidden_layers)
    return {
        "intermediate_size": model.intermediate_size,
        "layer_types": ["sliding_attention" if model.slides(layer) else "full_attention" for layer in layers],
    }


def _mixture(experts: MixtureOfExperts) -> dict[str, Any]:
    """Experts in every layer. Qwen3-MoE has no `layer_types`."""
    return {
        "decoder_sparse_step": 1,
        # the width of dense layers, of which there are none: published models give what one token's experts have
        "intermediate_size": experts.num_experts_per_tok * experts.moe_intermediate_size,
        "mlp_only_layers": [],
        "moe_intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "num_experts": experts.num_experts,  # transformers 4
        "num_experts_per_tok": experts.num_experts_per_tok,
        "num_local_experts": experts.num_experts,  # transformers 5
        "output_router_logits": False,
        "router_aux_loss_coef": experts.router_aux_loss_coef,
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
