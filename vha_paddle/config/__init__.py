"""The recipe of a run: schema, rules, loading."""

from vha_paddle.config.attention import (
    Attention,
    ComposedAttention,
    FactorizedAttention,
    GroupedAttention,
    GroupedValueAttention,
    LatentAttention,
    VirtualHeadAttention,
)
from vha_paddle.config.load import load_recipe, recipe_from_dict, recipe_to_yaml
from vha_paddle.config.model import MixtureOfExperts, Model, SlidingWindow
from vha_paddle.config.schema import Memory, Parallel, Precision, Recipe

__all__ = [
    "Attention",
    "ComposedAttention",
    "FactorizedAttention",
    "GroupedAttention",
    "GroupedValueAttention",
    "LatentAttention",
    "Memory",
    "MixtureOfExperts",
    "Model",
    "Parallel",
    "Precision",
    "Recipe",
    "SlidingWindow",
    "VirtualHeadAttention",
    "load_recipe",
    "recipe_from_dict",
    "recipe_to_yaml",
]
