"""Virtual head attention for PaddlePaddle: train GQA-2 with virtual heads, fold, serve stock GQA-2."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Loaded on first use: the folding tools need no Paddle, and importing the package should cost nothing.
_EXPORTS = {
    "SelfAttentionVHA": "vha_paddle.attention.virtual_head",
    "SelfAttentionGrouped": "vha_paddle.attention.grouped",
    "SelfAttentionMLA": "vha_paddle.attention.latent",
    "SelfAttentionMFA": "vha_paddle.attention.factorized",
    "SelfAttentionGVA": "vha_paddle.attention.grouped_value",
    "SelfAttentionDCMHA": "vha_paddle.attention.composed",
    "RotaryTables": "vha_paddle.attention.base",
    "VirtualHeadAttention": "vha_paddle.config",
    "GroupedAttention": "vha_paddle.config",
    "LatentAttention": "vha_paddle.config",
    "FactorizedAttention": "vha_paddle.config",
    "GroupedValueAttention": "vha_paddle.config",
    "ComposedAttention": "vha_paddle.config",
    "build_decoder": "vha_paddle.model.decoder",
    "load_recipe": "vha_paddle.config",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
