"""The models that clients are asked to serve: small, weights of the size that training reaches, exported for real."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.checkpoints import small_recipe, small_tokenizer, trained_weights, write_checkpoint
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.writer import MAX_SHARD_BYTES

Form = Literal["dense", "experts", "windows", "biases", "latent", "latent experts"]

# Heads, widths and vocabulary that every client has kernels for.
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {
    "intermediate_size": None,
    "experts": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "router_aux_loss_coef": 1e-3},
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 128, "norm_topk_prob": False}  # as DeepSeek-V2's
WINDOWS = {"sliding_window": {"window": 16, "full_every": 2}}

WIDE_HEADS = {"kind": "vha", "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "postmix_rank": 4}
NARROW_HEADS = WIDE_HEADS | {"num_attention_heads": 8, "head_dim": 32}  # 8 x 32 = hidden_size
# the one size of latent and rotary key that vLLM has kernels for, DeepSeek's
LATENT = {"kind": "mla", "num_attention_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
ONE_KV_HEAD = {"kind": "grouped", "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 64}


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint to make and how it is exported."""

    attention: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    form: Form = "dense"
    dtype: ExportDtype = "float32"
    max_shard_bytes: int = MAX_SHARD_BYTES


MODELS = {
    "vha g8, tied": ServedModel(NARROW_HEADS),
    "vha g8, untied, wide heads": ServedModel(WIDE_HEADS, UNTIED),
    "vha g8, sharded": ServedModel(WIDE_HEADS, UNTIED, max_shard_bytes=2_000_000),
    "vha g8, bfloat16": ServedModel(WIDE_HEADS, dtype="bfloat16"),
    "grouped, 1 KV head": ServedModel(ONE_KV_HEAD, UNTIED),
    "vha g8, experts": ServedModel(NARROW_HEADS, UNTIED | EXPERTS, form="experts"),
    "vha g8, windows": ServedModel(NARROW_HEADS, UNTIED | WINDOWS, form="windows"),
    "vha g8, no norm (Llama)": ServedModel(NARROW_HEADS | {"qk_norm": False}, UNTIED),
    "vha g8, biases": ServedModel(NARROW_HEADS | {"attention_bias": True}, UNTIED, form="biases"),
    "vha g8, no norm, biases (Llama)": ServedModel(NARROW_HEADS | {"qk_norm": False, "attention_bias": True}, UNTIED),
    "mla (DeepSeek-V3)": ServedModel(LATENT, UNTIED, form="latent"),
    "mla, experts (DeepSeek-V2)": ServedModel(
        LATENT,
        UNTIED | EXPERTS | {"experts": EXPERTS["experts"] | SHARED_EXPERT},
        form="latent experts",
    ),
}


@dataclass(frozen=True)
class Made:
    """A model on disk."""

    checkpoint: Path
    export: Path


def make(number: int, model: ServedModel, folder: Path) -> Made:
    """Write the checkpoint and export it, both under `folder`."""
    recipe = small_recipe(model.attention, **(SIZES | model.keys))
    weights = trained_weights(recipe, seed=number)
    # At full size a tied embedding outweighs the layers, and so do biases: the likeliest token is the same again.
    weights["model.embed_tokens.weight"] *= np.float32(0.05)
    for name in weights:
        if name.endswith(".bias"):
            weights[name] *= np.float32(0.1)
    checkpoint, export = folder / f"checkpoint-{number}", folder / f"export-{number}"
    write_checkpoint(checkpoint, recipe, weights, small_tokenizer())
    export_checkpoint(
        checkpoint,
        export,
        model.dtype,
        plain=not recipe.model.has_maps,
        max_shard_bytes=model.max_shard_bytes,
    )
    return Made(checkpoint, export)
