"""Attention kinds by the name a recipe gives them, `model.attention.kind`."""

from __future__ import annotations

from paddle import nn

from vha_paddle.attention.composed import SelfAttentionDCMHA
from vha_paddle.attention.factorized import SelfAttentionMFA
from vha_paddle.attention.grouped import SelfAttentionGrouped
from vha_paddle.attention.grouped_value import SelfAttentionGVA
from vha_paddle.attention.latent import SelfAttentionMLA
from vha_paddle.attention.virtual_head import SelfAttentionVHA

REGISTRY: dict[str, type[nn.Layer]] = {
    "grouped": SelfAttentionGrouped,
    "vha": SelfAttentionVHA,
    "mla": SelfAttentionMLA,
    "mfa": SelfAttentionMFA,
    "gva": SelfAttentionGVA,
    "dcmha": SelfAttentionDCMHA,
}
