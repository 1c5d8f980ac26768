"""What two ranks do in test_gloo.py: fleet's layers, sharding and pipeline, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed import fleet

from tests.distributed.gloo_worlds import Case, pipeline, sharding, tensor
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from vha_paddle.parallel import gloo


def host(tensor: paddle.Tensor) -> np.ndarray:
    """Values in float64: exact for every dtype of these tests."""
    return tensor.astype("float64").numpy()


# ------------------------------------------------------------------------------- layers of tensor parallelism


def own_slice(array: np.ndarray, axis: int) -> np.ndarray:
    return np.split(array, 2, axis)[dist.get_rank()]


def assert_gradient(parameter: paddle.Tensor, expected: np.ndarray, dtype: str, name: str) -> None:
    assert_close(parameter.grad.numpy(), expected, FLOAT64 if dtype == "float64" else FLOAT32, f"{name} {dtype}")


def in_each_precision(case: Callable[[str], None]) -> Case:
    def both() -> None:
        for dtype in ("float32", "float64"):
            paddle.set_default_dtype(dtype)
            case(dtype)
        paddle.set_default_dtype("float32")

    both.__name__ = case.__name__
    return both


@tensor.case
@in_each_precision
def vocab_parallel_embedding_matches_one_process(dtype: str) -> None:
    rng = np.random.default_rng(1)
    table, upstream = rng.standard_normal((400, 8)).astype(dtype), rng.standard_normal((2, 7, 8)).astype(dtype)
    tokens = rng.integers(0, 400, (2, 7))
    layer = fleet.meta_parallel.VocabParallelEmbedding(400, 8)
    layer.weight.set_value(own_slice(table, 0))
    out = layer(paddle.to_tensor(tokens))
    loss = (out * paddle.to_tensor(upstream)).sum()
    used = [paddle.full([200, 8], np.nan) for _ in range(8)]
    del used  # so that the memory of a gradient is not zero by chance
    loss.backward()
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, upstream)
    assert_close(out.numpy(), table[tokens], FLOAT32, "embedding")
    assert_gradient(layer.weight, own_slice(expected, 0), dtype, "table")


@tensor.case
@in_each_precision
def column_parallel_linear_with_gathered_output_matches_one_process(dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, weight, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 5, 6), (6, 8), (8,)))
    upstream = rng.standard_normal((2, 5, 8)).astype(dtype)
    layer = fleet.meta_parallel.ColumnParallelLinear(6, 8, has_bias=True, gather_output=True)
    layer.weight.set_value(own_slice(weight, 1))
    layer.bias.set_value(own_slice(bias, 0))
    entry = paddle.to_tensor(x, stop_gradient=False)
    out = layer(entry)
    (out * paddle.to_tensor(upstream)).sum().backward()
    tolerance = FLOAT64 if dtype == "float64" else FLOAT32
    assert_close(out.numpy(), x @ weight + bias, tolerance, "output")
    assert_gradient(entry, upstream @ weight.T, dtype, "x")
    assert_gradient(layer.weight, own_slice(np.einsum("bsi,bso->io", x, upstream), 1), dtype, "weight")
    assert_gradient(layer.bias, own_slice(upstream.sum((0, 1)), 0), dtype, "bias")


@tensor.case
@in_each_precision
def row_parallel_linear_splits_its_input_and_gathers_its_gradient(dtype: str) -> None:
    rng = np.random.default_rng(3)
    x, weight, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((3, 8), (8, 5), (5,)))
    upstream = rng.standard_normal((3, 5)).astype(dtype)
    layer = fleet.meta_parallel.RowParallelLinear(8, 5, has_bias=True, input_is_parallel=False)
    layer.weight.set_value(own_slice(weight, 0))
    layer.bias.set_value(bias)
    entry = paddle.to_tensor(x, stop_gradient=False)
    out = layer(entry)
    (out * paddle.to_tensor(upstream)).sum().backward()
    tolerance = FLOAT64 if dtype == "float64" else FLOAT32
    assert_close(out.numpy(), x @ weight + bias, tolerance, "output")
    assert_gradient(entry, upstream @ weight.T, dtype, "x")
    assert_gradient(layer.weight, own_slice(x.T @ upstream, 0), dtype, "weight")
    assert_gradient(layer.bias, upstream.sum(0), dtype, "bias")


@tensor.case
@in_each_precision
def column_then_row_parallel_linear_matches_one_process(dtype: str) -> None:
    rng = np.random.default_rng(4)
    x, up, down = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 5, 6), (6, 8), (8, 6)))
    upstream = rng.standard_normal((2, 5, 6)).astype(dtype)
    first = fleet.meta_parallel.ColumnParallelLinear(6, 8, has_bias=False, gather_output=False)
    second = fleet.meta_parallel.RowParallelLinear(8, 6, has_bias=False, input_is_parallel=True)
    first.weight.set_value(own_slice(up, 1))
    second.weight.set_value(own_slice(down, 0))
    entry = paddle.to_tensor(x, stop_gradient=False)
    out = second(first(entry)) + entry  # a residual, whose gradient the sum over ranks must not touch
    (out * paddle.to_tensor(upstream)).sum().backward()
    hidden_gradient = upstream @ down.T
    assert_close(out.numpy(), x @ up @ down + x, FLOAT64 if dtype == "float64" else FLOAT32, "output")
    assert_gradient(entry, hidden_gradient @ up.T + upstream, dtype, "x")
    assert_gradient(first.weight, own_slice(np.einsum("bsi,bsf->if", x, hidden_gradient), 1), dtype, "up")
    assert_gradient(second.weight, own_slice(np.einsum("bsf,bso->fo", x @ up, upstream), 0), dtype, "down")


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype("float64") - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cross_entropy_case(logits: np.ndarray, labels: np.ndarray, dtype: str, tolerance: float, **options: int) -> None:
    """Loss and gradient of ParallelCrossEntropy against numpy in float64."""
    ignore_index = options.get("ignore_index", -100)
    used = labels != ignore_index
    upstream = np.random.default_rng(6).standard_normal(labels.shape)
    rounded = host(paddle.to_tensor(logits).astype(dtype))
    probabilities, at_label = softmax(rounded), np.where(used, labels, 0)[..., None]
    expected = np.where(used, -np.log(np.take_along_axis(probabilities, at_label, -1)[..., 0]), 0)
    gradient = probabilities.copy()
    np.put_along_axis(gradient, at_label, np.take_along_axis(gradient, at_label, -1) - 1, -1)
    gradient *= np.where(used, upstream, 0)[..., None]

    entry = paddle.to_tensor(own_slice(logits, -1)).astype(dtype)
    entry.stop_gradient = False
    before = entry.numpy().copy()
    loss = fleet.meta_parallel.ParallelCrossEntropy(**options)(entry, paddle.to_tensor(labels))
    assert loss.shape == [*labels.shape, 1] and loss.dtype == entry.dtype
    (loss[..., 0].astype("float64") * paddle.to_tensor(upstream)).sum().backward()
    assert_close(host(loss)[..., 0], expected, tolerance, f"loss {dtype}")
    assert_close(host(entry.grad), own_slice(gradient, -1), tolerance, f"gradient {dtype}")
    np.testing.assert_array_equal(entry.numpy(), before, err_msg="the logits are left as they were")


@tensor.case
def parallel_cross_entropy_matches_numpy_and_skips_ignored_labels() -> None:
    rng = np.random.default_rng(5)
    logits, labels = 3 * rng.standard_normal((2, 6, 14)), rng.integers(0, 14, (2, 6))
    for ignored in (-100, 3):
        labels[0, 2] = labels[1, 5] = ignored
        cross_entropy_case(logits, labels, "float64", FLOAT64, ignore_index=ignored)
        cross_entropy_case(logits, labels, "float32", FLOAT32, ignore_index=ignored)
        cross_entropy_case(logits, labels, "float16", 1e-3, ignore_index=ignored)


@tensor.case
def parallel_cross_entropy_is_stable_for_large_and_for_masked_logits() -> None:
    logits = np.array([[9e3, 9e3 - 2, -9e3, 9e3 - 1], [-1e4, -1e4 - 3, -1e4, -1e4 - 1], [500.0, -500, 499, 0]])
    cross_entropy_case(logits, np.array([1, 2, 2]), "float32", FLOAT32)
    logits[:, 2:] = -np.inf  # the second rank's part has nothing
    cross_entropy_case(logits, np.array([1, 0, 0]), "float32", FLOAT32)


@tensor.case
def a_label_outside_the_vocabulary_is_refused() -> None:
    for label in (8, -1):
        with pytest.raises(ValueError, match=f"label {label} is not in the vocabulary of 8"):
            fleet.meta_parallel.ParallelCrossEntropy()(paddle.ones([2, 4]), paddle.to_tensor([0, label]))


# ----------------------------------------------------------------------------------------- optimizer sharding


class Net(nn.Layer):
    """Two linears of odd sizes, the same at every call with the same seed."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(8)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        for parameter in self.parameters():
            parameter.set_value(rng.standard_normal(parameter.shape).astype("float32"))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.second(paddle.tanh(self.first(x)))


STEPS, RATE, CLIP = 3, 0.5, 0.2
CASES_XY = np.random.default_rng(9).standard_normal((STEPS, 4, 8)).astype("float32")


def sgd(parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """SGD, because Adam hides a wrong factor; clipping is active at every step."""
    clip = nn.ClipGradByGlobalNorm(CLIP)
    return paddle.optimizer.SGD(RATE, parameters=parameters, grad_clip=clip)


def train(net: nn.Layer, optimizer: Any, rows: slice) -> None:
    for batch in CASES_XY:
        x, y = paddle.to_tensor(batch[rows, :5]), paddle.to_tensor(batch[rows, 5:])
        ((net(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()


def trained_alone() -> list[np.ndarray]:
    net = Net()
    train(net, sgd(net.parameters()), slice(None))
    return [parameter.numpy() for parameter in net.parameters()]


def assert_trained(net: nn.Layer) -> None:
    for parameter, expected in zip(net.parameters(), trained_alone(), strict=True):
        assert_close(parameter.numpy(), expected, FLOAT32, parameter.name)


def own_rows() -> slice:
    return slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)


@sharding.case
def split_parameter_sharding_trains_as_one_process() -> None:
    net = Net()
    optimizer = fleet.distributed_optimizer(sgd(net.parameters()))
    model = fleet.distributed_model(net)
    train(model, optimizer, own_rows())
    assert_trained(net)


@sharding.case
def split_parameter_sharding_takes_float64() -> None:
    layer = nn.Linear(5, 3)
    layer.to(dtype="float64")
    rng = np.random.default_rng(12)
    before, x = rng.standard_normal((5, 3)), rng.standard_normal((2, 5))
    layer.weight.set_value(before)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(RATE, parameters=layer.parameters()))
    layer(paddle.to_tensor(x)).sum().backward()
    optimizer.step()
    expected = before - RATE * np.tile(x.sum(0)[:, None], 3)
    assert_close(layer.weight.numpy(), expected, FLOAT64, "weight")


@sharding.case
def zero_stage_2_trains_as_one_process() -> None:
    optimizer_class, stage2, _ = gloo.group_sharded_classes()
    net = Net()
    optimizer = optimizer_class(net.parameters(), sgd(net.parameters()), device="cpu")
    train(stage2(net, optimizer, device="cpu"), optimizer, own_rows())
    assert_trained(net)


@sharding.case
def zero_stage_3_trains_as_one_process() -> None:
    stage3 = gloo.group_sharded_classes()[2]
    net = Net()
    optimizer = sgd(net.parameters())
    model = stage3(net, optimizer, device="cpu", segment_size=8)
    train(model, optimizer, own_rows())
    model.get_all_parameters()
    assert_trained(net)


# -------------------------------------------------------------------------------------------- pipeline stages


class Shared(nn.Layer):
    """A matrix that the first stage multiplies by, and the last by its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([5, 7])
        self.weight.set_value(np.random.default_rng(10).standard_normal((5, 7)).astype("float32"))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.tanh(x @ self.weight)


def transposed(shared: Shared, x: paddle.Tensor) -> paddle.Tensor:
    return x @ shared.weight.t()


@pipeline.case
def a_pipeline_with_a_shared_weight_trains_as_one_process() -> None:
    from paddle.distributed.fleet.meta_parallel import PipelineLayer, SharedLayerDesc

    def loss_of(out: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
        return ((out - y) ** 2).mean()

    layers = [
        SharedLayerDesc("shared", Shared, shared_weight_attr="weight"),
        SharedLayerDesc("shared", Shared, forward_func=transposed, shared_weight_attr="weight"),
    ]
    topology = fleet.get_hybrid_communicate_group().topology()
    stages = PipelineLayer(layers, num_stages=2, loss_fn=loss_of, topology=topology)
    gloo.count_shared_weights_once(stages)
    optimizer = fleet.distributed_optimizer(sgd(stages.parameters()))
    model = fleet.distributed_model(stages)
    alone = Shared()
    alone_optimizer = sgd(alone.parameters())
    for batch in np.random.default_rng(11).standard_normal((STEPS, 4, 10)).astype("float32"):
        x, y = paddle.to_tensor(batch[:, :5]), paddle.to_tensor(batch[:, 5:])
        model.train_batch([x, y], optimizer)
        loss_of(transposed(alone, alone(x)), y).backward()
        norm = float((alone.weight.grad**2).sum().sqrt())
        assert norm > CLIP, "clipping must be active"
        alone_optimizer.step()
        alone_optimizer.clear_grad()
    (weight,) = stages.parameters()
    assert_close(weight.numpy(), alone.weight.numpy(), FLOAT32, "weight")
