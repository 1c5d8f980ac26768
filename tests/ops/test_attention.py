from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.ops.conftest import Arrays, assert_gradients
from tests.oracles import ops as oracle
from vha_paddle.ops import attention
from vha_paddle.ops.attention import causal_attention

# B, S, N, K, H
SHAPES = {
    "grouped": (2, 13, 6, 2, 5),
    "one KV head": (1, 10, 4, 1, 3),
    "a KV head each": (2, 9, 3, 3, 4),
    "one head": (1, 8, 1, 1, 2),
    "one position": (3, 1, 4, 2, 6),
    "many heads": (1, 7, 20, 10, 2),
}


@pytest.fixture(params=[1 << 26, 0], ids=["kept", "computed again"])
def probabilities(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_KEPT_PROBABILITIES", request.param)


def random_inputs(shape: tuple[int, ...]) -> tuple[Arrays, np.ndarray]:
    B, S, N, K, H = shape
    rng = np.random.default_rng(1)
    heads = {"q_BSNH": N, "k_BSKH": K, "v_BSKH": K}
    inputs = {name: rng.normal(0, 1.5, (B, S, count, H)) for name, count in heads.items()}
    return inputs, rng.normal(size=(B, S, N, H))


def assert_equals_the_equations(shape: tuple[int, ...], dtype: str) -> None:
    inputs, dy = random_inputs(shape)
    y, cache = oracle.causal_attention(*inputs.values())
    gradients = dict(zip(inputs, oracle.causal_attention_backward(dy, cache), strict=True))
    assert_gradients(causal_attention, inputs, y, dy, gradients, dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_and_its_gradients_equal_the_equations(shape: tuple[int, ...], dtype: str, threads: int) -> None:
    assert_equals_the_equations(shape, dtype)


@pytest.mark.parametrize("block_rows", [1, 6, 12, 13], ids=lambda rows: f"{rows} rows")
def test_the_blocks_do_not_show(
    block_rows: int, probabilities: None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", block_rows)
    for shape in SHAPES.values():
        assert_equals_the_equations(shape, "float64")


def test_a_sequence_longer_than_a_block_equals_the_equations(probabilities: None, dtype: str) -> None:
    assert_equals_the_equations((1, 2 * attention._BLOCK_ROWS // 2 + 3, 2, 1, 4), dtype)


@pytest.mark.parametrize("t", [0, 5, 12])
def test_outputs_before_a_changed_token_stay_bit_equal(t: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", 12)  # 4 positions
    inputs, _ = random_inputs(SHAPES["grouped"])
    before = [paddle.to_tensor(x.astype(dtype)) for x in inputs.values()]
    after = [x.clone() for x in before]
    for x, factor in zip(after, [1e6, 1e6, 1e30], strict=True):
        x[:, t] *= factor  # so large that the smallest weight on it would show
    y, changed = causal_attention(*before).numpy(), causal_attention(*after).numpy()
    np.testing.assert_array_equal(changed[:, :t], y[:, :t])
    assert (changed[:, t] != y[:, t]).any()


def test_scores_far_apart_stay_exact(dtype: str) -> None:
    q_BSNH = paddle.to_tensor([[[[1e4]], [[1e4]]]], dtype)
    k_BSKH = paddle.to_tensor([[[[1.0]], [[-1.0]]]], dtype)
    v_BSKH = paddle.to_tensor([[[[3.0]], [[5.0]]]], dtype)
    np.testing.assert_array_equal(causal_attention(q_BSNH, k_BSKH, v_BSKH).numpy(), [[[[3.0]], [[3.0]]]])


def test_the_form_in_paddle_operations_is_the_same_function() -> None:
    inputs, dy = random_inputs(SHAPES["grouped"])
    y, cache = oracle.causal_attention(*inputs.values())
    gradients = dict(zip(inputs, oracle.causal_attention_backward(dy, cache), strict=True))
    assert_gradients(attention._attention_with_paddle, inputs, y, dy, gradients, "float64")


def test_heads_that_do_not_divide_are_refused() -> None:
    q_BSNH, k_BSKH = paddle.zeros([1, 3, 4, 2]), paddle.zeros([1, 3, 3, 2])
    with pytest.raises(ValueError, match="do not fit"):
        causal_attention(q_BSNH, k_BSKH, k_BSKH)
