"""The communications of tensor and context parallelism, each with its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.distributed.fleet.layers.mpu import mp_ops

# Gradients are summed in pieces of about this many elements, so that the copy they are joined in stays small.
_BUCKET_ELEMENTS = 1 << 24


class _SumInGroup(PyLayer):
    """Sum over the group, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total


def sum_in_group(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Sum of every rank's `x`; the gradients of the sum are summed too."""
    return _SumInGroup.apply(x, group)


def reduce_in_group(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Sum of every rank's `x`; the gradient of the sum is the same on every rank and passes as it is."""
    return mp_ops._mp_allreduce(x, group=group, use_calc_stream=True, use_model_parallel=True)


class _GatherSequence(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_BSD: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        return _gather(x_BSD, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _scatter_sum(gradient, ctx.group)


class _ScatterSequenceSum(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_BSD: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        return _scatter_sum(x_BSD, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _gather(gradient, ctx.group)


def gather_sequence(x_BSD: paddle.Tensor, group: Any) -> paddle.Tensor:
    """This rank's share of the sequence to the whole; gradients are summed and cut back to the share."""
    return _GatherSequence.apply(x_BSD, group)


def scatter_sequence_sum(x_BSD: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Sum of every rank's `x`, of which each keeps its share of the sequence."""
    return _ScatterSequenceSum.apply(x_BSD, group)


def _gather(x_BSD: paddle.Tensor, group: Any) -> paddle.Tensor:
    # the collectives join and cut the first axis, so the sequence is put there and back; fleet's own operations of
    # this name refuse the strided tensors that come of it
    share = x_BSD.transpose([1, 0, 2]).contiguous()
    whole = paddle.empty([share.shape[0] * group.nranks, *share.shape[1:]], share.dtype)
    dist.stream.all_gather(whole, share, group=group)
    return whole.transpose([1, 0, 2]).contiguous()


def _scatter_sum(x_BSD: paddle.Tensor, group: Any) -> paddle.Tensor:
    whole = x_BSD.transpose([1, 0, 2]).contiguous()
    share = paddle.empty([whole.shape[0] // group.nranks, *whole.shape[1:]], whole.dtype)
    dist.stream.reduce_scatter(share, whole, group=group)
    return share.transpose([1, 0, 2]).contiguous()


def pieces_of(rank: int, degree: int) -> tuple[int, int]:
    """The pieces of the 2 * degree of a sequence that a context rank holds: an early one and its mirror image."""
    return rank, 2 * degree - 1 - rank


class _GatherContext(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_BSE: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        held = _pieces_by_rank(group.nranks)
        return _reorder(_gather(x_BSE, group), [held.index(piece) for piece in range(len(held))])

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _scatter_sum(_reorder(gradient, _pieces_by_rank(ctx.group.nranks)), ctx.group)


def _pieces_by_rank(degree: int) -> list[int]:
    """The pieces of a sequence in the order in which the ranks hold them."""
    return [piece for rank in range(degree) for piece in pieces_of(rank, degree)]


def _reorder(x_BSE: paddle.Tensor, order: list[int]) -> paddle.Tensor:
    """The sequence cut into equal pieces and put together in another order."""
    pieces = paddle.split(x_BSE, len(order), axis=1)
    return paddle.concat([pieces[index] for index in order], axis=1)


def gather_context(x_BSKH: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Every context rank's positions of `x`, in the order of the sequence; gradients are summed and cut back."""
    batch, share, heads, width = x_BSKH.shape
    whole = _GatherContext.apply(x_BSKH.reshape([batch, share, heads * width]), group)
    return whole.reshape([batch, -1, heads, width])


def copy_to_group(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """`x` as it is; its gradients are summed over the group."""
    return mp_ops._c_identity(x, group=group)


def vocab_parallel_cross_entropy(logits_BSV: paddle.Tensor, labels_BS: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Cross-entropy `[B, S]` of logits whose vocabulary axis is split over the group."""
    loss_BS1 = mp_ops._c_softmax_with_cross_entropy(logits_BSV, labels_BS.unsqueeze(-1), group=group)
    return loss_BS1.squeeze(-1)


def all_reduce_gradients(gradients: Sequence[paddle.Tensor], group: Any) -> None:
    """Sum each gradient over the group, in place; small ones travel together."""
    with paddle.no_grad():
        for members in _buckets(gradients):
            if len(members) == 1:
                dist.all_reduce(members[0], group=group)
                continue
            flat = paddle.concat([gradient.reshape([-1]) for gradient in members])
            dist.all_reduce(flat, group=group)
            start = 0
            for gradient in members:
                part = flat[start : start + gradient.size].reshape(gradient.shape)
                paddle.assign(part, gradient)
                start += gradient.size


def _buckets(gradients: Sequence[paddle.Tensor]) -> Iterator[list[paddle.Tensor]]:
    """Neighbours of one dtype, together at most about `_BUCKET_ELEMENTS`."""
    bucket: list[paddle.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.size > _BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.size
    if bucket:
        yield bucket
