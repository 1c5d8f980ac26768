from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import pytest

from tests.ops.conftest import assert_gradients
from vha_paddle.ops import linear as module
from vha_paddle.ops.linear import PLAIN, linear


@pytest.fixture(params=[1, 2, 128], ids=lambda rows: f"shares of {rows}")
def min_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_ROWS", request.param)


@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 1, 9), (11, 4), (2, 2, 2, 3)])
def test_linear_and_its_gradients_equal_the_equations(
    shape: tuple[int, ...], dtype: str, threads: int, min_rows: None
) -> None:
    rng = np.random.default_rng(1)
    x, weight, dy = rng.normal(size=shape), rng.normal(size=(shape[-1], 6)), rng.normal(size=(*shape[:-1], 6))
    dweight = np.einsum("ri,ro->io", x.reshape(-1, shape[-1]), dy.reshape(-1, 6))
    expected = {"x": dy @ weight.T, "weight": dweight}
    assert_gradients(linear, {"x": x, "weight": weight}, x @ weight, dy, expected, dtype)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_the_product_of_an_unwanted_gradient_is_not_computed(frozen: str) -> None:
    unwanted = {"x": "input_gradient", "weight": "weight_gradient"}[frozen]
    inputs = {"x": paddle.ones([3, 4]), "weight": paddle.ones([4, 2])}
    for name, tensor in inputs.items():
        tensor.stop_gradient = name == frozen
    linear(**inputs, products=replace(PLAIN, **{unwanted: None})).sum().backward()
    assert inputs[frozen].grad is None


def test_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        linear(paddle.zeros([2, 4]), paddle.zeros([5, 4]))
