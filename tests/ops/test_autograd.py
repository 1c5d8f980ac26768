"""What autograd asks of every operation, whatever it computes.

Not a second backward through a retained graph: Paddle 3.3.1 crashes there with any PyLayer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paddle
import pytest

from vha_paddle.ops.attention import causal_attention
from vha_paddle.ops.dropout import dropout
from vha_paddle.ops.linear import linear
from vha_paddle.ops.loss import cross_entropy
from vha_paddle.ops.norm import rms_norm
from vha_paddle.ops.rope import apply_rope, rope_tables
from vha_paddle.ops.swiglu import swiglu


@dataclass(frozen=True)
class Case:
    operation: Callable[..., paddle.Tensor]
    shapes: tuple[tuple[int, ...], ...]


TABLES = rope_tables(4, 10_000.0, 5, "float64")
LABELS = paddle.to_tensor([[0, 3, 6, 2, 2]])
CASES = {
    "rms_norm": Case(lambda x, weight: rms_norm(x, weight, 1e-6), ((2, 5, 8), (8,))),
    "apply_rope": Case(lambda x: apply_rope(x, *TABLES), ((2, 5, 3, 4),)),
    "causal_attention": Case(causal_attention, ((1, 5, 4, 3), (1, 5, 2, 3), (1, 5, 2, 3))),
    "attention of pieces": Case(
        lambda q, k, v: causal_attention(q, k, v, [(0, 2), (5, 8)]), ((1, 5, 4, 3), (1, 9, 2, 3), (1, 9, 2, 3))
    ),
    "attention through a window": Case(
        lambda q, k, v: causal_attention(q, k, v, window=2, scale=0.7), ((1, 5, 4, 3), (1, 5, 2, 3), (1, 5, 2, 4))
    ),
    "dropout": Case(lambda x: dropout(x, 0.3, 7, np.arange(2), np.arange(5)), ((2, 5, 6),)),
    "swiglu": Case(swiglu, ((2, 5, 6), (2, 5, 6))),
    "linear": Case(linear, ((2, 5, 6), (6, 3))),
    "cross_entropy": Case(lambda x: cross_entropy(x, LABELS), ((1, 5, 7),)),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def leaves(case: Case) -> list[paddle.Tensor]:
    rng = np.random.default_rng(1)
    return [paddle.to_tensor(rng.normal(size=shape), stop_gradient=False) for shape in case.shapes]


def gradients(case: Case, inputs: list[paddle.Tensor]) -> list[np.ndarray]:
    case.operation(*inputs).square().sum().backward()
    return [x.grad.numpy() for x in inputs]


def test_without_gradients_the_output_is_the_same_and_wants_none(case: Case) -> None:
    inputs = leaves(case)
    expected = case.operation(*inputs)
    assert not expected.stop_gradient
    with paddle.no_grad():
        output = case.operation(*inputs)
    assert output.stop_gradient
    np.testing.assert_array_equal(output.numpy(), expected.numpy())


def test_an_input_that_wants_no_gradient_gets_none_and_the_others_theirs(case: Case) -> None:
    expected = gradients(case, leaves(case))
    for frozen in range(len(case.shapes) if len(case.shapes) > 1 else 0):
        inputs = leaves(case)
        inputs[frozen].stop_gradient = True
        case.operation(*inputs).square().sum().backward()
        for i, x in enumerate(inputs):
            if i == frozen:
                assert x.grad is None
            else:
                np.testing.assert_array_equal(x.grad.numpy(), expected[i])


def test_constant_inputs_give_a_constant(case: Case) -> None:
    inputs = leaves(case)
    for x in inputs:
        x.stop_gradient = True
    assert case.operation(*inputs).stop_gradient


def test_a_second_backward_accumulates_the_same_gradient(case: Case) -> None:
    expected = gradients(case, leaves(case))
    inputs = leaves(case)
    gradients(case, inputs)
    for twice, once in zip(gradients(case, inputs), expected, strict=True):
        np.testing.assert_allclose(twice, 2 * once, rtol=1e-12)


def test_neither_inputs_nor_incoming_gradients_are_written_to(case: Case) -> None:
    inputs = leaves(case)
    before = [x.numpy() for x in inputs]
    output = case.operation(*inputs)
    kept = output.numpy()
    gradient = paddle.ones_like(output)
    output.backward(gradient)
    np.testing.assert_array_equal(gradient.numpy(), np.ones(output.shape))
    np.testing.assert_array_equal(output.numpy(), kept)
    for x, value in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x.numpy(), value)


def test_strided_inputs_and_gradients_give_the_same(case: Case) -> None:
    expected = gradients(case, leaves(case))
    inputs = leaves(case)
    wide = [paddle.stack([x, x], axis=-1) for x in inputs]
    output = case.operation(*(x[..., 1] for x in wide))
    order = list(range(output.ndim))[::-1]
    output.transpose(order).square().sum().backward()
    for x, value in zip(inputs, expected, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), value, rtol=1e-12)


def test_two_runs_give_the_same_bits(case: Case, threads: int) -> None:
    for first, second in zip(gradients(case, leaves(case)), gradients(case, leaves(case)), strict=True):
        np.testing.assert_array_equal(first, second)
