"""A layer holds its config to the rules of a recipe, and its rotary tables to its config."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from vha_paddle.attention import REGISTRY
from vha_paddle.attention.base import RotaryTables
from vha_paddle.config import (
    Attention,
    ComposedAttention,
    FactorizedAttention,
    GroupedAttention,
    GroupedValueAttention,
    LatentAttention,
    VirtualHeadAttention,
)
from vha_paddle.errors import UserError

HIDDEN = 16
CONFIGS: dict[str, Attention] = {
    "grouped": GroupedAttention(num_attention_heads=4, num_key_value_heads=2, head_dim=8),
    "vha": VirtualHeadAttention(num_attention_heads=4, num_key_value_heads=2, head_dim=8, postmix_rank=1),
    "mla": LatentAttention(num_attention_heads=2, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6),
    "mfa": FactorizedAttention(num_attention_heads=2, head_dim=8, q_lora_rank=8),
    "gva": GroupedValueAttention(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_rope_head_dim=4),
    "dcmha": ComposedAttention(num_attention_heads=4, head_dim=8, num_groups=2),
}
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    (
        "grouped",
        {"num_attention_heads": 5},
        "num_attention_heads=5: must be a multiple of config.num_key_value_heads=2",
    ),
    ("grouped", {"head_dim": 7}, "head_dim=7: RoPE turns pairs of channels, so it must be even; use 8"),
    (
        "vha",
        {"postmix_space": "weight", "postmix": "silu"},
        "postmix_space=weight: SiLU lies between Postmix's factors",
    ),
    ("vha", {"postmix_rank": None}, "postmix_rank=null: required with postmix=linear"),
    ("vha", {"physical_head_dim": 4}, "premix_init=scaled: there is no identity between physical_head_dim=4 and"),
    ("vha", {"num_attention_heads": 5}, "num_attention_heads=5: must be a multiple of config.num_key_value_heads=2"),
    ("mla", {"qk_rope_head_dim": 5}, "qk_rope_head_dim=5: RoPE turns pairs of channels"),
    ("mfa", {"head_dim": 7}, "head_dim=7: RoPE turns pairs of channels"),
    ("gva", {"qk_rope_head_dim": 5}, "qk_rope_head_dim=5: RoPE turns pairs of channels"),
    ("gva", {"num_attention_heads": 5}, "num_attention_heads=5: must be a multiple of config.num_key_value_heads=2"),
    ("dcmha", {"num_groups": 3}, "num_groups=3: must divide config.num_attention_heads=4"),
]


@pytest.mark.parametrize("kind", REGISTRY)
def test_a_section_built_by_its_class_knows_its_kind(kind: str) -> None:
    assert CONFIGS[kind].kind == kind
    REGISTRY[kind](HIDDEN, CONFIGS[kind])


@pytest.mark.parametrize(("kind", "changes", "expected"), BROKEN)
def test_a_layer_refuses_what_a_recipe_refuses(kind: str, changes: dict[str, Any], expected: str) -> None:
    config = type(CONFIGS[kind])(**CONFIGS[kind].model_dump() | changes)
    with pytest.raises(UserError) as caught:
        REGISTRY[kind](HIDDEN, config)
    assert str(caught.value).startswith(f"config.{expected}")


@pytest.mark.parametrize("kind", REGISTRY)
def test_a_config_of_another_class_is_named_with_the_one_expected(kind: str) -> None:
    others: list[Any] = [config for other, config in CONFIGS.items() if other != kind]
    for config in [*others, CONFIGS[kind].model_dump(), None]:
        expected = f"config: must be a vha_paddle.{type(CONFIGS[kind]).__name__}, not {type(config).__name__}"
        with pytest.raises(TypeError, match=f"^{expected}$"):
            REGISTRY[kind](HIDDEN, config)


@pytest.mark.parametrize("kind", REGISTRY)
def test_rotary_tables_of_another_width_are_named(kind: str) -> None:
    layer, width = REGISTRY[kind](HIDDEN, CONFIGS[kind]), CONFIGS[kind].rope_dim
    x_BSD = paddle.zeros([1, 3, HIDDEN])
    assert layer(x_BSD, RotaryTables(width, 1e4, "float32")).shape == x_BSD.shape
    with pytest.raises(
        ValueError, match=rf"^RotaryTables\(head_dim=2\): .* the config's rope_dim; use head_dim={width}$"
    ):
        layer(x_BSD, RotaryTables(2, 1e4, "float32"))
