from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.ops.conftest import assert_gradients
from tests.oracles import ops as oracle
from vha_paddle.ops.norm import rms_norm

EPS = 1e-6


@pytest.mark.parametrize("shape", [(2, 5, 24), (2, 5, 3, 7), (1, 4)], ids=["hidden", "heads", "one row"])
def test_rms_norm_and_its_gradients_equal_the_equations(shape: tuple[int, ...], dtype: str, threads: int) -> None:
    rng = np.random.default_rng(1)
    x, weight, dy = rng.normal(size=shape), rng.normal(1, 0.3, size=shape[-1]), rng.normal(size=shape)
    y, cache = oracle.rms_norm(x, weight, EPS)
    dx, dweight = oracle.rms_norm_backward(dy, cache)
    assert_gradients(
        lambda x, weight: rms_norm(x, weight, EPS),
        {"x": x, "weight": weight},
        y,
        dy,
        {"x": dx, "weight": dweight},
        dtype,
    )


def test_many_blocks_of_rows_give_the_same_as_one(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr("vha_paddle.ops.backend._BLOCK_BYTES", 5 * 12 * 8)
    rng = np.random.default_rng(2)
    x, weight, dy = rng.normal(size=(1, 37, 12)), rng.normal(size=12), rng.normal(size=(1, 37, 12))
    y, cache = oracle.rms_norm(x, weight, EPS)
    dx, dweight = oracle.rms_norm_backward(dy, cache)
    operation = lambda x, weight: rms_norm(x, weight, EPS)  # noqa: E731
    assert_gradients(operation, {"x": x, "weight": weight}, y, dy, {"x": dx, "weight": dweight}, "float64")


def test_eps_keeps_a_row_of_zeros_finite() -> None:
    x = paddle.zeros([2, 4], "float64")
    x.stop_gradient = False
    rms_norm(x, paddle.ones([4], "float64"), EPS).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.full((2, 4), EPS**-0.5), rtol=1e-12)


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(paddle.zeros([2, 4]), paddle.ones([5]), EPS)
