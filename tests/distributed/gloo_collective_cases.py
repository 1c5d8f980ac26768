"""What four ranks do in test_gloo.py: groups, collectives and messages, against numpy."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from tests.distributed.gloo_worlds import four
from vha_paddle.parallel import gloo, gloo_channels
from vha_paddle.parallel.gloo_channels import ChannelError

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
    """`[size, *shape]`: what each rank holds; whole numbers whose sums and products every dtype has."""
    return np.random.default_rng(7).integers(1, 4, (size, *shape)).astype("bool" if dtype == "bool" else "float64")


def to_tensor(array: np.ndarray, dtype: str) -> paddle.Tensor:
    return paddle.to_tensor(array).astype(dtype)


def assert_equal(actual: paddle.Tensor, expected: np.ndarray, what: str) -> None:
    np.testing.assert_array_equal(host(actual), expected.astype("float64"), err_msg=what)


# ---------------------------------------------------------------------------------- groups and collectives


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
def what_asks_for_an_accelerator_gets_the_cpu() -> None:
    value = paddle.ones([2])
    assert value.cuda(0) is value
    assert dist.ParallelEnv().device_id == 0


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
def every_rank_gets_the_same_bits_of_a_sum_that_adds_ranks_in_their_order() -> None:
    for count in (5, gloo_channels.DIRECT_BYTES // 4 + 3):  # whole arrays to all, and parts that are not equal
        values = np.random.default_rng(count).standard_normal((4, count)).astype("float32")
        expected = ((values[0] + values[1]) + values[2]) + values[3]
        total = paddle.to_tensor(values[dist.get_rank()])
        dist.all_reduce(total)
        np.testing.assert_array_equal(total.numpy(), expected)
        mine = paddle.to_tensor(values[dist.get_rank()])
        dist.broadcast(mine, src=2)
        np.testing.assert_array_equal(mine.numpy(), values[2])


@four.case
def bools_are_reduced_as_and_and_or() -> None:
    flags = np.array([[False, False, True], [False, True, True], [False, False, True], [False, False, True]])
    for op, expected in ((dist.ReduceOp.MAX, [False, True, True]), (dist.ReduceOp.MIN, [False, False, True])):
        mine = paddle.to_tensor(flags[dist.get_rank()])
        dist.all_reduce(mine, op=op)
        assert mine.numpy().tolist() == expected


@four.case
def what_gloo_cannot_reduce_is_refused_and_the_process_lives() -> None:
    for dtype, op in (
        ("float8_e4m3fn", dist.ReduceOp.SUM),
        ("int16", dist.ReduceOp.SUM),
        ("int64", dist.ReduceOp.AVG),
    ):
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
def data_of_every_dtype_is_gathered_broadcast_scattered_and_collected() -> None:
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
        collected: list[paddle.Tensor] = []
        dist.gather(mine, collected, dst=3)
        if rank == 3:
            assert [part.numpy().tobytes() for part in collected] == bits, f"gather {dtype}"


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
    rows = [[np.full((counts[source, to], 3), 10 * source + to, "float32") for to in range(4)] for source in range(4)]
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


# ------------------------------------------------------------------------------------------ point-to-point


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
    mine, received = (
        paddle.full([300_000], float(rank)),
        paddle.empty([300_000]),
    )  # beyond any socket's buffer
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
