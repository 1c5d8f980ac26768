"""What the ranks of test_gloo.py run: `gloo_worker.py NAME_OF_WORLD DIRECTORY`.

Each case is a function without arguments that all ranks of its world call, in the order written here. A rank
notes every case it has passed in DIRECTORY/<world>.<rank>, and ends at the first that fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed import fleet

from tests.tolerances import FLOAT32, FLOAT64, assert_close
from vha_paddle.parallel import gloo
from vha_paddle.parallel.gloo_channels import ChannelError

Case = Callable[[], None]


@dataclass(frozen=True)
class World:
    """Ranks started together, and what they do."""

    size: int
    start: Callable[[], Any]
    cases: dict[str, Case] = field(default_factory=dict)

    def case(self, function: Case) -> Case:
        self.cases[function.__name__] = function
        return function


def start_fleet(**degrees: int) -> None:
    strategy = fleet.DistributedStrategy()
    unused = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
    strategy.hybrid_configs = unused | degrees | {"mp_configs": {"need_broadcast_data": False}}
    strategy.hybrid_configs["sharding_configs"].split_param = True
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    fleet.meta_parallel.model_parallel_random_seed(0)


four = World(4, dist.init_parallel_env)
tensor = World(2, lambda: start_fleet(mp_degree=2))
sharding = World(2, lambda: start_fleet(sharding_degree=2))
pipeline = World(2, lambda: start_fleet(pp_degree=2))
WORLDS = {"four": four, "tensor": tensor, "sharding": sharding, "pipeline": pipeline}

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")
OPS = {
    "SUM": (dist.ReduceOp.SUM, np.add.reduce),
    "MAX": (dist.ReduceOp.MAX, np.maximum.reduce),
    "MIN": (dist.ReduceOp.MIN, np.minimum.reduce),
    "PROD": (dist.ReduceOp.PROD, np.multiply.reduce),
    "AVG": (dist.ReduceOp.AVG, np.mean),
}


def host(tensor: paddle.Tensor) -> np.ndarray:
    """Values in float64: exact for every dtype of these tests."""
    return tensor.astype("float64").numpy()


def every_rank(shape: tuple[int, ...], dtype: str, size: int = 4) -> np.ndarray:
    """`[size, *shape]`: what each rank holds; small whole numbers, whose sums and products every dtype has."""
    return np.random.default_rng(7).integers(1, 4, (size, *shape)).astype("bool" if dtype == "bool" else "float64")


def to_tensor(array: np.ndarray, dtype: str) -> paddle.Tensor:
    return paddle.to_tensor(array).astype(dtype)


def assert_equal(actual: paddle.Tensor, expected: np.ndarray, what: str) -> None:
    np.testing.assert_array_equal(host(actual), expected.astype("float64"), err_msg=what)


# ------------------------------------------------------------------------------- four ranks: groups, collectives


@four.case
def many_groups_are_created_and_each_sums_over_its_own_ranks() -> None:
    members = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [0, 1]]
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group in zip(members, groups, strict=True):
        if dist.get_rank() in ranks:
            total = paddle.to_tensor([10.0 ** dist.get_rank()])
            dist.all_reduce(total, group=group)
            assert float(total) == sum(10.0**rank for rank in ranks)


@four.case
def installing_twice_changes_nothing() -> None:
    operation = paddle.base.core.ProcessGroupGloo.all_reduce
    gloo.install()
    assert paddle.base.core.ProcessGroupGloo.all_reduce is operation


@four.case
def all_reduce_and_reduce_match_numpy_for_every_dtype_and_operation() -> None:
    rank = dist.get_rank()
    for dtype in (*FLOATS, *INTEGERS):
        values = every_rank((3, 5), dtype)
        for name, (op, in_numpy) in OPS.items():
            if name == "AVG" and dtype in INTEGERS:
                continue
            total = to_tensor(values[rank], dtype)
            dist.all_reduce(total, op=op)
            assert_equal(total, in_numpy(values, axis=0), f"all_reduce {name} {dtype}")
            total = to_tensor(values[rank], dtype)
            dist.stream.reduce(total, dst=2, op=op)
            if rank == 2:
                assert_equal(total, in_numpy(values, axis=0), f"reduce {name} {dtype}")


@four.case
def bools_are_reduced_as_and_and_or() -> None:
    flags = np.array([[False, False, True], [False, True, True], [False, False, True], [False, False, True]])
    for op, expected in ((dist.ReduceOp.MAX, [False, True, True]), (dist.ReduceOp.MIN, [False, False, True])):
        mine = paddle.to_tensor(flags[dist.get_rank()])
        dist.all_reduce(mine, op=op)
        assert mine.numpy().tolist() == expected


@four.case
def what_gloo_cannot_reduce_is_refused_and_the_process_lives() -> None:
    for dtype, op in (("float8_e4m3fn", dist.ReduceOp.SUM), ("int16", dist.ReduceOp.SUM), ("int64", dist.ReduceOp.AVG)):
        with pytest.raises(TypeError):
            dist.all_reduce(paddle.ones([4]).astype(dtype), op=op)


@four.case
def float16_sums_beyond_eleven_bits_are_rounded_once() -> None:
    total = paddle.to_tensor([1024.0, 10.0]).astype("float16")
    dist.all_reduce(total)
    assert_equal(total, np.array([4096.0, 40.0]), "float16")
    mean = paddle.to_tensor([40000.0]).astype("float16")  # the sum is beyond float16, the mean is not
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert_equal(mean, np.array([40000.0]).astype("float16"), "float16 AVG")


@four.case
def reduce_scatter_of_a_tensor_and_of_a_list_matches_numpy() -> None:
    rank = dist.get_rank()
    for dtype in (*FLOATS, *INTEGERS):
        values = every_rank((8, 3), dtype)
        for name, (op, in_numpy) in OPS.items():
            if name == "AVG" and dtype in INTEGERS:
                continue
            expected = in_numpy(values, axis=0)[2 * rank : 2 * rank + 2]
            mine, out = to_tensor(values[rank], dtype), paddle.zeros([2, 3], dtype)
            dist.reduce_scatter(out, mine, op=op)
            assert_equal(out, expected, f"tensor {name} {dtype}")
            assert_equal(mine, values[rank], "the input")
            out = paddle.zeros([2, 3], dtype)
            dist.reduce_scatter(out, list(paddle.split(mine, 4)), op=op)
            assert_equal(out, expected, f"list {name} {dtype}")


@four.case
def reduce_scatter_into_a_slice_of_its_own_input_keeps_the_other_slices() -> None:
    rank = dist.get_rank()
    values = every_rank((12,), "float32")
    flat = to_tensor(values[rank], "float32")
    dist.reduce_scatter(flat._slice(3 * rank, 3 * rank + 3), flat)
    expected = values[rank].copy()
    expected[3 * rank : 3 * rank + 3] = values.sum(axis=0)[3 * rank : 3 * rank + 3]
    assert_equal(flat, expected, "flat buffer")


@four.case
def data_of_every_dtype_is_gathered_broadcast_and_scattered() -> None:
    rank = dist.get_rank()
    for dtype in (*FLOATS, *INTEGERS, "bool", "int16", "float8_e4m3fn", "float8_e5m2", "complex64"):
        values = every_rank((2, 3), dtype)
        mine = to_tensor(values[rank], "float32").astype(dtype)
        bits = [to_tensor(value, "float32").astype(dtype).numpy().tobytes() for value in values]
        gathered: list[paddle.Tensor] = []
        dist.all_gather(gathered, mine)
        assert [part.numpy().tobytes() for part in gathered] == bits, f"all_gather {dtype}"
        whole = paddle.empty([8, 3], dtype)
        dist.stream.all_gather(whole, mine)
        assert whole.numpy().tobytes() == b"".join(bits), f"all_gather into a tensor {dtype}"
        received = mine.clone()
        dist.broadcast(received, src=1)
        assert received.numpy().tobytes() == bits[1], f"broadcast {dtype}"
        parts = [to_tensor(value, "float32").astype(dtype) for value in values] if rank == 2 else None
        dist.scatter(received, parts, src=2)
        assert received.numpy().tobytes() == bits[rank], f"scatter {dtype}"


@four.case
def all_to_all_of_lists_and_of_tensors_transposes_ranks() -> None:
    rank = dist.get_rank()
    for dtype in (*FLOATS, "int64", "bool", "float8_e4m3fn", "complex64"):
        blocks = every_rank((4, 2, 3), dtype)  # [from, to, ...]
        mine = [to_tensor(block, "float32").astype(dtype) for block in blocks[rank]]
        expected = [to_tensor(blocks[source, rank], "float32").astype(dtype).numpy().tobytes() for source in range(4)]
        outs: list[paddle.Tensor] = []
        dist.alltoall(outs, mine)
        assert [out.numpy().tobytes() for out in outs] == expected, f"list {dtype}"
        out = paddle.empty([4, 2, 3], dtype)
        dist.stream.alltoall(out, paddle.stack(mine) if "float8" not in dtype else paddle.concat(mine))
        assert out.numpy().tobytes() == b"".join(expected), f"tensor {dtype}"


@four.case
def all_to_all_single_takes_uneven_and_empty_parts() -> None:
    rank = dist.get_rank()
    counts = np.array([[2, 0, 1, 3], [0, 0, 5, 1], [0, 0, 0, 0], [4, 1, 0, 2]])  # [from, to]: rank 2 sends nothing
    rows = [
        [np.full((counts[source, to], 3), 10 * source + to, "float32") for to in range(4)] for source in range(4)
    ]
    out = paddle.empty([int(counts[:, rank].sum()), 3])
    mine = paddle.to_tensor(np.concatenate(rows[rank]))
    dist.alltoall_single(out, mine, counts[rank].tolist(), counts[:, rank].tolist())
    assert_equal(out, np.concatenate([rows[source][rank] for source in range(4)]), "rows")


@four.case
def all_to_all_single_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="8 rows cannot be split into"):
        dist.alltoall_single(paddle.empty([8]), paddle.empty([8]), [1, 1, 1, 1], [2, 2, 2, 2])
    with pytest.raises(ValueError, match="6 rows cannot be split into"):
        dist.alltoall_single(paddle.empty([6]), paddle.empty([6]))


@four.case
def operations_on_the_calculation_stream_are_the_same_operations() -> None:
    rank = dist.get_rank()
    values = every_rank((4, 3), "float32")
    on_stream = {"sync_op": True, "use_calc_stream": True}
    total = to_tensor(values[rank], "float32")
    dist.stream.all_reduce(total, **on_stream)
    assert_equal(total, values.sum(axis=0), "all_reduce")
    total = to_tensor(values[rank], "float32")
    dist.stream.reduce(total, dst=1, **on_stream)
    if rank == 1:
        assert_equal(total, values.sum(axis=0), "reduce")
    mine, row, whole = to_tensor(values[rank], "float32"), paddle.empty([1, 3]), paddle.empty([16, 3])
    dist.stream.reduce_scatter(row, mine, **on_stream)
    assert_equal(row, values.sum(axis=0)[rank : rank + 1], "reduce_scatter")
    dist.stream.all_gather(whole, mine, **on_stream)
    assert_equal(whole, values.reshape(16, 3), "all_gather")
    gathered: list[paddle.Tensor] = []
    dist.stream.all_gather(gathered, mine, **on_stream)
    assert_equal(paddle.concat(gathered), values.reshape(16, 3), "all_gather of a list")
    out = paddle.empty([4, 3])
    dist.stream.alltoall(out, mine, **on_stream)
    assert_equal(out, values[:, rank], "all_to_all")
    dist.stream.alltoall_single(out, mine, **on_stream)
    assert_equal(out, values[:, rank], "all_to_all_single")
    dist.stream.broadcast(mine, src=3, **on_stream)
    assert_equal(mine, values[3], "broadcast")
    dist.stream.scatter(row, mine, src=0, **on_stream)
    assert_equal(row, values[3, rank : rank + 1], "scatter")
    if rank == 0:
        dist.stream.send(row, dst=3, **on_stream)
    if rank == 3:
        dist.stream.recv(row, src=0, **on_stream)
        assert_equal(row, values[3, :1], "recv")


@four.case
def parts_of_a_tensor_are_sent_received_and_gathered() -> None:
    rank, group = dist.get_rank(), dist.get_group().process_group
    whole = paddle.arange(12, dtype="float32").reshape([3, 4])
    if rank == 0:
        for index in range(4):
            group.send_partial_on_calc_stream(whole, 1, 4, index)
    if rank == 1:
        received = paddle.zeros([3, 4])
        group.recv_partial_on_calc_stream(received, 0, 4, 0)
        assert_equal(received.reshape([-1])[:4], np.array([0, 1, 2, 0]), "the first part only")
        for index in range(1, 4):
            group.recv_partial_on_calc_stream(received, 0, 4, index)
        assert_equal(received, host(whole), "all parts")
    mine = paddle.where(paddle.arange(12).reshape([3, 4]) // 3 == rank, whole, paddle.full([3, 4], -1.0))
    group.all_gather_partial_on_calc_stream(mine, mine, 4, rank)
    assert_equal(mine, host(whole), "gathered in place")


# ------------------------------------------------------------------------------------ four ranks: point-to-point


@four.case
def a_chain_of_messages_in_a_group_of_three_ends_and_leaves_the_group_usable() -> None:
    rank, group = dist.get_rank(), dist.new_group([0, 1, 2])
    if rank == 3:
        return
    token = paddle.to_tensor([1.0])
    if rank > 0:
        dist.recv(token, src=rank - 1, group=group)
        token += 1
    if rank < 2:
        dist.send(token, dst=rank + 1, group=group)
    dist.all_reduce(token, group=group)
    assert float(token) == 1 + 2 + 3


@four.case
def two_ranks_may_talk_before_a_collective_of_all_four() -> None:
    rank = dist.get_rank()
    value = paddle.to_tensor([float(rank)])
    if rank == 0:
        dist.send(value, dst=1)
    dist.all_reduce(value)
    if rank == 1:  # received after the collective: the message waits
        message = paddle.empty([1])
        dist.recv(message, src=0)
        assert float(message) == 0.0
    dist.all_reduce(value)
    assert float(value) == 24.0


@four.case
def ranks_that_all_send_first_receive_all() -> None:
    rank = dist.get_rank()
    mine, received = paddle.full([300_000], float(rank)), paddle.empty([300_000])  # beyond any socket's buffer
    for shift in (1, 2, 3):
        dist.send(mine, dst=(rank + shift) % 4)
    mine.zero_()  # what was sent is not what the tensor becomes
    for shift in (1, 2, 3):
        dist.recv(received, src=(rank - shift) % 4)
        assert float(received.min()) == float(received.max()) == (rank - shift) % 4


@four.case
def a_batch_may_list_its_receives_first() -> None:
    rank = dist.get_rank()
    mine, received = paddle.full([5], rank, "int64"), paddle.empty([5], "int64")
    batch = [
        dist.P2POp(dist.irecv, received, (rank - 1) % 4),
        dist.P2POp(dist.isend, mine, (rank + 1) % 4),
    ]
    for task in dist.batch_isend_irecv(batch):
        task.wait()
    assert received.tolist() == [(rank - 1) % 4] * 5


@four.case
def messages_of_every_dtype_and_of_strided_tensors_arrive_in_order() -> None:
    rank = dist.get_rank()
    peer = rank ^ 1
    base = paddle.arange(24, dtype="float32").reshape([4, 6])
    for dtype in (*FLOATS, *INTEGERS, "bool", "float8_e4m3fn", "complex64"):
        dist.send((base + rank).astype(dtype), dst=peer)
        dist.send((base + rank).t(), dst=peer)
    for dtype in (*FLOATS, *INTEGERS, "bool", "float8_e4m3fn", "complex64"):
        received = paddle.empty([4, 6], dtype)
        dist.recv(received, src=peer)
        assert received.numpy().tobytes() == (base + peer).astype(dtype).numpy().tobytes(), dtype
        strided = paddle.empty([6, 4])
        dist.recv(strided, src=peer)
        assert_equal(strided, host(base + peer).T, "transposed")


@four.case
def a_message_of_another_length_and_a_strided_receiver_are_refused() -> None:
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    if rank == 0:
        dist.send(paddle.ones([3]), dst=1, group=group)
    if rank == 1:
        with pytest.raises(ValueError, match="contiguous"):
            dist.recv(paddle.ones([4, 3]).t(), src=0, group=group)
        with pytest.raises(ChannelError, match="12 bytes were sent, 16 are expected"):
            dist.recv(paddle.ones([4]), src=0, group=group)


@four.case
def a_barrier_holds_every_rank_until_the_last() -> None:
    stages = [paddle.to_tensor([0.0])]
    for late in range(4):
        if dist.get_rank() == late:
            stages.append(stages[-1] + 1)
        dist.barrier()
    dist.all_reduce(stages[-1])
    assert float(stages[-1]) == 4.0


# --------------------------------------------------------------------- two ranks: layers of tensor parallelism


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
    table, upstream = rng.standard_normal((10, 3)).astype(dtype), rng.standard_normal((2, 7, 3)).astype(dtype)
    tokens = rng.integers(0, 10, (2, 7))
    layer = fleet.meta_parallel.VocabParallelEmbedding(10, 3)
    layer.weight.set_value(own_slice(table, 0))
    out = layer(paddle.to_tensor(tokens))
    (out * paddle.to_tensor(upstream)).sum().backward()
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



# ------------------------------------------------------------------------------ two ranks: optimizer sharding


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


# ----------------------------------------------------------------------------------- two ranks: pipeline stages


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


def main(name: str, directory: Path) -> None:
    world = WORLDS[name]
    gloo.install()
    world.start()
    with (directory / f"{name}.{dist.get_rank()}").open("w") as passed:
        for case, function in world.cases.items():
            print(f"=== {case}", flush=True)
            function()
            print(case, file=passed, flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
