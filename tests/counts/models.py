"""Models that are counted: the published shapes, and tiny ones of every kind."""

from __future__ import annotations

from typing import Any

from vha_paddle.config import (
    Attention,
    ComposedAttention,
    FactorizedAttention,
    GroupedAttention,
    GroupedValueAttention,
    LatentAttention,
    MixtureOfExperts,
    Model,
    SlidingWindow,
    VirtualHeadAttention,
)

VOCAB = 151936
# layers, hidden, intermediate
SIZES = {"0.6B": (28, 1024, 3072), "1.7B": (28, 2048, 6144), "4B": (36, 2560, 9728)}
TABLE_INTERMEDIATE = 5504  # the width that the published FLOP table was counted with


def grouped(heads: int, kv_heads: int, head_dim: int = 128, output_gate: bool = False) -> GroupedAttention:
    return GroupedAttention(
        kind="grouped",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        output_gate=output_gate,
    )


def vha(heads: int, kv_heads: int, rank: int | None, head_dim: int = 128, **others: Any) -> VirtualHeadAttention:
    return VirtualHeadAttention(
        kind="vha",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        postmix_rank=rank,
        **others,
    )


def published(size: str, attention: Attention, intermediate: int | None = None) -> Model:
    layers, hidden, standard = SIZES[size]
    return Model(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate or standard,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        attention=attention,
    )


def tiny(attention: Attention, tied: bool = False, **others: Any) -> Model:
    return Model(
        vocab_size=40,
        hidden_size=12,
        intermediate_size=None if "experts" in others else 20,
        num_hidden_layers=3,
        tie_word_embeddings=tied,
        attention=attention,
        **others,
    )


MHA_12, MQA = grouped(12, 12), grouped(16, 1)
GQA_8, GQA_4, GQA_2 = grouped(16, 8), grouped(16, 4), grouped(16, 2)
VHA_16, VHA_32 = vha(16, 2, rank=4), vha(32, 2, rank=8)
MILLIONS = [  # published parameters of whole models
    ("0.6B", GQA_8, 596.050),
    ("1.7B", GQA_8, 1720.575),
    ("4B", grouped(32, 8), 4022.468),
    ("0.6B", VHA_16, 523.571),
    ("1.7B", VHA_16, 1574.695),
    ("4B", VHA_32, 3693.365),
]

EXPERTS = MixtureOfExperts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=10)
SHARED = EXPERTS.model_copy(update={"shared_expert_intermediate_size": 14})
A3B_EXPERTS = MixtureOfExperts(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
HYBRID = SlidingWindow(window=4, full_every=3, attention=grouped(8, 4, head_dim=6))  # layers 0 and 1 of 3 slide

ONLY_PREMIX, ONLY_POSTMIX = {"postmix": "none"}, {"premix": "none"}
BIAS_WITHOUT_NORM = {"attention_bias": True, "qk_norm": False}
TINY: dict[str, Attention] = {
    "mha": grouped(4, 4, head_dim=6),
    "gqa": grouped(8, 2, head_dim=6),
    "gqa_gate": grouped(8, 2, head_dim=6, output_gate=True),
    "gqa_bias": grouped(8, 2, head_dim=6).model_copy(update=BIAS_WITHOUT_NORM),
    "mqa": grouped(4, 1, head_dim=6),
    "vha": vha(8, 2, 3, head_dim=6),
    "vha_gate": vha(8, 2, 3, head_dim=6, output_gate="before_postmix"),
    "vha_premix": vha(8, 2, None, head_dim=6, **ONLY_PREMIX),
    "vha_postmix": vha(8, 2, 3, head_dim=6, **ONLY_POSTMIX),
    "vha_narrow": vha(8, 2, 3, head_dim=6, physical_head_dim=4, premix_init="orthogonal"),
    "vha_bias": vha(8, 2, 3, head_dim=6, **BIAS_WITHOUT_NORM),
    "vha_postmix_bias": vha(8, 2, 3, head_dim=6, **ONLY_POSTMIX, **BIAS_WITHOUT_NORM),
    "vha_silu": vha(8, 2, 3, head_dim=6, premix="silu", postmix="silu"),
    "mla": LatentAttention(
        kind="mla", num_attention_heads=4, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=4
    ),
    "mla_latent_queries": LatentAttention(
        kind="mla",
        num_attention_heads=4,
        q_lora_rank=8,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=2,
        v_head_dim=4,
    ),
    "mfa": FactorizedAttention(kind="mfa", num_attention_heads=4, head_dim=6, q_lora_rank=8),
    "gva": GroupedValueAttention(
        kind="gva", num_attention_heads=4, num_key_value_heads=2, head_dim=6, qk_rope_head_dim=2
    ),
    "dcmha": ComposedAttention(kind="dcmha", num_attention_heads=4, head_dim=6, num_groups=2, compose_rank=1),
}


def a3b(attention: Attention) -> Model:
    """The shape of 30B-A3B."""
    return Model(
        vocab_size=VOCAB,
        hidden_size=2048,
        experts=A3B_EXPERTS,
        num_hidden_layers=48,
        tie_word_embeddings=False,
        attention=attention,
    )


VHA_48 = vha(48, 2, 12)
