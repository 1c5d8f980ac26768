"""Expert parallelism: rows go to the rank that holds their expert, and what it made of them comes back.

An expert group's ranks hold E / e experts each, in their order, and different tokens. Rows that are sorted by expert
lie in the order of the ranks too, so what a rank sends is cut out of one tensor. On arrival the rows lie by sender
and expert; they are put in the order of the experts alone, for the products.

    counts    int64 [e, E / e]       before the rows, so that every rank knows the sizes
    rows      [R, D], either way     all-to-all; in backward the same with the sizes exchanged
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

from vha_paddle.ops.routing import Rows, gather_rows
from vha_paddle.parallel.mesh import Mesh


class Delivery:
    """The way of one layer's rows to their experts and back; every rank of an expert group makes one at a time."""

    def __init__(self, counts_E: np.ndarray[Any, Any], mesh: Mesh) -> None:
        """`counts_E`: rows that this rank has for each expert of the model."""
        self._group = mesh.expert_group
        if self._group is None:
            self.counts: list[int] = counts_E.tolist()
            """Rows that each expert of this rank computes."""
            return
        sent = counts_E.reshape(mesh.expert_degree, -1)
        received = _exchanged_counts(sent, self._group)
        self.counts = received.sum(axis=0).tolist()
        self._sent, self._received = sent.sum(axis=1).tolist(), received.sum(axis=1).tolist()
        experts = np.tile(np.arange(received.shape[1]), mesh.expert_degree)
        arrived = np.repeat(experts, received.reshape(-1))  # the expert of each row, as rows arrive
        order = np.argsort(arrived, kind="stable")
        self._by_expert = Rows.of(order, (len(order), 1))
        self._by_sender = Rows.of(self._by_expert.rows_Tk[:, 0], (len(order), 1))

    def send(self, x_RD: paddle.Tensor) -> paddle.Tensor:
        """This rank's rows, sorted by expert, in exchange for all rows of its experts, sorted by expert."""
        if self._group is None:
            return x_RD
        return gather_rows(_Exchange.apply(x_RD, self._sent, self._received, self._group), self._by_expert)

    def bring_back(self, y_RD: paddle.Tensor) -> paddle.Tensor:
        """The way back: what became of the rows that this rank sent, in the order in which it had them."""
        if self._group is None:
            return y_RD
        return _Exchange.apply(gather_rows(y_RD, self._by_sender), self._received, self._sent, self._group)


class _Exchange(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_RD: paddle.Tensor, sent: list[int], received: list[int], group: Any) -> paddle.Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _all_to_all(x_RD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        sent, received = ctx.sizes
        return _all_to_all(gradient, received, sent, ctx.group)


def _all_to_all(x_RD: paddle.Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> paddle.Tensor:
    out = paddle.empty([sum(received), x_RD.shape[1]], x_RD.dtype)
    dist.alltoall_single(out, x_RD.contiguous(), list(sent), list(received), group=group)
    return out


def _exchanged_counts(sent: np.ndarray[Any, Any], group: Any) -> np.ndarray[Any, Any]:
    """Row r of the result is what rank r of the group sends to this rank's experts."""
    out = paddle.empty(list(sent.shape), "int64")
    dist.alltoall_single(out, paddle.to_tensor(sent, dtype="int64"), group=group)
    received: np.ndarray[Any, Any] = out.numpy()
    return received
