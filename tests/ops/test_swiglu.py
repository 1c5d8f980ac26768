from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.ops.conftest import assert_gradients
from tests.oracles import ops as oracle
from vha_paddle.ops.swiglu import swiglu


def equations(gate: np.ndarray, up: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """silu(gate) * up, and the gradients with respect to both: silu'(z) = s + z s (1 - s)."""
    s = oracle.sigmoid(gate)
    return gate * s * up, dy * up * (s + gate * s * (1 - s)), dy * gate * s


@pytest.mark.parametrize("shape", [(2, 5, 13), (1, 1, 1), (3, 700)])
def test_swiglu_and_its_gradients_equal_the_equations(shape: tuple[int, ...], dtype: str, threads: int) -> None:
    rng = np.random.default_rng(1)
    gate, up, dy = rng.normal(0, 3, size=shape), rng.normal(size=shape), rng.normal(size=shape)
    y, dgate, dup = equations(gate, up, dy)
    assert_gradients(swiglu, {"gate": gate, "up": up}, y, dy, {"gate": dgate, "up": dup}, dtype)


def test_many_blocks_of_rows_give_the_same_as_one(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr("vha_paddle.ops.backend._BLOCK_BYTES", 5 * 12 * 8)
    rng = np.random.default_rng(2)
    gate, up, dy = (rng.normal(size=(1, 37, 12)) for _ in range(3))
    y, dgate, dup = equations(gate, up, dy)
    assert_gradients(swiglu, {"gate": gate, "up": up}, y, dy, {"gate": dgate, "up": dup}, "float64")


@pytest.mark.filterwarnings("error")
def test_gates_beyond_the_range_of_exp_give_the_limits(dtype: str) -> None:
    gate = paddle.to_tensor([-1e4, 1e4], dtype, stop_gradient=False)
    up = paddle.to_tensor([2.0, 2.0], dtype, stop_gradient=False)
    y = swiglu(gate, up)
    y.sum().backward()
    np.testing.assert_array_equal(y.numpy(), [0.0, 2e4])
    np.testing.assert_array_equal(gate.grad.numpy(), [0.0, 2.0])
    np.testing.assert_array_equal(up.grad.numpy(), [0.0, 1e4])


def test_operands_of_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        swiglu(paddle.zeros([2, 4]), paddle.zeros([2, 5]))
