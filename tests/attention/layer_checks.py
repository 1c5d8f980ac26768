"""A layer against its oracle, and the oracle against itself: what the tests of every kind share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle import nn

from tests.cases import NORM_EPS
from tests.oracles.test_oracles import assert_gradients
from tests.tolerances import FLOAT64, assert_close
from tests.weights import trained_attention
from vha_paddle.attention import REGISTRY
from vha_paddle.attention.base import RotaryTables
from vha_paddle.config import Attention
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.scope import Scope

HIDDEN, BATCH, SEQUENCE, THETA = 10, 2, 7, 50.0

Weights = Mapping[str, np.ndarray]
Forward = Callable[[np.ndarray, Weights, Any], tuple[np.ndarray, dict[str, Any]]]
Backward = Callable[[np.ndarray, Mapping[str, Any]], tuple[np.ndarray, dict[str, np.ndarray]]]


def inputs_and_gradient() -> tuple[np.ndarray, np.ndarray]:
    """An input of the layer, and the gradient of its output."""
    x, dout = np.random.default_rng(1).standard_normal((2, BATCH, SEQUENCE, HIDDEN))
    return x, dout


def build(config: Attention, weights: Weights, recompute: str = "none", **options: Any) -> nn.Layer:
    """The layer in float64 with these weights, which are all it has; `options` are the kind's own."""
    scope = Scope(Mesh(), "float64", 0, "self_attn", recompute)
    layer = REGISTRY[config.kind](HIDDEN, config, NORM_EPS, scope=scope, **options)
    parameters = dict(layer.named_parameters())
    assert set(parameters) == set(weights)
    for name, parameter in parameters.items():
        parameter.set_value(paddle.to_tensor(weights[name]))
    return layer


def assert_oracle_gradients(config: Attention, forward: Forward, backward: Backward, spec: Any) -> None:
    """The oracle's backward against finite differences of its forward."""
    weights, (x, dout) = trained_attention(config, HIDDEN, seed=0), inputs_and_gradient()
    dx, dweights = backward(dout, forward(x, weights, spec)[1])

    def loss(inputs: Weights) -> float:
        return float(np.sum(dout * forward(inputs["x"], inputs, spec)[0]))

    assert_gradients(loss, {"x": x, **weights}, {"x": dx, **dweights})


def assert_layer_equals_oracle(
    config: Attention, forward: Forward, backward: Backward, spec: Any, recompute: str = "none", **options: Any
) -> None:
    """Output, gradient of the input and of every weight."""
    weights, (x, dout) = trained_attention(config, HIDDEN, seed=0), inputs_and_gradient()
    expected, cache = forward(x, weights, spec)
    expected_dx, expected_dweights = backward(dout, cache)
    layer = build(config, weights, recompute, **options)
    x_BSD = paddle.to_tensor(x, stop_gradient=False)
    y_BSD = layer(x_BSD, RotaryTables(config.rope_dim, THETA, "float64"))
    y_BSD.backward(paddle.to_tensor(dout))
    assert_close(y_BSD.numpy(), expected, FLOAT64, "output")
    assert_close(x_BSD.grad.numpy(), expected_dx, FLOAT64, "input gradient")
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad.numpy(), expected_dweights[name], FLOAT64, name)


def assert_causal(config: Attention) -> None:
    """A later token, however large, leaves earlier outputs bit-equal."""
    layer = build(config, trained_attention(config, HIDDEN, seed=0))
    x, rope = inputs_and_gradient()[0], RotaryTables(config.rope_dim, THETA, "float64")
    before = layer(paddle.to_tensor(x), rope).numpy()
    x[:, 4] *= 1e30  # so large that the smallest weight on it would show
    after = layer(paddle.to_tensor(x), rope).numpy()
    assert np.array_equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(axis=-1).all()
