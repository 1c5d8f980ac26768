"""A linear map whose factors are rounded to FP8: output and both gradients against the oracle."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import paddle
import pytest

from tests.ops.conftest import assert_gradients, dtype, threads  # noqa: F401
from tests.oracles.fp8 import fp8_linear
from tests.tolerances import FLOAT64, relative_error
from vha_paddle.ops.grouped_linear import grouped_linear
from vha_paddle.ops.linear import PLAIN, linear
from vha_paddle.precision.emulation import EMULATED
from vha_paddle.precision.policy import expert_products, projection_products


def factors(rows: int, inner: int, outer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, W and dy of which every tile has a magnitude of its own."""
    rng = np.random.default_rng(rows)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))

    return draw(rows, inner), draw(inner, outer), draw(rows, outer)


@pytest.mark.parametrize("sizes", [(7, 130, 5), (300, 128, 257), (129, 384, 200)], ids=str)
def test_the_three_products_are_those_of_the_rounded_factors(
    sizes: tuple[int, int, int],
    dtype: str,  # noqa: F811
    threads: int,  # noqa: F811
) -> None:
    x, weight, dy = (array.astype(dtype) for array in factors(*sizes))
    y, dx, dweight = fp8_linear(x, weight, dy)
    operation = functools.partial(linear, products=EMULATED)
    assert_gradients(operation, {"x": x, "weight": weight}, y, dy, {"x": dx, "weight": dweight}, dtype)


def test_leading_axes_are_rows() -> None:
    x, weight, _ = factors(6, 140, 9)
    flat = linear(paddle.to_tensor(x), paddle.to_tensor(weight), EMULATED)
    cut = linear(paddle.to_tensor(x.reshape(2, 3, 140)), paddle.to_tensor(weight), EMULATED)
    assert cut.shape == [2, 3, 9] and np.array_equal(cut.numpy().reshape(6, 9), flat.numpy())


@pytest.mark.parametrize("product", ["output", "input_gradient", "weight_gradient"])
def test_every_product_rounds(product: str) -> None:
    """The oracle's errors are of the size of E4M3's, so no product that is computed plainly would pass above."""
    x, weight, dy = (paddle.to_tensor(array) for array in factors(130, 130, 130))
    arguments = {"output": (x, weight), "input_gradient": (dy, weight), "weight_gradient": (x, dy)}[product]
    exact, rounded = (getattr(products, product)(*arguments).numpy() for products in (PLAIN, EMULATED))
    assert 100 * FLOAT64 < 1e-3 < relative_error(rounded, exact) < 0.1


@pytest.mark.parametrize(("fp8", "projections", "experts"), [("none", PLAIN, PLAIN), ("experts", PLAIN, EMULATED)])
def test_the_recipe_says_whose_products(fp8: str, projections: object, experts: object) -> None:
    assert projection_products(fp8) is projections and expert_products(fp8) is experts  # type: ignore[arg-type]
    assert projection_products("all") is EMULATED and expert_products("all") is EMULATED


def test_the_product_of_an_unwanted_gradient_is_not_computed() -> None:
    x, weight = paddle.ones([3, 4]), paddle.ones([4, 2])
    x.stop_gradient, weight.stop_gradient = True, False
    linear(x, weight, replace(EMULATED, input_gradient=None)).sum().backward()  # type: ignore[arg-type]
    assert x.grad is None and weight.grad is not None


def test_each_expert_is_rounded_on_its_own() -> None:
    """Blocks of each matrix, and in the weight gradient tiles down each expert's own rows."""
    counts = [130, 0, 5, 200]
    rng = np.random.default_rng(5)
    x, weights, dy = (rng.standard_normal(shape) for shape in ((335, 140), (4, 140, 131), (335, 131)))
    y, dx, dweights = np.zeros((335, 131)), np.zeros((335, 140)), np.zeros((4, 140, 131))
    for expert, last in enumerate(np.cumsum(counts)):
        rows = slice(last - counts[expert], last)
        if counts[expert]:
            y[rows], dx[rows], dweights[expert] = fp8_linear(x[rows], weights[expert], dy[rows])
    operation = functools.partial(grouped_linear, counts_E=counts, products=EMULATED)
    inputs, expected = {"x_RD": x, "weight_EDF": weights}, {"x_RD": dx, "weight_EDF": dweights}
    assert_gradients(operation, inputs, y, dy, expected, "float64")
