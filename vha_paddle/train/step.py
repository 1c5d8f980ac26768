"""One optimizer step: microbatches forward and backward, gradients completed over the ranks, clipped, applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vha_paddle.model.decoder import Decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.model.pipelined import PipelinedDecoder
from vha_paddle.parallel.gradients import GradientNorms, clip_by_global_norm, complete_gradients
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.skips import not_finite


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean cross-entropy of the global batch before the update, nats per token."""
    norms: GradientNorms
    """Of the gradients before clipping."""
    moe: dict[str, Any] | None
    """How the experts were used (`model.balance`); None for a model without, and for a skipped step."""
    skipped: str | None = None
    """Why the step was not applied; None where it was."""

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients together, before clipping."""
        return self.norms.total


def accumulate_gradients(
    model: Decoder | PipelinedDecoder,
    tokens_BS: np.ndarray,
    labels_BS: np.ndarray,
    first_sample: int,
    micro_batch_size: int,
    mesh: Mesh,
    enter: Callable[[str], None] = lambda phase: None,
    eod_id: int | None = None,
) -> float:
    """Add the gradients of the rows that this rank has of the global batch (`mesh.own_rows`) to the parameters.

    The loss is the mean over the global batch, so every rank divides by all its tokens; returns that mean.
    """
    batches = microbatches_of(tokens_BS, labels_BS, first_sample, micro_batch_size, mesh, eod_id)
    num_tokens = tokens_BS.size * mesh.data_degree
    total = model.forward_backward(batches, 1.0 / num_tokens, enter)
    enter("gradients")
    return mesh.sum_over_batch(total / num_tokens)


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
    eod_id: int | None = None,
    fault_of: Callable[[float, float], str | None] = not_finite,
) -> StepResult:
    """Train on one global batch, of which this rank has its rows; the first of them is sequence `first_sample` of the
    run. With `eod_id`, which ends a document, attention keeps to documents.

    `enter` is told the phases: forward, backward (or pipeline), gradients (completed over the ranks, and their norm),
    optimizer. `fault_of` says of loss and gradient norm why the step must be skipped, or None: if any rank finds a
    fault, all leave weights, moments and routers as they were.
    """
    loss = accumulate_gradients(model, tokens_BS, labels_BS, first_sample, micro_batch_size, mesh, enter, eod_id)
    complete_gradients(optimizer.parameters, mesh)
    norms = clip_by_global_norm(optimizer.parameters, max_grad_norm, mesh)
    fault = fault_of(loss, norms.total)
    if mesh.any_rank(fault is not None):
        optimizer.discard_gradients()
        if model.balance is not None:
            model.balance.discard_step()
        return StepResult(loss, norms, None, next(found for found in mesh.objects(fault) if found is not None))
    enter("optimizer")
    optimizer.step(learning_rate)
    return StepResult(loss, norms, None if model.balance is None else model.balance.finish_step())
