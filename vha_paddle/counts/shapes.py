"""Named shapes of the Qwen3 family and attention layers for them, as recipes that only count.

Origin of the values: the sizes are public Qwen3's; VHA's heads and ranks are the paper's; MLA's widths are those of
DeepSeek-V2 (the paper's cache of 1.12 KB fits a rotary width of 64), its query heads the grouped baseline's (assumed);
MFA has one KV head of 256, a query latent of D / 2 and the query heads whose attention is nearest the baseline's in
parameters (assumed); GVA and DCMHA have the baseline's query heads (assumed).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vha_paddle.config import Recipe, recipe_from_dict
from vha_paddle.errors import UserError

VOCAB_SIZE = 151936
HEAD_DIM = 128
TABLE5_INTERMEDIATE = 5504
"""The width of the MLP that the paper's Table 5 was counted with; Qwen3-1.7B has 6144."""

_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def _size(layers: int, hidden: int, feed_forward: dict[str, Any], tied: bool = True) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
        **feed_forward,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": _size(28, 1024, {"intermediate_size": 3072}),
    "1.7B": _size(28, 2048, {"intermediate_size": 6144}),
    "4B": _size(36, 2560, {"intermediate_size": 9728}),
    "30B-A3B": _size(48, 2048, {"experts": _EXPERTS}, tied=False),
}
_BASELINE = {"0.6B": (16, 8), "1.7B": (16, 8), "4B": (32, 8), "30B-A3B": (32, 4)}  # query and KV heads
_FACTORIZED = {"0.6B": 14, "1.7B": 12, "4B": 22, "30B-A3B": 20}  # query heads of MFA
_VIRTUAL = {"0.6B": (16, 2), "1.7B": (16, 2), "4B": (32, 2), "30B-A3B": (48, 2)}


def grouped(heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "kind": "grouped",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
    }


def vha(heads: int, kv_heads: int, rank: int | None = None) -> dict[str, Any]:
    """`rank` left out is the paper's, a quarter of the virtual heads."""
    return grouped(heads, kv_heads) | {"kind": "vha", "postmix_rank": heads // 4 if rank is None else rank}


def attention_of(shape: str, name: str) -> dict[str, Any]:
    """The attention section of a named shape: `gqa`, `vha`, `mla`, `mfa`, `gva`, `dcmha`, or grouped attention with
    other heads: `gqa-2` has the shape's query heads on 2 KV heads, `16-2` names both.

    Raises:
        UserError: another name.
    """
    heads, kv_heads = _BASELINE[shape]
    known = {
        "gqa": grouped(heads, kv_heads),
        "vha": vha(*_VIRTUAL[shape]),
        "mla": {"kind": "mla", "num_attention_heads": heads},
        "mfa": {
            "kind": "mfa",
            "num_attention_heads": _FACTORIZED[shape],
            "head_dim": 256,
            "q_lora_rank": SHAPES[shape]["hidden_size"] // 2,
        },
        "gva": grouped(heads, 2) | {"kind": "gva", "qk_rope_head_dim": 64},
        "dcmha": {"kind": "dcmha", "num_attention_heads": heads, "head_dim": HEAD_DIM},
    }
    if name in known:
        return known[name]
    numbers = re.fullmatch(r"(gqa|[1-9][0-9]*)-([1-9][0-9]*)", name)
    if numbers is None:
        raise UserError(
            f"--attention {name}: must be {', '.join(known)}, or for grouped attention KV heads as in gqa-2, or query "
            "and KV heads as in 16-2"
        )
    return grouped(heads if numbers[1] == "gqa" else int(numbers[1]), int(numbers[2]))


def title(shape: str, name: str) -> str:
    """A shape and an attention as they are printed: heads of grouped attention and of VHA with them."""
    section = attention_of(shape, name)
    kind = {"grouped": "gqa"}.get(section["kind"], section["kind"])
    if "num_key_value_heads" not in section:
        return f"{shape} {kind}"
    return f"{shape} {kind} {section['num_attention_heads']}-{section['num_key_value_heads']}"


OTHER_BASELINE = (
    "30B-A3B gqa has the heads of public Qwen3-30B-A3B, 32-4; the recipes' baseline (30b_a3b_gqa4_fp8) is assumed to "
    "have 48-4: --attention 48-4"
)
"""Said wherever the first is printed."""


def model_section(shape: str, attention: str) -> dict[str, Any]:
    """The `model` section of a named shape.

    Raises:
        UserError: a shape or an attention that has no name here.
    """
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: must be one of {', '.join(SHAPES)}")
    return SHAPES[shape] | {"attention": attention_of(shape, attention)}


def counting_recipe(
    name: str, model: Mapping[str, Any], sequence_length: int = 4096, tensor: int = 1, expert: int = 1
) -> Recipe:
    """A recipe around a `model` section, checked as any other, of which only model, sequence and degrees mean anything.

    Raises:
        UserError: the section is no model, or the degrees do not divide it.
    """
    attentions = [model.get("attention"), (model.get("sliding_window") or {}).get("attention")]
    has_maps = any(isinstance(one, dict) and one.get("kind") == "vha" for one in attentions)
    values = {
        "run": {"name": name, "seed": 0, "output": "unused"},
        "model": {"max_position_embeddings": max(40960, sequence_length), **model},
        "data": {
            "train": "unused",
            "tokenizer": "unused",
            "sequence_length": sequence_length,
            "global_batch_size": expert,
            "micro_batch_size": 1,
        },
        "optim": {"lr": 1e-4} | ({"decay_target": "none"} if has_maps else {}),
        "schedule": {
            "kind": "cosine",
            "total_tokens": expert * sequence_length,
            "warmup_tokens": 0,
            "min_lr": 0.0,
        },
        "parallel": {"tensor": tensor, "sharding": expert, "expert": expert},
    }
    return recipe_from_dict(values, source=name)


def named(shape: str, attention: str | Mapping[str, Any], **changes: Any) -> Recipe:
    """A named shape with a named attention or an attention section; `changes` replace keys of its `model` section."""
    section = model_section(shape, attention if isinstance(attention, str) else "gqa")
    if not isinstance(attention, str):
        section = section | {"attention": dict(attention)}
    return counting_recipe(shape, section | changes)
