"""Multi-head latent attention: the layer against its oracle, and decoding from the latent against the layer."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.attention.layer_checks import (
    HIDDEN,
    SEQUENCE,
    THETA,
    assert_causal,
    assert_layer_equals_oracle,
    assert_oracle_gradients,
    build,
    inputs_and_gradient,
)
from tests.cases import NORM_EPS
from tests.oracles.latent import LatentSpec, backward, forward
from tests.tolerances import FLOAT64, assert_close
from tests.weights import trained_attention
from vha_paddle.attention.base import RotaryTables
from vha_paddle.attention.latent import SelfAttentionMLA, absorbed_attention
from vha_paddle.config import LatentAttention


def config(q_lora_rank: int | None) -> LatentAttention:
    return LatentAttention(
        kind="mla",
        num_attention_heads=3,
        kv_lora_rank=5,
        q_lora_rank=q_lora_rank,
        qk_nope_head_dim=3,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )


def spec(q_lora_rank: int | None) -> LatentSpec:
    query_latent = q_lora_rank is not None
    sizes = {"num_heads": 3, "latent": 5, "content": 3, "rotary": 4, "value": 6}
    return LatentSpec(**sizes, query_latent=query_latent, theta=THETA, eps=NORM_EPS)


RANKS = pytest.mark.parametrize("q_lora_rank", [None, 7], ids=["queries projected", "queries from a latent"])


@RANKS
def test_the_oracles_gradients_equal_finite_differences(q_lora_rank: int | None) -> None:
    assert_oracle_gradients(config(q_lora_rank), forward, backward, spec(q_lora_rank))


@RANKS
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_output_and_gradients_equal_the_oracle(q_lora_rank: int | None, recompute: str) -> None:
    assert_layer_equals_oracle(config(q_lora_rank), forward, backward, spec(q_lora_rank), recompute)


def test_a_later_token_leaves_earlier_outputs_bit_equal() -> None:
    assert_causal(config(7))


@RANKS
def test_decoding_from_the_latent_equals_the_expanded_layer(q_lora_rank: int | None) -> None:
    """Token by token: only the latent and the rotary key of earlier tokens are kept, and scored as they are."""
    layer = build(config(q_lora_rank), trained_attention(config(q_lora_rank), HIDDEN, seed=0))
    assert isinstance(layer, SelfAttentionMLA)
    x_BSD, rope = paddle.to_tensor(inputs_and_gradient()[0]), RotaryTables(4, THETA, "float64")
    expected = layer(x_BSD, rope).numpy()
    cos_SR, sin_SR = rope.at(SEQUENCE, 4)
    latents, keys, outputs = [], [], []
    for t in range(SEQUENCE):
        x_B1D, here = x_BSD[:, t : t + 1], (cos_SR[t : t + 1], sin_SR[t : t + 1])
        latent_B1C, k_rope_B1R = layer.cached(layer.kv_a_proj_with_mqa(x_B1D), *here)
        assert latent_B1C.shape[-1] + k_rope_B1R.shape[-1] == 5 + 4  # all that is kept of a token
        latents.append(latent_B1C)
        keys.append(k_rope_B1R)
        y_B1NV = absorbed_attention(
            layer.rotated(layer.queries(x_B1D), *here),
            paddle.concat(latents, axis=1),
            paddle.concat(keys, axis=1),
            layer.kv_b_proj.weight,
            [(t, t + 1)],
        )
        outputs.append(layer.o_proj(y_B1NV.reshape([2, 1, -1])).numpy())
    assert_close(np.concatenate(outputs, axis=1), expected, FLOAT64, "decoded")


def test_absorbed_attention_of_a_whole_sequence_equals_the_expanded_layer() -> None:
    layer = build(config(None), trained_attention(config(None), HIDDEN, seed=0))
    assert isinstance(layer, SelfAttentionMLA)
    x_BSD, rope = paddle.to_tensor(inputs_and_gradient()[0]), RotaryTables(4, THETA, "float64")
    tables = rope.at(SEQUENCE, 4)
    cache = layer.cached(layer.kv_a_proj_with_mqa(x_BSD), *tables)
    y_BSNV = absorbed_attention(layer.rotated(layer.queries(x_BSD), *tables), *cache, layer.kv_b_proj.weight)
    y_BSD = layer.o_proj(y_BSNV.reshape([2, SEQUENCE, -1]))
    assert_close(y_BSD.numpy(), layer(x_BSD, rope).numpy(), FLOAT64, "absorbed")
