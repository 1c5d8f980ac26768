"""The layer shape of the benchmarks: the paper's 1.7B model, two layers, 1,024 tokens, float32, no LM head."""

from __future__ import annotations

from typing import Any

from vha_paddle.config.schema import GroupedAttention, Model, VirtualHeadAttention

HIDDEN, INTERMEDIATE, LAYERS, SEQUENCE, HEAD_DIM = 2048, 6144, 2, 1024, 128
QUERY_HEADS, GQA_KV_HEADS, VHA_KV_HEADS, POSTMIX_RANK = 16, 8, 2, 4
VOCAB = 256  # the embedding is left out of the step; a small one keeps it out of memory too

ATTENTION: dict[str, Any] = {
    "gqa8": GroupedAttention(
        kind="grouped", num_attention_heads=QUERY_HEADS, num_key_value_heads=GQA_KV_HEADS, head_dim=HEAD_DIM
    ),
    "vha": VirtualHeadAttention(
        kind="vha",
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=VHA_KV_HEADS,
        head_dim=HEAD_DIM,
        postmix_rank=POSTMIX_RANK,
    ),
}


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
