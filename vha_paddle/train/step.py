"""One optimizer step: microbatches forward and backward, gradients completed over the ranks, clipped, applied."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vha_paddle.errors import RunError
from vha_paddle.model.decoder import Decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.model.pipelined import PipelinedDecoder
from vha_paddle.parallel.gradients import clip_by_global_norm, complete_gradients
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.optimizer import Optimizer


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean cross-entropy of the global batch before the update, nats per token."""
    grad_norm: float
    """Norm of all gradients together, before clipping."""
    moe: dict[str, Any] | None
    """How the experts were used (`model.balance`); None for a model without."""


def accumulate_gradients(
    model: Decoder | PipelinedDecoder,
    tokens_BS: np.ndarray,
    labels_BS: np.ndarray,
    first_sample: int,
    micro_batch_size: int,
    mesh: Mesh,
    enter: Callable[[str], None] = lambda phase: None,
) -> float:
    """Add the gradients of this rank's share of the global batch to the parameters.

    The loss is the mean over the global batch, so every rank divides by all its tokens; returns that mean.
    """
    batches = microbatches_of(tokens_BS, labels_BS, first_sample, micro_batch_size, mesh)
    total = model.forward_backward(batches, 1.0 / tokens_BS.size, enter)
    enter("gradients")
    return mesh.sum_over_batch(total / tokens_BS.size)


def train_step(
    model: Decoder | PipelinedDecoder,
    optimizer: Optimizer,
    tokens_BS: np.ndarray,
    labels_BS: np.ndarray,
    first_sample: int,
    micro_batch_size: int,
    learning_rate: float,
    max_grad_norm: float,
    mesh: Mesh,
    enter: Callable[[str], None] = lambda phase: None,
) -> StepResult:
    """Train on one global batch, the first sequence of which is number `first_sample` of the run.

    `enter` is told the phases: forward, backward (or pipeline), gradients (completed over the ranks, and their norm),
    optimizer.

    Raises:
        RunError: the loss or the gradient is not finite; the weights are left as they were. Every rank sees the
            same norm, so all stop together.
    """
    loss = accumulate_gradients(model, tokens_BS, labels_BS, first_sample, micro_batch_size, mesh, enter)
    complete_gradients(optimizer.parameters, mesh)
    norm = clip_by_global_norm(optimizer.parameters, max_grad_norm, mesh)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise RunError(f"loss {loss} and gradient norm {norm}: not finite; lower optim.lr or look at the data")
    enter("optimizer")
    optimizer.step(learning_rate)
    return StepResult(loss, norm, None if model.balance is None else model.balance.finish_step())
