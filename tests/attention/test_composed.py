"""Dynamically composable multi-head attention against its oracle, and how composition starts."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.attention.layer_checks import (
    HIDDEN,
    THETA,
    assert_causal,
    assert_layer_equals_oracle,
    assert_oracle_gradients,
    build,
    inputs_and_gradient,
)
from tests.cases import NORM_EPS
from tests.oracles.attention import attention_forward
from tests.oracles.composed import ComposedSpec, backward, forward
from tests.oracles.spec import OracleSpec
from tests.tolerances import FLOAT64, assert_close, relative_error
from tests.weights import trained_attention
from vha_paddle.attention.base import RotaryTables
from vha_paddle.attention.composed import SelfAttentionDCMHA
from vha_paddle.config import ComposedAttention

GROUPS = pytest.mark.parametrize(("num_groups", "rank"), [(1, 2), (2, 1), (3, 2)])
OF_COMPOSITION = ("pre_compose", "post_compose", "compose_factors", "diagonal_proj.weight")


def config(num_groups: int = 2, rank: int = 2) -> ComposedAttention:
    return ComposedAttention(kind="dcmha", num_attention_heads=6, head_dim=4, num_groups=num_groups, compose_rank=rank)


def spec(num_groups: int, rank: int) -> ComposedSpec:
    return ComposedSpec(num_heads=6, head_dim=4, num_groups=num_groups, rank=rank, theta=THETA, eps=NORM_EPS)


@GROUPS
def test_the_oracles_gradients_equal_finite_differences(num_groups: int, rank: int) -> None:
    assert_oracle_gradients(config(num_groups, rank), forward, backward, spec(num_groups, rank))


@GROUPS
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_output_and_gradients_equal_the_oracle(num_groups: int, rank: int, recompute: str) -> None:
    assert_layer_equals_oracle(config(num_groups, rank), forward, backward, spec(num_groups, rank), recompute)


def test_a_later_token_leaves_earlier_outputs_bit_equal() -> None:
    assert_causal(config())


def test_without_composition_it_is_multi_head_attention() -> None:
    weights = trained_attention(config(), HIDDEN, seed=0)
    weights |= {name: np.zeros_like(weights[name]) for name in OF_COMPOSITION}
    plain = OracleSpec(
        kind="grouped",
        hidden_size=HIDDEN,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=4,
        rope_theta=THETA,
        rms_norm_eps=NORM_EPS,
    )
    x, _ = inputs_and_gradient()
    actual = build(config(), weights)(paddle.to_tensor(x), RotaryTables(4, THETA, "float64")).numpy()
    assert_close(actual, attention_forward(x, weights, plain)[0], FLOAT64, "output")


def test_composition_starts_near_the_identity() -> None:
    """A departure of the order of the static matrices' 0.1; the parts that depend on a token are smaller."""
    paddle.seed(0)
    wide = ComposedAttention(kind="dcmha", num_attention_heads=16, head_dim=8, compose_rank=2)
    layer, rope = SelfAttentionDCMHA(64, wide), RotaryTables(8, THETA, "float32")
    x_BSD = paddle.randn([2, 12, 64])
    started = layer(x_BSD, rope).numpy()

    def zeroed(*names: str) -> np.ndarray:
        for name, parameter in layer.named_parameters():
            if name in names:
                parameter.set_value(paddle.zeros_like(parameter))
        return layer(x_BSD, rope).numpy()

    assert relative_error(zeroed("compose_factors", "diagonal_proj.weight"), started) < 0.05
    assert 1e-3 < relative_error(zeroed(*OF_COMPOSITION), started) < 0.5
