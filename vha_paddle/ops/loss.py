"""Cross-entropy over the vocabulary, one operation with its own backward.

    loss = log sum_v exp(x_v) - x_label        dx_v = dloss (softmax(x)_v - [v = label])

Only the logits and one number per token are kept for backward: with a vocabulary of 150 thousand, one more
tensor of the logits' size would be the largest in the model.
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
        log_sum_BS = paddle.empty(labels_BS.shape, logits_BSV.dtype)
        loss_BS = paddle.empty_like(log_sum_BS)
        x_TV, label_T = _rows(logits_BSV), host_view(labels_BS).reshape(-1)
        log_sum_T, loss_T = (host_view(t).reshape(-1) for t in (log_sum_BS, loss_BS))

        def work(start: int, stop: int) -> None:
            for rows in row_blocks(start, stop, x_TV[0]):
                x = x_TV[rows]
                largest = x.max(axis=-1)
                shifted = x - largest[:, None]
                np.exp(shifted, out=shifted)
                log_sum_T[rows] = largest + np.log(shifted.sum(axis=-1))
                loss_T[rows] = log_sum_T[rows] - x[np.arange(len(x)), label_T[rows]]

        for_each_share(len(x_TV), work)
        ctx.save_for_backward(logits_BSV, labels_BS, log_sum_BS)
        return loss_BS

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits_BSV, labels_BS, log_sum_BS = ctx.saved_tensor()
        grad_logits = paddle.empty_like(logits_BSV)
        x_TV, dx_TV = _rows(logits_BSV), _rows(grad_logits)
        label_T, log_sum_T, dloss_T = (host_view(t).reshape(-1) for t in (labels_BS, log_sum_BS, grad.contiguous()))

        def work(start: int, stop: int) -> None:
            for rows in row_blocks(start, stop, x_TV[0]):
                dx, dloss = dx_TV[rows], dloss_T[rows]
                np.subtract(x_TV[rows], log_sum_T[rows, None], out=dx)
                np.exp(dx, out=dx)
                dx *= dloss[:, None]
                dx[np.arange(len(dx)), label_T[rows]] -= dloss

        for_each_share(len(x_TV), work)
        return grad_logits, None


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
