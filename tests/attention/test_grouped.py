"""Grouped-query attention: the layer against its oracle, with its gate, its biases, without norms, through a window."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from tests.attention.layer_checks import (
    HIDDEN,
    THETA,
    assert_causal,
    assert_layer_equals_oracle,
    build,
    inputs_and_gradient,
)
from tests.cases import oracle_attention
from tests.oracles.attention import attention_backward, attention_forward
from tests.weights import trained_attention
from vha_paddle.attention.base import RotaryTables
from vha_paddle.config import GroupedAttention


def config(num_kv: int, output_gate: bool = False, **keys: Any) -> GroupedAttention:
    return GroupedAttention(
        kind="grouped", num_attention_heads=6, num_key_value_heads=num_kv, head_dim=4, output_gate=output_gate, **keys
    )


@pytest.mark.parametrize("num_kv", [1, 2, 6], ids=["multi-query", "grouped", "multi-head"])
@pytest.mark.parametrize("output_gate", [False, True], ids=["no gate", "gate"])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_output_and_gradients_equal_the_oracle(
    num_kv: int, output_gate: bool, window: int | None, recompute: str
) -> None:
    attention = config(num_kv, output_gate)
    spec = oracle_attention(attention, HIDDEN, THETA, window)
    assert_layer_equals_oracle(attention, attention_forward, attention_backward, spec, recompute, window=window)


@pytest.mark.parametrize("num_kv", [1, 2, 6], ids=["multi-query", "grouped", "multi-head"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["no QK-norm", "QK-norm"])
@pytest.mark.parametrize("attention_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_with_biases_and_without_norms(num_kv: int, qk_norm: bool, attention_bias: bool, recompute: str) -> None:
    attention = config(num_kv, output_gate=attention_bias, qk_norm=qk_norm, attention_bias=attention_bias)
    spec = oracle_attention(attention, HIDDEN, THETA)
    assert_layer_equals_oracle(attention, attention_forward, attention_backward, spec, recompute)


def test_a_later_token_leaves_earlier_outputs_bit_equal() -> None:
    assert_causal(config(2, output_gate=True))


def test_a_token_that_left_the_window_changes_nothing() -> None:
    attention = config(2)
    layer = build(attention, trained_attention(attention, HIDDEN, seed=0), window=3)
    x, rope = inputs_and_gradient()[0], RotaryTables(attention.rope_dim, THETA, "float64")
    before = layer(paddle.to_tensor(x), rope).numpy()
    x[:, 1] *= 1e3
    after = layer(paddle.to_tensor(x), rope).numpy()
    assert np.array_equal(before[:, 4:], after[:, 4:])  # the queries at 1, 2 and 3 saw it
    assert (before[:, 1:4] != after[:, 1:4]).any(axis=-1).all()
