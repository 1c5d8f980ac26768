"""Data and threads for the tests of the operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import paddle
import pytest
import threadpoolctl

from tests.tolerances import FLOAT32, FLOAT64, assert_close

TOLERANCES = {"float64": FLOAT64, "float32": FLOAT32}
Arrays = dict[str, np.ndarray]


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threadpoolctl.threadpool_limits(request.param, user_api="openmp"):
        yield request.param


def assert_gradients(
    operation: Callable[..., paddle.Tensor],
    inputs: Arrays,
    expected: np.ndarray,
    gradient: np.ndarray,
    expected_gradients: Arrays,
    dtype: str,
) -> None:
    """`operation(**inputs)` must be `expected`, and what comes back from `gradient` `expected_gradients`."""
    tensors = {name: paddle.to_tensor(x.astype(dtype), stop_gradient=False) for name, x in inputs.items()}
    output = operation(**tensors)
    output.backward(paddle.to_tensor(gradient.astype(dtype)))
    assert_close(output.numpy(), expected, TOLERANCES[dtype], "output")
    for name, tensor in tensors.items():
        assert tensor.grad.dtype == tensor.dtype
        assert_close(tensor.grad.numpy(), expected_gradients[name], TOLERANCES[dtype], f"gradient of {name}")
