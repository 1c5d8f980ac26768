"""Which project wrote a checkpoint, by the names of its tensors.

The names of VHA's own tensors are shared; what differs is what stands beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vha_paddle.errors import UserError

LAYER = re.compile(r"layers\.(0|[1-9][0-9]*)\.(.+)")

PREMIX, POSTMIX_A, POSTMIX_B = "vha_premix_weight", "vha_postmix_U", "vha_postmix_V"
_MAPS = (PREMIX, POSTMIX_A, POSTMIX_B)

# Parts of names that no layer of the kinds below has, and what they tell.
_FOREIGN = {
    "vha_premix_alpha": "an early generation of the research fork, whose Premix adds no heads and has the norm before "
    "it: W = I + sigmoid(alpha) (W_premix - I) of the own group; this package has no such layer, and it does not fold",
    "shared_kv_proj": "vha_shared_kv: one projection is key, after norm and RoPE, and value, with the rotation undone "
    "on the output; no grouped-query attention computes that",
    "q_a_proj": "Postmix on latent attention, which shares VHA's names; this is another layer",
    "kv_a_proj_with_mqa": "Postmix on latent attention, which shares VHA's names; this is another layer",
    "kv_b_proj": "Postmix on latent attention, which shares VHA's names; this is another layer",
    "linear_q_up_proj": "Postmix on latent attention, which shares VHA's names; this is another layer",
    "sparse_vha_postmix_U": "Postmix on sparse attention, which shares VHA's names; this is another layer",
}


@dataclass(frozen=True)
class Kind:
    """How one program lays out a model."""

    name: str
    has_fused_qkv: bool
    """Whether q, k and v are one tensor, interleaved by key/value group."""
    is_out_in: bool
    """Whether linear weights are `[out, in]`."""
    has_fused_gate_up: bool
    embedding: str
    counts: Literal["virtual", "physical"]
    """Heads that num_attention_heads of the configuration counts."""
    has_fixed_orders: bool
    """Whether the program's code leaves one order of norm and Premix, and one of gate and Postmix."""
    gate_key: str


CORE = Kind("PaddleFleet core", False, False, True, "embedding.embed_tokens.weight", "virtual", True, "gated_attention")
FORK = Kind(
    "PaddleFleet research fork",
    True,
    False,
    True,
    "embedding.embed_tokens.weight",
    "physical",
    False,
    "gated_attention",
)
EXPORT = Kind(
    "unfolded export in Hugging Face's layout",
    False,
    True,
    False,
    "embed_tokens.weight",
    "virtual",
    True,
    "use_gated_attn",
)


def kind_of(names: Iterable[str], source: str) -> Kind:
    """Tell the kind by the tensors' names, which have no `model.` before them.

    Raises:
        UserError: it is none of the kinds that can be read; the line says what it is, where that can be told.
    """
    names = list(names)
    for name in names:
        for part, meaning in _FOREIGN.items():
            if part in name.split("."):
                raise UserError(f"{source}: {name}: {meaning}; it cannot be read")
    in_layers = {match[2] for match in map(LAYER.fullmatch, names) if match}
    if not any(f"self_attn.{part}" in in_layers for part in _MAPS):
        raise UserError(
            f"{source}: no layer has self_attn.{PREMIX}, .{POSTMIX_A} or .{POSTMIX_B}; it is no VHA checkpoint, and "
            "there is nothing to fold"
        )
    if "self_attn.qkv_proj.weight" in in_layers:
        return FORK
    for part in ("q_proj.weight", "k_proj.weight", "v_proj.weight", PREMIX):
        if f"self_attn.{part}" not in in_layers:
            raise UserError(
                f"{source}: no layer has self_attn.{part}; VHA of PaddleFleet's core has q_proj, k_proj, v_proj and "
                f"{PREMIX} together, the research fork's has qkv_proj"
            )
    return EXPORT if EXPORT.embedding in names else CORE


def map_among(names: Iterable[str]) -> str | None:
    """The first name that is of a Premix or a Postmix; None where none is, and the model is no VHA."""
    return next((name for name in names if name.rpartition(".")[2] in _MAPS), None)


def layers_of(names: Iterable[str]) -> list[int]:
    """The numbers of the layers, in order."""
    return sorted({int(match[1]) for match in map(LAYER.fullmatch, names) if match})
