"""Multi-matrix factorization attention against its oracle."""

from __future__ import annotations

import pytest

from tests.attention.layer_checks import THETA, assert_causal, assert_layer_equals_oracle, assert_oracle_gradients
from tests.cases import NORM_EPS
from tests.oracles.factorized import FactorizedSpec, backward, forward
from vha_paddle.config import FactorizedAttention

CONFIG = FactorizedAttention(kind="mfa", num_attention_heads=5, head_dim=6, q_lora_rank=7)
SPEC = FactorizedSpec(num_heads=5, head_dim=6, theta=THETA, eps=NORM_EPS)


def test_the_oracles_gradients_equal_finite_differences() -> None:
    assert_oracle_gradients(CONFIG, forward, backward, SPEC)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_output_and_gradients_equal_the_oracle(recompute: str) -> None:
    assert_layer_equals_oracle(CONFIG, forward, backward, SPEC, recompute)


def test_a_later_token_leaves_earlier_outputs_bit_equal() -> None:
    assert_causal(CONFIG)
