"""The recipe of a run: schema, rules, loading."""

from vha_paddle.config.load import load_recipe, recipe_from_dict, recipe_to_yaml
from vha_paddle.config.schema import (
    Attention,
    GroupedAttention,
    Memory,
    Model,
    Parallel,
    Recipe,
    VirtualHeadAttention,
)

__all__ = [
    "Attention",
    "GroupedAttention",
    "Memory",
    "Model",
    "Parallel",
    "Recipe",
    "VirtualHeadAttention",
    "load_recipe",
    "recipe_from_dict",
    "recipe_to_yaml",
]
