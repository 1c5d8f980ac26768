"""The layer shape of the benchmarks: the paper's 1.7B model, two layers, 1,024 tokens, float32, no LM head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vha_paddle.config import ComposedAttention, GroupedValueAttention, Model, load_recipe

HIDDEN, INTERMEDIATE, LAYERS, SEQUENCE, HEAD_DIM = 2048, 6144, 2, 1024, 128
QUERY_HEADS, GQA_KV_HEADS = 16, 8
VOCAB = 256  # the embedding is left out of the step; a small one keeps it out of memory too

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
FROM_RECIPES = {
    "gqa8": "table1_1p7b_gqa8",
    "vha": "table1_1p7b_vha",
    "vha_weight_space": "ours_1p7b_vha_weight_space",
    "vha_gate": "ours_1p7b_vha_gate_before_postmix",
    "gqa2": "table2_1p7b_gqa16_2",
    "mha12": "table2_1p7b_mha12",
    "mqa": "table2_1p7b_mqa",
    "mla": "table1_1p7b_mla",
    "mfa": "table1_1p7b_mfa",
}
ATTENTION: dict[str, Any] = {
    name: load_recipe(RECIPES / f"{recipe}.yaml").model.attention for name, recipe in FROM_RECIPES.items()
}
# the two cousins that have no recipe, with as many heads as GQA-8 and as small a cache as VHA's
ATTENTION["gva"] = GroupedValueAttention(
    kind="gva", num_attention_heads=QUERY_HEADS, num_key_value_heads=2, head_dim=HEAD_DIM, qk_rope_head_dim=64
)
ATTENTION["dcmha"] = ComposedAttention(kind="dcmha", num_attention_heads=QUERY_HEADS, head_dim=HEAD_DIM)


def model_config(name: str) -> Model:
    """The model section of one of `ATTENTION`."""
    return Model(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=True,
        attention=ATTENTION[name],
    )


def hf_config_values() -> dict[str, Any]:
    """The GQA-8 shape as Hugging Face's Qwen3 configuration takes it."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": GQA_KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
