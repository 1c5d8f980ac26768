"""Grouped value attention, which absorbs its key map, against an oracle that writes every content key out."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.attention.layer_checks import THETA, assert_causal, assert_layer_equals_oracle, assert_oracle_gradients
from tests.oracles.grouped_value import GroupedValueSpec, backward, forward
from vha_paddle.attention.grouped_value import SelfAttentionGVA
from vha_paddle.config import GroupedValueAttention


def config(num_value_heads: int) -> GroupedValueAttention:
    return GroupedValueAttention(
        kind="gva", num_attention_heads=6, num_key_value_heads=num_value_heads, head_dim=5, qk_rope_head_dim=4
    )


def spec(num_value_heads: int) -> GroupedValueSpec:
    return GroupedValueSpec(num_heads=6, num_value_heads=num_value_heads, head_dim=5, rotary=4, theta=THETA)


VALUE_HEADS = pytest.mark.parametrize("num_value_heads", [1, 2, 6])


@VALUE_HEADS
def test_the_oracles_gradients_equal_finite_differences(num_value_heads: int) -> None:
    assert_oracle_gradients(config(num_value_heads), forward, backward, spec(num_value_heads))


@VALUE_HEADS
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_output_and_gradients_equal_the_oracle(num_value_heads: int, recompute: str) -> None:
    assert_layer_equals_oracle(config(num_value_heads), forward, backward, spec(num_value_heads), recompute)


def test_a_later_token_leaves_earlier_outputs_bit_equal() -> None:
    assert_causal(config(2))


def test_content_keys_start_at_the_scale_of_the_values() -> None:
    paddle.seed(0)
    layer = SelfAttentionGVA(8, config(2).model_copy(update={"head_dim": 64}))
    values = np.random.default_rng(0).standard_normal((1000, 64))
    for key_map in layer.key_map.numpy():
        assert (values @ key_map).std() == pytest.approx(1, rel=0.1)
