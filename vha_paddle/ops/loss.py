"""Cross-entropy over the vocabulary, one operation with its own backward.

    e_v = exp(x_v - max x)      loss = log sum_v e_v + max x - x_label
    dx_v = dloss (e_v / sum e - [v = label])

With a vocabulary of 150 thousand these are the largest tensors of a model. Forward keeps e alone, not the
logits, and backward turns it into the gradient in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from vha_paddle.errors import UserError
from vha_paddle.ops.backend import for_each_share, host_view, on_gpu, row_blocks


class _CrossEntropy(PyLayer):
    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV, labels_BS = logits_BSV.contiguous(), labels_BS.contiguous()
        x_TV, label_T = _rows(logits_BSV), host_view(labels_BS).reshape(-1).copy()
        loss_BS = paddle.empty(labels_BS.shape, logits_BSV.dtype)
        loss_T = host_view(loss_BS).reshape(-1)
        sum_T = np.empty_like(loss_T)
        exponentials_BSV = None if logits_BSV.stop_gradient else paddle.empty_like(logits_BSV)
        e_TV = None if exponentials_BSV is None else _rows(exponentials_BSV)

        def work(start: int, stop: int) -> None:
            for rows in row_blocks(start, stop, x_TV[0]):
                x = x_TV[rows]
                e = np.empty_like(x) if e_TV is None else e_TV[rows]
                largest = x.max(axis=-1)
                np.subtract(x, largest[:, None], out=e)
                np.exp(e, out=e)
                sum_T[rows] = e.sum(axis=-1)
                loss_T[rows] = np.log(sum_T[rows]) + largest - x[np.arange(len(x)), label_T[rows]]

        for_each_share(len(x_TV), work)
        ctx.exponentials_BSV, ctx.sum_T, ctx.label_T = exponentials_BSV, sum_T, label_T
        return loss_BS

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gradient_BSV, ctx.exponentials_BSV = ctx.exponentials_BSV, None
        if gradient_BSV is None:
            raise RuntimeError("the exponentials became the gradient: backward runs once")
        e_TV, label_T = _rows(gradient_BSV), ctx.label_T
        dloss_T = host_view(grad.contiguous()).reshape(-1)

        def work(start: int, stop: int) -> None:
            for rows in row_blocks(start, stop, e_TV[0]):
                e, dloss = e_TV[rows], dloss_T[rows]
                e *= (dloss / ctx.sum_T[rows])[:, None]
                e[np.arange(len(e)), label_T[rows]] -= dloss

        for_each_share(len(e_TV), work)
        return gradient_BSV, None


def _rows(x: Tensor) -> np.ndarray:
    return host_view(x).reshape(-1, x.shape[-1])


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Minus the log-probability (nats) of each label; loss_BS, not reduced.

    Args:
        logits_BSV: unnormalised log-probabilities.
        labels_BS: int32 or int64 token numbers.

    Raises:
        UserError: a label is no token of the vocabulary (checked on CPU only: on GPU it would cost a sync).
    """
    if logits_BSV.shape[:-1] != labels_BS.shape:
        raise ValueError(f"labels {labels_BS.shape} do not fit logits {logits_BSV.shape}")
    if on_gpu(logits_BSV):  # not run on a GPU in this project's tests; the kernel computes in float32
        return paddle.nn.functional.cross_entropy(
            logits_BSV.astype("float32"), labels_BS.unsqueeze(-1), reduction="none"
        ).squeeze(-1)
    labels, V = host_view(labels_BS.contiguous()), logits_BSV.shape[-1]
    if labels.min() < 0 or labels.max() >= V:
        raise UserError(
            f"labels from {labels.min()} to {labels.max()}: every one must be in [0, {V}), the vocabulary; "
            "tokenize the data with the model's own tokenizer, or correct vocab_size"
        )
    return _CrossEntropy.apply(logits_BSV, labels_BS)
