"""`config.json` and `generation_config.json` of the exported model.

ONE FILE FOR ALL READERS: transformers 4 reads `rope_theta` and `torch_dtype`, transformers 5
`rope_parameters` and `dtype`, and the count of experts has two names; a reader that misses its own key takes a
default without a word (RoPE's base would be 10,000). So both spellings are written, and no key is left to a default
that a version could change.

A directory of our own class has none of these keys: its model stands in a section of its own, so that a class that is
forced on it finds no sizes that fit the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import vha_paddle
from vha_paddle.config import GroupedAttention, LatentAttention, MixtureOfExperts, Model
from vha_paddle.export import fp8
from vha_paddle.export.stock import LATENT, LLAMA, Target
from vha_paddle.sources.unfolded import FOLD_KEY, MODEL_KEY

ExportDtype = Literal["float32", "bfloat16", "float16", "fp8"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = ("float32", "bfloat16", "float16", "fp8")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that the model's configuration names. The corpus has the end token between documents and no begin
    token, so the end token is also what a sequence begins after."""

    eos_id: int
    pad_id: int
    vocab_size: int
    """Ids that the tokenizer knows; the model may have more rows."""


def hf_config(
    target: Target, dtype: ExportDtype, special: SpecialTokens | None, is_folded: bool = False
) -> dict[str, Any]:
    """The configuration of what is written.

    Args:
        special: None where there is no tokenizer; a class's defaults would be ids of another one.
        is_folded: whether something was folded, which a directory of our own class says.
    """
    beside = "bfloat16" if dtype == "fp8" else dtype
    general = {
        "architectures": [target.stock.architecture],
        "bos_token_id": None if special is None else special.eos_id,
        "dtype": beside,
        "eos_token_id": None if special is None else special.eos_id,
        "model_type": target.stock.model_type,
        "pad_token_id": None if special is None else special.pad_id,
        "torch_dtype": beside,
    }
    if not target.is_stock:
        section = target.model.model_dump(mode="json", exclude_none=True)
        own = {FOLD_KEY: "partial" if is_folded else "none", MODEL_KEY: section, "vha_paddle": vha_paddle.__version__}
        return dict(sorted((general | own).items()))
    return dict(sorted((general | _stock(target) | (_quantization(target) if dtype == "fp8" else {})).items()))


def _quantization(target: Target) -> dict[str, Any]:
    return {"quantization_config": fp8.quantization_config(target.tensors)}


def _stock(target: Target) -> dict[str, Any]:
    """What a stock class reads of the model that is served."""
    model, (attention,) = target.model, target.model.attentions
    common = {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": model.initializer_range,
        "max_position_embeddings": model.max_position_embeddings,
        "num_hidden_layers": model.num_hidden_layers,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings and not target.naming.head_is_written,
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }
    if isinstance(attention, LatentAttention):
        return common | _latent(attention) | (_dense_deepseek if target.stock == LATENT else _mixture_deepseek)(model)
    assert isinstance(attention, GroupedAttention), "anything else has no stock class"
    return common | _grouped(attention) | _feed_forward(target)


def _grouped(attention: GroupedAttention) -> dict[str, Any]:
    """N plain query heads on K KV heads."""
    return {
        "attention_bias": attention.attention_bias,
        "head_dim": attention.head_dim,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
    }


def _feed_forward(target: Target) -> dict[str, Any]:
    model = target.model
    if target.stock == LLAMA:
        return {"intermediate_size": model.intermediate_size, "mlp_bias": False, "pretraining_tp": 1}
    return _windows(model) | (_dense(model) if model.experts is None else _mixture(model.experts))


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


def _latent(attention: LatentAttention) -> dict[str, Any]:
    """DeepSeek's heads. Each has keys and values of its own, made from the latent: hence as many KV heads."""
    return {
        "attention_bias": False,
        "kv_lora_rank": attention.kv_lora_rank,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_attention_heads,
        "q_lora_rank": attention.q_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
    }


def _dense_deepseek(model: Model) -> dict[str, Any]:
    """DeepSeek-V3 whose dense layers are all of them. Readers ask for the experts' keys all the same."""
    return {
        "first_k_dense_replace": model.num_hidden_layers,
        "intermediate_size": model.intermediate_size,
        "moe_intermediate_size": model.intermediate_size,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 1,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "rope_interleave": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
    }


def _mixture_deepseek(model: Model) -> dict[str, Any]:
    """DeepSeek-V2 with experts in every layer, chosen by their softmax probabilities, which are not divided."""
    experts = model.experts
    assert experts is not None
    return {
        "aux_loss_alpha": experts.router_aux_loss_coef,
        "first_k_dense_replace": 0,
        # the width of dense layers, of which there are none
        "intermediate_size": experts.num_experts_per_tok * experts.moe_intermediate_size,
        "mlp_bias": False,
        "moe_intermediate_size": experts.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_expert_intermediate_size // experts.moe_intermediate_size,
        "norm_topk_prob": False,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "pretraining_tp": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": False,
        "topk_group": 1,
        "topk_method": "greedy",
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
