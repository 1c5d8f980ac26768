"""What PaddlePaddle 3.3.1's fleet lacks on CPU ranks over Gloo. Call `install()` before `fleet.init`.

Fleet is written for accelerators: some operations raise on CPU, some hang, some are silently wrong. `install`
replaces those and no others, and does nothing where the device is not a CPU. Each replacement says what happens
without it. In order: creation of groups, collectives, point-to-point, tensor-parallel kernels, sharding.

Everything is synchronous: a task is done when its call returns, and fleet's overlap options change nothing but
the path of the code. A collective fails when a rank is 30 s late, a limit of Gloo that Paddle does not expose;
`barrier` waits half an hour, so put one before a collective that follows the work of a single rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.base import core
from paddle.distributed import collective

from vha_paddle.parallel.gloo_channels import Channels

_SUM, _AVG = core.ReduceOp.SUM, core.ReduceOp.AVG
_STORE_TIMEOUT = 900  # seconds a rank waits for the others to join a group: Paddle's own default
_PORT_ATTEMPTS = 20

_gloo = SimpleNamespace()
"""The methods of ProcessGroupGloo as Paddle made them; filled by `install`."""


class _Done:
    """The task of an operation that was finished when its call returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


_DONE = _Done()


# ---------------------------------------------------------------------------------------- memory of tensors


class _Memory:
    """The bytes of a contiguous tensor for `np.asarray`, which keeps the tensor alive as long as the array."""

    def __init__(self, tensor: paddle.Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {list(tensor.shape)} must be contiguous to be communicated")
        self.tensor = tensor
        size = tensor.size * tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr() if size else np.empty(0).ctypes.data, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _memory(tensor: paddle.Tensor) -> np.ndarray:
    """A tensor's own memory as a flat uint8 array: no copy (`numpy()` makes one), so writing to it sets the tensor."""
    return np.asarray(_Memory(tensor))


def _array(tensor: paddle.Tensor) -> np.ndarray:
    """A tensor's own memory in its shape and dtype, one that numpy has."""
    return _memory(tensor).view(str(tensor.dtype).removeprefix("paddle.")).reshape(tensor.shape)


# -------------------------------------------------------------------------------------- creation of groups


@dataclass(frozen=True)
class _Member:
    """This process in one group."""

    group_id: int
    rank: int
    size: int
    store: Any

    def address(self, rank: int) -> str:
        """Where `rank` of this group takes messages."""
        return self.store.get(f"gloo/{self.group_id}/channels/{rank}").decode()


_members: dict[Any, _Member] = {}
_stores: list[Any] = []  # a group's store must live as long as the group
_channels: Channels | None = None


def _create_group(store: Any, rank: int, world_size: int, group_id: int = 0) -> Any:
    """`ProcessGroupGloo.create` with a TCPStore for each group.

    Paddle gives every group the same store, and Gloo's keys in it hold no group id, so a rank can read the
    addresses that its peers left there for an earlier group. From three ranks up, building fleet's groups then
    fails almost always: connection refused, "136 vs 45", or a hang.
    """
    global _channels
    host = os.environ["PADDLE_CURRENT_ENDPOINT"].rsplit(":", 1)[0]  # the launcher's contract
    if _channels is None:
        _channels = Channels(host)
    _answer_at_once()
    store.set(f"gloo/{group_id}/channels/{rank}", _channels.address)
    if rank == 0:
        own_store, port = _serve_store(host)
        store.set(f"gloo/{group_id}/store", f"{host}:{port}")
    else:
        leader, port = store.get(f"gloo/{group_id}/store").decode().rsplit(":", 1)
        own_store = core.TCPStore(leader, int(port), False, 1, _STORE_TIMEOUT)
    _stores.append(own_store)
    _answer_at_once()
    group = _gloo.create(own_store, rank, world_size, group_id)
    _members[group] = _Member(group_id, rank, world_size, store)
    return group


def _serve_store(host: str) -> tuple[Any, int]:
    """A store on a free port, which another process may take between our look and its use."""
    for _ in range(_PORT_ATTEMPTS):
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        with contextlib.suppress(ValueError):
            # a world size of 1: with the true one the constructor waits for ranks that do not know the port yet
            return core.TCPStore(host, port, True, 1, _STORE_TIMEOUT), port
    raise OSError(f"{host}: no free port for a group's store in {_PORT_ATTEMPTS} attempts")


def _answer_at_once() -> None:
    """Set TCP_NODELAY on this process's sockets, Paddle's among them.

    A TCPStore writes a request in two parts, and without the option the second waits 44 ms for the receipt of
    the first. A group of four takes 1 s to build instead of 0.15 s.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{descriptor}").st_mode):
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# --------------------------------------------------------------------------------------------- collectives

_SUMMED_BY_GLOO = {
    getattr(paddle, name) for name in "float32 float64 bfloat16 int32 int64 int8 uint8 bool".split()
}
_MOVED_BY_GLOO = _SUMMED_BY_GLOO | {paddle.float16}
_NUMPY_OPERATION = {
    _SUM: np.add,
    _AVG: np.add,  # and a division at the end
    core.ReduceOp.MAX: np.maximum,
    core.ReduceOp.MIN: np.minimum,
    core.ReduceOp.PRODUCT: np.multiply,
}


def _all_reduce(group: Any, tensor: paddle.Tensor, op: Any = _SUM, sync_op: bool = True) -> Any:
    """In place. Gloo sums fp16 to inf, refuses AVG, and ends the process at a dtype it does not know."""
    if tensor.dtype in _SUMMED_BY_GLOO and op != _AVG:
        return _gloo.all_reduce(group, tensor, op, sync_op)
    return _reduce_in_steps(tensor, op, group.size(), lambda t, o: _gloo.all_reduce(group, t, o, True), True)


def _reduce(group: Any, tensor: paddle.Tensor, root: int, op: Any = _SUM, sync_op: bool = True) -> Any:
    """As `_all_reduce`, the result on `root` only."""
    if tensor.dtype in _SUMMED_BY_GLOO and op != _AVG:
        return _gloo.reduce(group, tensor, root, op, sync_op)
    on_root = group.rank() == root
    return _reduce_in_steps(tensor, op, group.size(), lambda t, o: _gloo.reduce(group, t, root, o, True), on_root)


@paddle.no_grad()
def _reduce_in_steps(tensor: paddle.Tensor, op: Any, size: int, reduce: Callable, has_result: bool) -> _Done:
    """Reduce fp16 through fp32, and AVG as a sum that is then divided."""
    if tensor.dtype not in _MOVED_BY_GLOO:
        raise TypeError(f"a tensor of dtype {tensor.dtype} cannot be reduced over Gloo")
    wide = tensor.astype("float32") if tensor.dtype == paddle.float16 else tensor
    reduce(wide, _SUM if op == _AVG else op)
    if has_result:
        if op == _AVG:
            wide.scale_(1.0 / size)
        if wide is not tensor:
            paddle.assign(wide.astype(tensor.dtype), tensor)
    return _DONE


def _reduce_scatter_tensor(
    group: Any, out: paddle.Tensor, tensor: paddle.Tensor, op: Any = _SUM, sync_op: bool = True
) -> _Done:
    """Not in Gloo. `out` may be this rank's chunk of `tensor`, as in fleet's sharding.

    Ranks exchange chunks and each sums its own: a third of the time of an all-reduce of the whole.
    """
    if tensor.dtype in (paddle.float16, paddle.bfloat16):  # numpy has no bf16, and fp16 overflows
        with paddle.no_grad():
            total = paddle.empty(out.shape, "float32")
            _reduce_scatter_tensor(group, total, tensor.astype("float32"), op)
            paddle.assign(total.astype(out.dtype), out)
        return _DONE
    member, reduce = _members[group], _NUMPY_OPERATION[op]
    chunks = _array(tensor.contiguous()).reshape(member.size, -1)
    for step in range(1, member.size):
        peer = (member.rank + step) % member.size
        _post(group, peer, chunks[peer].view(np.uint8))
    total = _array(out).reshape(-1)
    np.copyto(total, chunks[member.rank])
    received = np.empty_like(total)
    for step in range(1, member.size):
        _take(group, (member.rank - step) % member.size, received.view(np.uint8))
        reduce(total, received, out=total)
    if op == _AVG:
        np.true_divide(total, member.size, out=total)
    return _DONE


def _reduce_scatter(
    group: Any, out: paddle.Tensor, tensors: Sequence[paddle.Tensor], op: Any = _SUM, sync_op: bool = True
) -> _Done:
    """Not in Gloo: a list, one tensor for each rank."""
    return _reduce_scatter_tensor(group, out, paddle.stack(list(tensors)).detach(), op)


def _all_to_all(
    group: Any, outs: Sequence[paddle.Tensor], tensors: Sequence[paddle.Tensor], sync_op: bool = True
) -> _Done:
    """Not in Gloo: tensor i goes to rank i. Sizes may differ and be 0."""
    return _exchange(group, [_memory(t) for t in outs], [_memory(t.contiguous()) for t in tensors])


def _all_to_all_single(
    group: Any,
    out: paddle.Tensor,
    tensor: paddle.Tensor,
    out_sizes: Sequence[int] = (),
    sizes: Sequence[int] = (),
    sync_op: bool = True,
) -> _Done:
    """Not in Gloo: rows of one tensor to rows of another, in equal parts where no numbers of rows are given."""
    count = group.size()
    return _exchange(group, _split_rows(out, out_sizes, count), _split_rows(tensor.contiguous(), sizes, count))


def _all_to_all_tensor(group: Any, out: paddle.Tensor, tensor: paddle.Tensor, sync_op: bool = True) -> _Done:
    """Not in Gloo."""
    return _all_to_all_single(group, out, tensor)


def _split_rows(tensor: paddle.Tensor, sizes: Sequence[int], count: int) -> list[np.ndarray]:
    sizes = list(sizes) or [tensor.shape[0] // count] * count
    if sum(sizes) != tensor.shape[0] or len(sizes) != count:
        raise ValueError(f"{tensor.shape[0]} rows cannot be split into {sizes} over {count} ranks")
    memory = _memory(tensor)
    row_bytes = memory.size // max(tensor.shape[0], 1)
    return np.split(memory, np.cumsum(sizes[:-1]) * row_bytes)


def _exchange(group: Any, outs: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> _Done:
    member = _members[group]
    for step in range(1, member.size):
        peer = (member.rank + step) % member.size
        _post(group, peer, arrays[peer])
    np.copyto(outs[member.rank], arrays[member.rank])
    for step in range(1, member.size):
        peer = (member.rank - step) % member.size
        _take(group, peer, outs[peer])
    return _DONE


def _all_gather_partial(
    group: Any, out: paddle.Tensor, tensor: paddle.Tensor, count: int, index: int, sync_op: bool = True
) -> _Done:
    """Not in Gloo: rank i gives part i of a tensor all ranks have the shape of; the pipeline passes `out` twice."""
    part = paddle.empty([tensor.size // count], tensor.dtype)
    np.copyto(_memory(part), np.split(_memory(tensor.contiguous()), count)[index])
    return _as_gloo_dtype("all_gather_into_tensor")(group, out, part, sync_op=True)


def _barrier(group: Any, device_id: int = -1) -> _Done:
    """Gloo's gives up when a rank is 30 s late: while the main rank writes a checkpoint, say."""
    nothing = [np.empty(0, np.uint8)] * group.size()
    return _exchange(group, nothing, nothing)


def _as_gloo_dtype(name: str) -> Callable:
    """A Gloo method that only moves data, for every dtype: Gloo ends the process at float8, int16, complex."""
    method = getattr(_gloo, name)

    def known(value: Any) -> Any:
        if isinstance(value, paddle.Tensor):
            return value if value.dtype in _MOVED_BY_GLOO else value.view("uint8")
        return [known(item) for item in value] if isinstance(value, (list, tuple)) else value

    def move(group: Any, *arguments: Any, **options: Any) -> Any:
        return method(group, *map(known, arguments), **options)

    return move


# ------------------------------------------------------------------------------------------ point-to-point
# Gloo's waits for the peer and desynchronises the group (`gloo_channels`): a pipeline of three stages hangs.

_deferred: list[tuple[Any, int, np.ndarray]] | None = None


def _post(group: Any, peer: int, array: np.ndarray) -> None:
    member = _members[group]
    address = functools.partial(member.address, peer)
    _channels.send(member.group_id, member.rank, peer, array.copy(), address)


def _take(group: Any, peer: int, array: np.ndarray) -> None:
    _channels.receive(_members[group].group_id, peer, array)


def _send(group: Any, tensor: paddle.Tensor, peer: int, sync_op: bool = True) -> _Done:
    _post(group, peer, _memory(tensor.contiguous()))
    return _DONE


def _receive(group: Any, tensor: paddle.Tensor, peer: int, sync_op: bool = True) -> _Done:
    return _receive_now_or_at_end(group, peer, _memory(tensor))


def _send_partial(
    group: Any, tensor: paddle.Tensor, peer: int, count: int, index: int, sync_op: bool = True
) -> _Done:
    """Part `index` of `count`: ranks of a tensor-parallel group each pass on a part of what they all hold."""
    _post(group, peer, np.split(_memory(tensor.contiguous()), count)[index])
    return _DONE


def _receive_partial(
    group: Any, tensor: paddle.Tensor, peer: int, count: int, index: int, sync_op: bool = True
) -> _Done:
    return _receive_now_or_at_end(group, peer, np.split(_memory(tensor), count)[index])


def _receive_now_or_at_end(group: Any, peer: int, array: np.ndarray) -> _Done:
    if _deferred is None:
        _take(group, peer, array)
    else:
        _deferred.append((group, peer, array))
    return _DONE


def _start_coalescing(group: Any) -> None:
    """Gloo's does nothing, so a batch that lists its receives first waits for peers that do the same.

    Within a batch sends leave at once and receives wait for its end. The interleaved pipeline needs it.
    """
    global _deferred
    _deferred = []


def _end_coalescing(group: Any, tasks: Any = None) -> None:
    global _deferred
    receives, _deferred = _deferred or [], None
    for receive in receives:
        _take(*receive)


# --------------------------------------------------------------------------------- tensor-parallel kernels
# c_identity, c_concat, c_softmax_with_cross_entropy: "Do not support ... for cpu kernel now". c_split has no
# communicator, and its gradient in mp_ops gathers on axis 0 what the forward split on the last axis.


def _c_identity(x: paddle.Tensor, *_: Any, **__: Any) -> paddle.Tensor:
    return x.clone()


def _c_concat(x: paddle.Tensor, rank: int, nranks: int, ring_id: int, *_: Any) -> paddle.Tensor:
    return _GatherLastAxis.apply(x, dist.get_group(ring_id))


def _gather_last_axis(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    parts = paddle.empty([group.nranks, *x.shape], x.dtype)
    group.process_group.all_gather_into_tensor(parts, x.contiguous(), True)
    return paddle.concat(paddle.unstack(parts), axis=-1)


def _own_part_of_last_axis(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    return paddle.split(x, group.nranks, axis=-1)[group.rank]


class _GatherLastAxis(PyLayer):
    """Every rank uses the whole in the same way, so the gradient of its part is that part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        return _gather_last_axis(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _own_part_of_last_axis(gradient, ctx.group)


class _SplitLastAxis(PyLayer):
    """The signature is that of mp_ops.c_split_eager, whose place it takes."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any, rank: int, nranks: int) -> paddle.Tensor:
        ctx.group = group
        return _own_part_of_last_axis(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _gather_last_axis(gradient, ctx.group)


class _SoftmaxCrossEntropy(PyLayer):
    """-log softmax at the label, over a vocabulary split across the group: one pass, one communication.

    With m the rank's largest logit, e = exp(x - m), s = sum(e), and M the largest m of the group, a softmax
    entry is e * exp(m - M) / S where S = sum over ranks of s * exp(m - M). So ranks exchange m, s and the logit
    of the label. Only e is kept; the gradient is made in its memory. Numpy does the arithmetic: on one thread it
    takes a quarter of the time of Paddle's max, exp and sum.
    """

    @staticmethod
    def forward(ctx: Any, logits: paddle.Tensor, labels: np.ndarray, ignore_index: int, group: Any) -> paddle.Tensor:
        wide = logits if logits.dtype == paddle.float64 else logits.astype("float32")
        kept = paddle.empty(wide.shape, wide.dtype)
        x, e = (_array(tensor.contiguous()).reshape(labels.size, -1) for tensor in (wide, kept))
        largest = x.max(axis=1)
        np.maximum(largest, np.finfo(x.dtype).min, out=largest)  # a part of -inf alone: exp(-inf), not exp(nan)
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
        all_largest, all_sums, all_at_label = _array(gathered).transpose(1, 0, 2)
        peak = all_largest.max(axis=0)
        total = (all_sums * np.exp(all_largest - peak)).sum(axis=0)
        loss = np.where(used, np.log(total) - (all_at_label.sum(axis=0) - peak), 0).astype(x.dtype)

        ctx.kept, ctx.dtype, ctx.at_label = kept, logits.dtype, (rows, column[rows])
        ctx.to_softmax = np.where(used, np.exp(largest - peak) / total, 0).astype(x.dtype)
        return paddle.to_tensor(loss.reshape([*logits.shape[:-1], 1])).astype(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RuntimeError("a second backward: the first made its gradient where the softmax was kept")
        upstream = gradient.astype(kept.dtype).numpy().reshape(-1)
        e = _array(kept).reshape(upstream.size, -1)
        e *= (upstream * ctx.to_softmax)[:, None]
        e[ctx.at_label] -= upstream[ctx.at_label[0]]
        return kept.astype(ctx.dtype)


def _c_softmax_with_cross_entropy(
    logits: paddle.Tensor,
    label: paddle.Tensor,
    group: Any = None,
    return_softmax: bool = False,
    ignore_index: int = -100,
) -> paddle.Tensor:
    """Loss [..., 1] for logits [..., part of the vocabulary] and labels [...] or [..., 1].

    Raises:
        ValueError: a label is neither in the vocabulary nor `ignore_index`, or there is not one for each row.
        NotImplementedError: the softmax is asked for; nothing in fleet does.
    """
    if return_softmax:
        raise NotImplementedError("the tensor-parallel cross-entropy on CPU keeps no softmax to return")
    group = collective._get_default_group() if group is None else group
    vocab_size = logits.shape[-1] * group.nranks
    labels = label.numpy().reshape(-1).astype(np.int64)
    if labels.size * logits.shape[-1] != logits.size:
        raise ValueError(f"labels of shape {list(label.shape)} do not fit logits of shape {list(logits.shape)}")
    wrong = labels[((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)]
    if wrong.size:
        raise ValueError(f"label {wrong[0]} is outside the vocabulary of {vocab_size} and not {ignore_index}")
    return _SoftmaxCrossEntropy.apply(logits, labels, ignore_index, group)


# ------------------------------------------------------------------------------------------------ sharding


def _patch_sharding() -> None:
    """Optimizer sharding, both versions (`DygraphShardingOptimizer`, `DygraphShardingOptimizerV2`)."""
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer
    from paddle.distributed.fleet.utils import tensor_fusion_helper

    # fused buffers know the alignment of accelerators only ("only support dict_keys(['gpu', 'npu', 'xpu'])")
    # and no float64 (KeyError)
    tensor_fusion_helper.alignment["cpu"] = 256
    tensor_fusion_helper.__current_device_type__ = "cpu"
    tensor_fusion_helper.align[paddle.float64] = 8

    # After clear_gradient(True) the next backward *replaces* .grad, which then is no longer a view of the fused
    # buffer: from the second step on the optimizer sees zeros. Zeroing in place keeps the view.
    sharding_v2 = dygraph_sharding_optimizer.DygraphShardingOptimizerV2
    original = sharding_v2.clear_grad

    def clear_grad(self: Any, set_to_zero: bool = True) -> None:
        fused = not self.sd_release_grads and not any(hasattr(p, "main_grad") for p in self._parameter_list)
        if not (fused and set_to_zero):
            original(self, set_to_zero)
            return
        with paddle.no_grad():
            for parameter in self._parameter_list:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    sharding_v2.clear_grad = clear_grad


class _Overridden:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@functools.cache
def group_sharded_classes() -> tuple[type, type, type]:
    """ZeRO stages 2 and 3: (GroupShardedOptimizerStage2, GroupShardedStage2, GroupShardedStage3).

    Construct each with `device="cpu"`; fleet's `group_sharded_parallel` refuses a CPU by itself.
    """
    from paddle.distributed.fleet.meta_parallel.sharding import (
        group_sharded_optimizer_stage2 as optimizer2,
    )
    from paddle.distributed.fleet.meta_parallel.sharding import (
        group_sharded_stage2 as stage2,
    )
    from paddle.distributed.fleet.meta_parallel.sharding import (
        group_sharded_stage3 as stage3,
    )
    from paddle.distributed.fleet.meta_parallel.sharding import (
        group_sharded_storage as storage,
    )

    # they assert an accelerator and parse the index of a device like "gpu:0"
    optimizer2.core = stage3.core = _Overridden(core, is_compiled_with_cuda=lambda: True)
    optimizer2.paddle = stage2.paddle = stage3.paddle = _Overridden(paddle, get_device=lambda: "cpu:0")
    # cvt_to_device knows CUDAPlace and XPUPlace only
    storage.cvt_to_device = lambda tensor, *_: tensor
    # convert_gpu=True copies a parameter with .cpu(), on CPU an alias, and then frees its memory
    add_rank_params = storage.ParamStorage.add_rank_params
    storage.ParamStorage.add_rank_params = lambda self, params, align, convert_gpu=True: add_rank_params(
        self, params, align, False
    )
    return optimizer2.GroupShardedOptimizerStage2, stage2.GroupShardedStage2, stage3.GroupShardedStage3


def count_shared_weights_once(pipeline_layer: Any) -> None:
    """Let the global norm count a weight that pipeline stages share once; call it after building a PipelineLayer.

    Paddle marks the first holder by looking for a parameter's name among attribute names, finds none, and each
    stage adds the weight's gradient (on every device).
    """
    for shared in pipeline_layer.shared_comm.values():
        for attribute in shared["weight_attr"]:
            weight = getattr(shared["layer"], attribute)
            weight.is_firstly_shared = pipeline_layer.global_rank == min(shared["ranks"])


# -------------------------------------------------------------------------------------------- installation


def install() -> None:
    """Replace what fleet lacks on CPU. Once is enough; where the device is not a CPU nothing is done.

    Raises:
        RuntimeError: the ranks have joined already, so their first group is Paddle's.
    """
    if vars(_gloo) or paddle.device.get_device() != "cpu":
        return
    if dist.is_initialized():
        raise RuntimeError("gloo.install() must come before fleet.init() and init_parallel_env()")
    _patch_groups()
    _patch_tensor_parallel()
    _patch_sharding()
    # without an accelerator the attribute is never set, and reading ParallelEnv().device_id raises
    dist.ParallelEnv._device_id = 0
    # resharding of checkpoints and gradient clipping of ZeRO call .cuda() ("No available device found")
    paddle.Tensor.cuda = lambda self, *_, **__: self
    # averages ask for it before they reach Gloo, a wheel without NCCL has none; 2.10 is the first that averages
    if not hasattr(core, "nccl_version"):
        core.nccl_version = lambda: 21000


def _patch_groups() -> None:
    group = core.ProcessGroupGloo
    moving = ("broadcast", "all_gather", "all_gather_into_tensor", "scatter", "scatter_tensor", "gather")
    vars(_gloo).update({name: getattr(group, name) for name in (*moving, "create", "all_reduce", "reduce")})
    # the libuv server ends the process when its port is taken; the plain one raises, and we try another
    paddle.set_flags({"FLAGS_tcp_store_using_libuv": False})
    operations: dict[str, Callable] = {name: _as_gloo_dtype(name) for name in moving} | {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "all_to_all": _all_to_all,
        "all_to_all_tensor": _all_to_all_tensor,
        "all_to_all_single": _all_to_all_single,
        "all_gather_partial": _all_gather_partial,
        "send": _send,
        "recv": _receive,
        "send_partial": _send_partial,
        "recv_partial": _receive_partial,
    }
    for name, operation in operations.items():
        setattr(group, name, operation)
        # Gloo has none of these; tensor and pipeline parallelism call them, always without `sync_op`
        setattr(group, f"{name}_on_calc_stream", _on_calc_stream(operation))
    group.create = staticmethod(_create_group)
    group.allreduce = _all_reduce
    group.barrier = _barrier
    group._start_coalescing, group._end_coalescing = _start_coalescing, _end_coalescing


def _on_calc_stream(operation: Callable) -> Callable:
    return lambda group, *arguments: operation(group, *arguments, sync_op=True)


def _patch_tensor_parallel() -> None:
    from paddle.distributed.fleet.layers.mpu import mp_ops

    paddle._C_ops.c_identity = paddle._legacy_C_ops.c_identity = _c_identity
    paddle._C_ops.c_concat = _c_concat
    mp_ops.c_split_eager = _SplitLastAxis
    mp_ops._c_softmax_with_cross_entropy = _c_softmax_with_cross_entropy
