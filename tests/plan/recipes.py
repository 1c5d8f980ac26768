"""Small recipes to plan."""

from __future__ import annotations

from typing import Any

from vha_paddle.config import Recipe, recipe_from_dict

VHA: dict[str, Any] = {
    "kind": "vha",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "postmix_rank": 3,
}
GROUPED: dict[str, Any] = {"kind": "grouped", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}

MLA: dict[str, Any] = {
    "kind": "mla",
    "num_attention_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
MFA: dict[str, Any] = {"kind": "mfa", "num_attention_heads": 4, "head_dim": 6, "q_lora_rank": 14}
GVA: dict[str, Any] = {
    "kind": "gva",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "qk_rope_head_dim": 2,
}
DCMHA: dict[str, Any] = {
    "kind": "dcmha",
    "num_attention_heads": 8,
    "head_dim": 6,
    "num_groups": 4,
    "compose_rank": 2,
}


def small_recipe(
    attention: dict[str, Any],
    parallel: dict[str, Any] | None = None,
    tied: bool = True,
    recompute: str = "none",
    compute: str = "float32",
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> Recipe:
    """A model of 4 layers, D = 24, F = 32, V = 56; 8 sequences of 8 tokens a step, one in a microbatch."""
    return recipe_from_dict(
        {
            "run": {"name": "small", "seed": 5, "output": "unused"},
            "model": {
                "vocab_size": 56,
                "hidden_size": 24,
                "intermediate_size": 32,
                "num_hidden_layers": 4,
                "tie_word_embeddings": tied,
                "attention": attention,
                **(model or {}),
            },
            "data": {
                "train": "unused",
                "tokenizer": "unused",
                "sequence_length": 8,
                "global_batch_size": 8,
                "micro_batch_size": 1,
                **(data or {}),
            },
            "optim": {"lr": 1e-3, "decay_target": "none" if attention["kind"] == "vha" else None},
            "schedule": {"kind": "cosine", "total_tokens": 6400, "warmup_tokens": 0, "min_lr": 0.0},
            "parallel": parallel or {},
            "precision": {"compute": compute},
            "memory": {"recompute": recompute},
        },
        source="small",
    )
