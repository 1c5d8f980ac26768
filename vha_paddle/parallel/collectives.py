"""The communications of tensor parallelism, each with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.distributed.fleet.layers.mpu import mp_ops


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


def copy_to_group(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """`x` as it is; its gradients are summed over the group."""
    return mp_ops._c_identity(x, group=group)


def vocab_parallel_cross_entropy(
    logits_BSV: paddle.Tensor, labels_BS: paddle.Tensor, group: Any
) -> paddle.Tensor:
    """Cross-entropy `[B, S]` of logits whose vocabulary axis is split over the group."""
    loss_BS1 = mp_ops._c_softmax_with_cross_entropy(logits_BSV, labels_BS.unsqueeze(-1), group=group)
    return loss_BS1.squeeze(-1)


def all_reduce_gradients(gradients: Sequence[paddle.Tensor], group: Any) -> None:
    """Sum each gradient over the group, in place, in one communication per dtype."""
    by_dtype: dict[Any, list[paddle.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    with paddle.no_grad():
        for members in by_dtype.values():
            flat = paddle.concat([gradient.reshape([-1]) for gradient in members])
            dist.all_reduce(flat, group=group)
            start = 0
            for gradient in members:
                part = flat[start : start + gradient.size].reshape(gradient.shape)
                paddle.assign(part, gradient)
                start += gradient.size
