"""Which experts each token is sent to, and how its copies are put in the order of the experts and back.

    p = softmax(logits)      chosen: the k largest of p + bias      w = p of the chosen, divided by their sum or not

The losses that balance the experts are linear in what a token adds to them, given the load f of an earlier batch:
a token adds  a . p  with a = coefficient * E * f,  and  z logsumexp(logits)^2.  So their gradient is added where the
gradient of w comes back, and they need no place in the graph:

    dlogits = p (dp - sum p dp) + 2 z logsumexp(logits) p        dp = a + dw on the chosen, through the division

Letters: T tokens, D hidden, E experts, k experts of a token, R copies that are computed, sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from vha_paddle.ops.backend import for_each_share, gradients_wanted, host_view, on_gpu, only_wanted, row_blocks

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a microbatch go."""

    weights_Tk: Tensor
    """What each of a token's experts counts; differentiable."""
    experts_Tk: Array
    probability_E: Array
    """Sum over the tokens, float64."""
    squared_logsumexp: float
    """Sum over the tokens."""


class _Route(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, top_k: int, normalise: bool, balance_E: Tensor, z: float
    ) -> tuple[Tensor, ...]:
        largest_T1 = logits_TE.max(axis=-1, keepdim=True)
        e_TE = paddle.exp(logits_TE - largest_T1)
        sum_T1 = e_TE.sum(axis=-1, keepdim=True)
        p_TE = e_TE / sum_T1
        lse_T1 = paddle.log(sum_T1) + largest_T1
        experts_Tk = paddle.topk(p_TE if bias_E is None else p_TE + bias_E, top_k, axis=-1)[1]
        chosen_Tk = paddle.take_along_axis(p_TE, experts_Tk, axis=1)
        total_T1 = chosen_Tk.sum(axis=-1, keepdim=True)
        weights_Tk = chosen_Tk / total_T1 if normalise else chosen_Tk
        ctx.normalise, ctx.balance_E, ctx.z = normalise, balance_E, z
        ctx.save_for_backward(p_TE, experts_Tk, weights_Tk, total_T1, lse_T1)
        statistics = p_TE.astype("float64").sum(axis=0), lse_T1.astype("float64").square().sum()
        ctx.mark_non_differentiable(experts_Tk, *statistics)
        return weights_Tk, experts_Tk, *statistics

    @staticmethod
    def backward(ctx: Any, dw_Tk: Tensor, *_: Tensor) -> Tensor:
        p_TE, experts_Tk, weights_Tk, total_T1, lse_T1 = ctx.saved_tensor()
        if ctx.normalise:
            dw_Tk = (dw_Tk - (dw_Tk * weights_Tk).sum(axis=-1, keepdim=True)) / total_T1
        dp_TE = ctx.balance_E + paddle.put_along_axis(paddle.zeros_like(p_TE), experts_Tk, dw_Tk, axis=1)
        dp_TE = dp_TE - (p_TE * dp_TE).sum(axis=-1, keepdim=True)
        return p_TE * (dp_TE + 2 * ctx.z * lse_T1)


def route(
    logits_TE: Tensor,
    top_k: int,
    normalise: bool,
    bias_E: Array | None = None,
    balance_E: Array | float = 0.0,
    z: float = 0.0,
) -> Routing:
    """Choose each token's experts.

    Args:
        logits_TE: float32, or float64.
        top_k: experts k of a token.
        normalise: divide the probabilities of the chosen by their sum.
        bias_E: added to the probabilities to choose by, and to nothing else.
        balance_E, z: what a token's probabilities, and its squared logsumexp, add to what is differentiated.
    """
    E = logits_TE.shape[1]
    bias = None if bias_E is None else paddle.to_tensor(bias_E, logits_TE.dtype)
    balance = paddle.to_tensor(np.broadcast_to(balance_E, (E,)).copy(), logits_TE.dtype)
    weights_Tk, experts_Tk, probability_E, squares = _Route.apply(logits_TE, bias, top_k, normalise, balance, z)
    return Routing(weights_Tk, experts_Tk.numpy(), probability_E.numpy(), float(squares.numpy()))


def within_capacity(experts_Tk: Array, num_sequences: int, num_experts: int, capacity: int) -> Array:
    """Which copies an expert still takes when it takes at most `capacity` of each sequence, the earlier ones first."""
    sequence_T1 = np.repeat(np.arange(num_sequences), len(experts_Tk) // num_sequences)[:, None]
    taker = (sequence_T1 * num_experts + experts_Tk).reshape(-1)  # an expert, as one sequence meets it
    order = np.argsort(taker, kind="stable")
    counts = np.bincount(taker, minlength=num_sequences * num_experts)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - first[taker[order]]
    return (place < capacity).reshape(experts_Tk.shape)


@dataclass(frozen=True)
class Rows:
    """The copies of some tokens in another order: one row each."""

    copies_R: Array
    """Of each row, the copy that it is: t * k + i for the i-th of token t."""
    rows_Tk: Array
    """Of each copy, its row; -1 where it has none."""

    @property
    def tokens_R(self) -> Array:
        return self.copies_R // self.rows_Tk.shape[1]

    @classmethod
    def of(cls, copies_R: Array, shape: tuple[int, ...]) -> Rows:
        rows = np.full(shape[0] * shape[1], -1, np.int64)
        rows[copies_R] = np.arange(len(copies_R))
        return cls(copies_R, rows.reshape(shape))


def sort_by_expert(experts_Tk: Array, num_experts: int, kept_Tk: Array | None = None) -> tuple[Rows, Array]:
    """The kept copies in the order of their experts, tokens in their order within each; and rows of each expert."""
    experts = experts_Tk.reshape(-1)
    if kept_Tk is not None:
        experts = np.where(kept_Tk.reshape(-1), experts, num_experts)
    counts = np.bincount(experts, minlength=num_experts)[:num_experts]
    order = np.argsort(experts.astype(np.int32), kind="stable")  # a radix sort
    return Rows.of(order[: counts.sum()], experts_Tk.shape), counts


class _GatherRows(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        x_TD = x_TD.contiguous()
        out = paddle.empty([len(rows.copies_R), x_TD.shape[1]], x_TD.dtype)
        source, target, tokens_R = host_view(x_TD), host_view(out), rows.tokens_R

        def work(start: int, stop: int) -> None:
            np.take(source, tokens_R[start:stop], axis=0, out=target[start:stop], mode="clip")

        for_each_share(len(target), work)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _sum_of_copies(grad.contiguous(), ctx.rows.rows_Tk, None)


def gather_rows(x_TD: Tensor, rows: Rows) -> Tensor:
    """The token of each row: x_RD."""
    if on_gpu(x_TD):  # not run on a GPU in this project's tests
        return paddle.index_select(x_TD, paddle.to_tensor(rows.tokens_R), axis=0)
    return _GatherRows.apply(x_TD, rows)


class _Combine(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_Tk: Tensor, rows: Rows) -> Tensor:
        ctx.wanted, ctx.rows = gradients_wanted(x_RD, weights_Tk), rows
        x_RD, weights_Tk = x_RD.contiguous(), weights_Tk.contiguous()
        ctx.save_for_backward(x_RD, weights_Tk)
        return _sum_of_copies(x_RD, rows.rows_Tk, host_view(weights_Tk))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weights_Tk = ctx.saved_tensor()
        copies_R, tokens_R = ctx.rows.copies_R, ctx.rows.tokens_R
        dx_RD, dw_Tk = paddle.empty_like(x_RD), paddle.zeros_like(weights_Tk)
        x, dx, dy, w, dw = map(host_view, (x_RD, dx_RD, grad.contiguous(), weights_Tk, dw_Tk))
        w, dw = w.reshape(-1), dw.reshape(-1)

        def work(start: int, stop: int) -> None:
            for block in row_blocks(start, stop, dy[0]):
                np.take(dy, tokens_R[block], axis=0, out=dx[block], mode="clip")
                dw[copies_R[block]] = np.einsum("rd,rd->r", x[block], dx[block])
                dx[block] *= w[copies_R[block], None]

        for_each_share(len(x), work)
        return only_wanted(ctx.wanted, dx_RD, dw_Tk)


def combine(x_RD: Tensor, weights_Tk: Tensor, rows: Rows) -> Tensor:
    """Each token's copies, weighted and summed: y_TD. A copy without a row counts as zero.

    Args:
        x_RD: what the experts made of the rows.
        weights_Tk: of x's dtype.
        rows: which copies they are.
    """
    if on_gpu(x_RD):  # not run on a GPU in this project's tests
        index = paddle.to_tensor(np.maximum(rows.rows_Tk, 0).reshape(-1))
        kept_Tk = paddle.to_tensor(rows.rows_Tk >= 0).astype(x_RD.dtype)
        copies_TkD = paddle.index_select(x_RD, index, axis=0).reshape([*rows.rows_Tk.shape, x_RD.shape[1]])
        return (copies_TkD * (weights_Tk * kept_Tk).unsqueeze(-1)).sum(axis=1)
    return _Combine.apply(x_RD, weights_Tk, rows)


def _sum_of_copies(x_RD: Tensor, rows_Tk: Array, weights_Tk: Array | None) -> Tensor:
    """Sum of each token's rows, times their weights where there are some."""
    (T, k), D = rows_Tk.shape, x_RD.shape[1]
    out = paddle.zeros([T, D], x_RD.dtype)
    x, y = host_view(x_RD), host_view(out)

    def work(start: int, stop: int) -> None:
        for block in row_blocks(start, stop, y[0]):
            for i in range(k):
                index = rows_Tk[block, i]
                part = np.take(x, index, axis=0, mode="clip")
                part[index < 0] = 0
                if weights_Tk is not None:
                    part *= weights_Tk[block, i, None]
                y[block] += part

    for_each_share(T, work)
    return out
