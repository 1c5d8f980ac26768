"""What PaddlePaddle 3.3.1's fleet lacks on CPU ranks over Gloo. Call `install()` before `fleet.init`.

Fleet is written for accelerators: on CPU some operations raise, some hang, some are silently wrong. `install`
replaces those and no others, and does nothing where the device is not a CPU. Each replacement says what
happens without it. In order: creation of groups, collectives, tensor-parallel kernels, sharding and pipeline,
installation; point-to-point and all-to-all are in `gloo_channels.py`.

Everything is synchronous: a task is done when its call returns, so fleet's overlap options change the path of
the code, not its speed. The common operations go over our own channels, which wait half an hour for a late rank and
combine ranks in their order. Those left to Gloo (`scatter`, `gather`, lists, the rarer dtypes) fail when a rank is
30 s late, a limit that Paddle does not expose; put a `barrier` before one that follows the work of a single rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.base import core

from vha_paddle.parallel import gloo_channels
from vha_paddle.parallel.gloo_channels import DONE, Channels, Member, array, members, memory, timed

_SUM, _AVG = core.ReduceOp.SUM, core.ReduceOp.AVG
_NUMPY_OPERATION: dict[Any, Any] = {
    _SUM: np.add,
    _AVG: np.add,  # and a division at the end
    core.ReduceOp.MAX: np.maximum,
    core.ReduceOp.MIN: np.minimum,
    core.ReduceOp.PRODUCT: np.multiply,
}
_REDUCED_BY_GLOO = {paddle.float32, paddle.float64, paddle.bfloat16, paddle.bool}
_REDUCED_BY_GLOO |= {paddle.int64, paddle.int32, paddle.int8, paddle.uint8}
_REDUCED_BY_NUMPY = {paddle.float32, paddle.float64, paddle.int64, paddle.int32}
_MOVED_BY_GLOO = _REDUCED_BY_GLOO | {paddle.float16}
_STORE_TIMEOUT = 900  # seconds a rank waits for the others to join a group: Paddle's own default
_PORT_ATTEMPTS = 20

_gloo = SimpleNamespace()  # the methods of ProcessGroupGloo as Paddle made them; filled by `install`


# ---------------------------------------------------------------------------------------- creation of groups

_stores: list[Any] = []  # a group's store must live as long as the group


def _create_group(store: Any, rank: int, world_size: int, group_id: int = 0) -> Any:
    """`ProcessGroupGloo.create` with a TCPStore for each group.

    Paddle gives every group the same store, and Gloo's keys in it hold no group id, so a rank can read the
    addresses that its peers left there for an earlier group. From three ranks up, building fleet's groups
    then fails almost always: connection refused, "136 vs 45", or a hang.
    """
    host = os.environ["PADDLE_CURRENT_ENDPOINT"].rsplit(":", 1)[0]  # set by the launcher, required by Paddle
    _answer_at_once()
    member = Member(_channels(host), store, group_id, rank, world_size)
    key = f"gloo/{group_id}/store"
    if rank == 0:
        own_store, port = _serve_store(host)
        store.set(key, f"{host}:{port}")
    else:
        leader, port = store.get(key).decode().rsplit(":", 1)
        own_store = core.TCPStore(leader, int(port), False, 1, _STORE_TIMEOUT)
    _stores.append(own_store)
    _answer_at_once()
    group = _gloo.create(own_store, rank, world_size, group_id)
    members[group] = member
    return group


@functools.cache
def _channels(host: str) -> Channels:
    return Channels(host)


def _serve_store(host: str) -> tuple[Any, int]:
    """A store on a free port, which another process may take between our look and its use."""
    for _ in range(_PORT_ATTEMPTS):
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        with contextlib.suppress(ValueError):
            # a world size of 1: with the true one the constructor waits for ranks that have no address yet
            return core.TCPStore(host, port, True, 1, _STORE_TIMEOUT), port
    raise OSError(f"{host}: no free port for a group's store in {_PORT_ATTEMPTS} attempts")


def _answer_at_once() -> None:
    """Set TCP_NODELAY on this process's sockets, Paddle's among them.

    A TCPStore writes a request in two parts, and without the option the second waits 44 ms for the receipt
    of the first: a group of four takes 1 s to build instead of 0.15 s.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{descriptor}").st_mode):
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# ----------------------------------------------------------------------------------------------- collectives


def _all_reduce(group: Any, tensor: Tensor, op: Any = _SUM, sync_op: bool = True) -> Any:
    """In place. Gloo sums fp16 to inf, refuses AVG, and ends the process at a dtype it does not know.

    What numpy can add goes over our own channels: a small sum over two ranks takes a fifth of Gloo's time, and no rank
    dies for being 30 s late.
    """
    if tensor.dtype in _REDUCED_BY_NUMPY and op != _AVG and tensor.is_contiguous():
        members[group].all_reduce(array(tensor).reshape(-1), _NUMPY_OPERATION[op])
        return DONE
    if tensor.dtype in _REDUCED_BY_GLOO and op != _AVG:
        return _gloo.all_reduce(group, tensor, op, sync_op)
    return _reduce_in_steps(tensor, op, group, lambda t, o: _all_reduce(group, t, o), True)


def _reduce(group: Any, tensor: Tensor, root: int, op: Any = _SUM, sync_op: bool = True) -> Any:
    """As `_all_reduce`, the result on `root` only."""
    if tensor.dtype in _REDUCED_BY_NUMPY and op != _AVG and tensor.is_contiguous():
        members[group].reduce(array(tensor).reshape(-1), root, _NUMPY_OPERATION[op])
        return DONE
    if tensor.dtype in _REDUCED_BY_GLOO and op != _AVG:
        return _gloo.reduce(group, tensor, root, op, sync_op)
    on_root = group.rank() == root
    return _reduce_in_steps(tensor, op, group, lambda t, o: _reduce(group, t, root, o), on_root)


@paddle.no_grad()
def _reduce_in_steps(tensor: Tensor, op: Any, group: Any, reduce: Callable, has_result: bool) -> Any:
    """Reduce fp16 through fp32, and AVG as a sum that is then divided."""
    if tensor.dtype not in _MOVED_BY_GLOO or (op == _AVG and not tensor.is_floating_point()):
        raise TypeError(f"{op} of {tensor.dtype} is not possible over Gloo")
    wide = tensor.astype("float32") if tensor.dtype == paddle.float16 else tensor
    reduce(wide, _SUM if op == _AVG else op)
    if has_result:
        if op == _AVG:
            wide.scale_(1.0 / group.size())
        if wide is not tensor:
            paddle.assign(wide.astype(tensor.dtype), tensor)
    return DONE


def _reduce_scatter_tensor(group: Any, out: Tensor, tensor: Tensor, op: Any = _SUM, sync_op: bool = True) -> Any:
    """Not in Gloo. `out` may be this rank's chunk of `tensor`, as in fleet's sharding.

    Ranks exchange chunks and each reduces its own, in a third of the time of an all-reduce of the whole.
    """
    if tensor.dtype in (paddle.float16, paddle.bfloat16):  # numpy has no bf16, and fp16 overflows
        with paddle.no_grad():
            wide = paddle.empty(out.shape, "float32")
            _reduce_scatter_tensor(group, wide, tensor.astype("float32"), op)
            paddle.assign(wide.astype(out.dtype), out)
        return DONE
    member, reduce = members[group], _NUMPY_OPERATION[op]
    chunks = array(tensor.contiguous()).reshape(member.size, -1)
    member.send_to_others(list(chunks))
    total = array(out).reshape(-1)
    np.copyto(total, chunks[member.rank])
    received = np.empty_like(total)
    for step in range(1, member.size):
        member.receive((member.rank - step) % member.size, received)
        reduce(total, received, out=total)
    if op == _AVG:
        np.true_divide(total, member.size, out=total)  # a TypeError for integers
    return DONE


def _reduce_scatter(group: Any, out: Tensor, tensors: Sequence[Tensor], op: Any = _SUM, sync_op: bool = True) -> Any:
    """Not in Gloo: a list, one tensor for each rank."""
    return _reduce_scatter_tensor(group, out, paddle.stack(list(tensors)), op)


def _all_gather_partial(group: Any, out: Tensor, tensor: Tensor, count: int, index: int, sync_op: bool = True) -> Any:
    """Not in Gloo: rank i gives part i of what all shall hold; a pipeline passes `out` as `tensor` too."""
    part = paddle.empty([tensor.size // count], tensor.dtype)
    np.copyto(memory(part), np.split(memory(tensor.contiguous()), count)[index])
    return gloo_channels.all_gather_into_tensor(group, out, part)


def _for_every_dtype(name: str) -> Callable:
    """A Gloo method that only moves data: at float8, int16 and complex Gloo ends the process."""
    method = getattr(_gloo, name)

    def known(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.dtype in _MOVED_BY_GLOO else value.view("uint8")
        return [known(item) for item in value] if isinstance(value, (list, tuple)) else value

    return lambda group, *arguments, **options: method(group, *map(known, arguments), **options)


# ----------------------------------------------------------------------------------- tensor-parallel kernels
# Paddle's CPU kernels of c_identity, c_concat, c_split and c_softmax_with_cross_entropy do no more than raise
# "Do not support ... for cpu kernel now". The gradient of c_split in mp_ops also gathers on axis 0, on every
# device, what the forward split on the last axis.


def _c_identity(x: Tensor, *_: Any) -> Tensor:
    return x.clone()


def _c_embedding(table: Tensor, ids: Tensor, start: int = 0, *rest: int, kernel: Callable) -> Tensor:
    """Rows of this rank's part of a table, zeros for ids that other parts hold.

    The gradient of Paddle's kernel clears 4 bytes for each element, whatever its dtype: the second half of a
    float64 gradient starts from what the memory held before.
    """
    if table.dtype == paddle.float32:
        return kernel(table, ids, start, *rest)
    row = ids - start
    held = paddle.logical_and(row >= 0, row < table.shape[0])
    rows = paddle.nn.functional.embedding(paddle.where(held, row, paddle.zeros_like(row)), table)
    return rows * held.unsqueeze(-1).astype(table.dtype)


def _c_concat(x: Tensor, rank: int, nranks: int, ring_id: int, *_: Any) -> Tensor:
    return _GatherLastAxis.apply(x, dist.get_group(ring_id))


def _gather_last_axis(x: Tensor, group: Any) -> Tensor:
    parts = paddle.empty([group.nranks, *x.shape], x.dtype)
    group.process_group.all_gather_into_tensor(parts, x.contiguous(), True)
    return paddle.concat(paddle.unstack(parts), axis=-1)


def _own_part_of_last_axis(x: Tensor, group: Any) -> Tensor:
    return paddle.split(x, group.nranks, axis=-1)[group.rank].clone()  # not a view of x


class _GatherLastAxis(PyLayer):
    """All ranks use the whole in the same way, so the gradient of a part is that part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather_last_axis(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _own_part_of_last_axis(gradient, ctx.group)


class _SplitLastAxis(PyLayer):
    """With the signature of mp_ops.c_split_eager, whose place it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, rank: int, nranks: int) -> Tensor:
        ctx.group = group
        return _own_part_of_last_axis(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _gather_last_axis(gradient, ctx.group)


class _SoftmaxCrossEntropy(PyLayer):
    """-log softmax at the label, over a vocabulary split across the group, with one communication.

    With m a rank's largest logit, e = exp(x - m), s = sum(e), and M the largest m of the group, the softmax
    is e exp(m - M) / S, where S = sum over ranks of s exp(m - M). So ranks exchange m, s and the label's
    logit. Only e is kept, and the gradient is made in its memory. The arithmetic is numpy's, on the memory of
    the tensors: on one thread it takes a third of the time of Paddle's max, exp and sum.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: np.ndarray, ignore_index: int, group: Any) -> Tensor:
        wide = logits if logits.dtype == paddle.float64 else logits.astype("float32")
        kept = paddle.empty(wide.shape, wide.dtype)
        x, e = (array(tensor.contiguous()).reshape(labels.size, -1) for tensor in (wide, kept))
        largest = x.max(axis=1)
        np.maximum(largest, np.finfo(x.dtype).min, out=largest)  # a part of -inf alone: not -inf - -inf
        np.subtract(x, largest[:, None], out=e)
        np.exp(e, out=e)
        used = labels != ignore_index
        column = labels - group.rank * x.shape[1]
        rows = np.flatnonzero(used & (column >= 0) & (column < x.shape[1]))
        at_label = np.zeros_like(largest)
        at_label[rows] = x[rows, column[rows]]

        mine = paddle.to_tensor(np.stack([largest, e.sum(axis=1), at_label]))
        gathered = paddle.empty([group.nranks, *mine.shape], mine.dtype)
        group.process_group.all_gather_into_tensor(gathered, mine, True)
        all_largest, all_sums, all_at_label = array(gathered).transpose(1, 0, 2)
        peak = all_largest.max(axis=0)
        total = (all_sums * np.exp(all_largest - peak)).sum(axis=0)
        loss = np.where(used, np.log(total) - (all_at_label.sum(axis=0) - peak), 0)

        ctx.kept, ctx.dtype, ctx.at_label = kept, logits.dtype, (rows, column[rows])
        ctx.to_softmax = np.where(used, np.exp(largest - peak) / total, 0)
        return paddle.to_tensor(loss.reshape([*logits.shape[:-1], 1])).astype(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        upstream = gradient.astype(ctx.kept.dtype).numpy().reshape(-1)
        e = array(ctx.kept).reshape(upstream.size, -1)
        e *= (upstream * ctx.to_softmax)[:, None]
        e[ctx.at_label] -= upstream[ctx.at_label[0]]
        return ctx.kept.astype(ctx.dtype)


def _c_softmax_with_cross_entropy(
    logits: Tensor, label: Tensor, group: Any = None, return_softmax: bool = False, ignore_index: int = -100
) -> Tensor:
    """Loss [..., 1] for logits [..., part of the vocabulary] and labels [...] or [..., 1].

    Raises:
        ValueError: a label is neither in the vocabulary nor `ignore_index`, or they do not fit the logits.
        NotImplementedError: the softmax is asked for; nothing in fleet does.
    """
    if return_softmax:
        raise NotImplementedError("the tensor-parallel cross-entropy on CPU keeps no softmax to return")
    group = dist.get_group() if group is None else group
    labels = label.numpy().reshape(-1).astype(np.int64)
    if labels.size * logits.shape[-1] != logits.size:
        raise ValueError(f"labels of shape {label.shape} do not fit logits of shape {logits.shape}")
    num_classes = logits.shape[-1] * group.nranks
    wrong = labels[((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)]
    if wrong.size:
        raise ValueError(f"label {wrong[0]} is not in the vocabulary of {num_classes}, nor {ignore_index}")
    return _SoftmaxCrossEntropy.apply(logits, labels, ignore_index, group)


# ------------------------------------------------------------------------------------- sharding and pipeline


def _clear_grad(sharding: Any, set_to_zero: bool = True, *, original: Callable) -> None:
    """`DygraphShardingOptimizerV2.clear_grad` that keeps gradients where they are.

    After Paddle's clear_gradient(True) the next backward *replaces* .grad, which then is no part of the fused
    buffer any more: from the second step on the optimizer sees zeros.
    """
    has_main_grad = any(hasattr(parameter, "main_grad") for parameter in sharding._parameter_list)
    if sharding.sd_release_grads or has_main_grad or not set_to_zero:
        original(sharding, set_to_zero)
        return
    with paddle.no_grad():
        for parameter in sharding._parameter_list:
            if parameter.grad is not None:
                parameter.grad.zero_()


@functools.cache
def group_sharded_classes() -> tuple[type, type, type]:
    """ZeRO stages 2 and 3: (GroupShardedOptimizerStage2, GroupShardedStage2, GroupShardedStage3).

    Construct each with `device="cpu"`; fleet's `group_sharded_parallel` refuses a CPU by itself.
    """
    from paddle.distributed.fleet.meta_parallel.sharding import (
        group_sharded_optimizer_stage2,
        group_sharded_stage2,
        group_sharded_stage3,
        group_sharded_storage,
    )

    # they assert an accelerator, and parse the index out of a device name like "gpu:0"
    for module in (group_sharded_optimizer_stage2, group_sharded_stage2, group_sharded_stage3):
        module.core = SimpleNamespace(**vars(core) | {"is_compiled_with_cuda": lambda: True})
        module.paddle = SimpleNamespace(**vars(paddle) | {"get_device": lambda: "cpu:0"})
    # with convert_gpu a parameter is copied by .cpu(), on CPU an alias, and then its memory is freed
    storage = group_sharded_storage.ParamStorage
    add = storage.add_rank_params
    storage.add_rank_params = lambda self, parameters, align, convert_gpu=True: add(self, parameters, align, False)
    return (
        group_sharded_optimizer_stage2.GroupShardedOptimizerStage2,
        group_sharded_stage2.GroupShardedStage2,
        group_sharded_stage3.GroupShardedStage3,
    )


def count_shared_weights_once(pipeline_layer: Any) -> None:
    """Let the global norm count a weight that pipeline stages share once; call it on a built PipelineLayer.

    Paddle marks the first holder by looking for a parameter's name among attribute names, finds none, and
    each stage adds the weight's gradient (on every device).
    """
    for shared in pipeline_layer.shared_comm.values():
        for attribute in shared["weight_attr"]:
            weight = getattr(shared["layer"], attribute)
            weight.is_firstly_shared = pipeline_layer.global_rank == min(shared["ranks"])


# ---------------------------------------------------------------------------------------------- installation


def install() -> None:
    """Replace what fleet lacks on CPU. Once is enough; where the device is not a CPU nothing is done.

    Raises:
        RuntimeError: the ranks have joined already, so their first group is Paddle's.
    """
    if vars(_gloo) or paddle.device.get_device() != "cpu":
        return
    if dist.is_initialized():
        raise RuntimeError("gloo.install() must come before fleet.init() and init_parallel_env()")
    _patch_process_group(core.ProcessGroupGloo)
    _patch_fleet()
    # the libuv server ends the process when its port is taken; the plain one raises, and we try another
    paddle.set_flags({"FLAGS_tcp_store_using_libuv": False})
    # never set without an accelerator, so that reading ParallelEnv().device_id raises
    dist.ParallelEnv._device_id = 0
    # resharding of checkpoints and clipping under ZeRO call .cuda() ("No available device found")
    Tensor.cuda = lambda self, *_, **__: self
    if not hasattr(core, "nccl_version"):  # dist.all_reduce compares it before it averages; 2.10 is its least
        core.nccl_version = lambda: 21000  # type: ignore[attr-defined]


def _patch_process_group(group: Any) -> None:
    moving = ("all_gather", "scatter", "scatter_tensor", "gather")
    vars(_gloo).update({name: getattr(group, name) for name in (*moving, "create", "all_reduce", "reduce")})
    operations: dict[str, Callable] = {name: _for_every_dtype(name) for name in moving} | {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "broadcast": gloo_channels.broadcast,
        "all_gather_into_tensor": gloo_channels.all_gather_into_tensor,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "all_gather_partial": _all_gather_partial,
        "all_to_all": gloo_channels.all_to_all,
        "all_to_all_tensor": gloo_channels.all_to_all_tensor,
        "all_to_all_single": gloo_channels.all_to_all_single,
        "send": gloo_channels.send,
        "recv": gloo_channels.receive,
        "send_partial": gloo_channels.send_partial,
        "recv_partial": gloo_channels.receive_partial,
    }
    for name, operation in operations.items():
        operation = timed(operation)
        setattr(group, name, operation)
        # Gloo has none of these, and tensor and pipeline parallelism call them
        setattr(group, f"{name}_on_calc_stream", functools.partialmethod(operation, sync_op=True))
    group.create = staticmethod(_create_group)
    group.allreduce = timed(_all_reduce)
    group.barrier = timed(gloo_channels.barrier)
    group._start_coalescing = gloo_channels.start_coalescing
    group._end_coalescing = timed(gloo_channels.end_coalescing)


def _patch_fleet() -> None:
    from paddle.distributed.fleet.layers.mpu import mp_ops
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer
    from paddle.distributed.fleet.utils import tensor_fusion_helper

    paddle._C_ops.c_identity = paddle._legacy_C_ops.c_identity = _c_identity
    paddle._C_ops.c_embedding = functools.partial(_c_embedding, kernel=paddle._C_ops.c_embedding)
    paddle._C_ops.c_concat = _c_concat
    mp_ops.c_split_eager = _SplitLastAxis
    mp_ops._c_softmax_with_cross_entropy = _c_softmax_with_cross_entropy
    sharding = dygraph_sharding_optimizer.DygraphShardingOptimizerV2
    sharding.clear_grad = functools.partialmethod(_clear_grad, original=sharding.clear_grad)
    # fused buffers know the alignment of accelerators only (an AssertionError), and no float64 (a KeyError)
    tensor_fusion_helper.alignment["cpu"] = 256
    tensor_fusion_helper.__current_device_type__ = "cpu"
    tensor_fusion_helper.align[paddle.float64] = 8
