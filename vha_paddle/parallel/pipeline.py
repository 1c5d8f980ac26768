"""A model cut into pipeline stages: fleet's PipelineLayer and its schedules, driven with our own microbatches.

fleet chooses the schedule: 1F1B with one chunk per rank; with virtual stages interleaved 1F1B, or all forwards before
all backwards where there are fewer than twice as many microbatches as stages. It moves the activations and sums the
gradients of tied weights. The optimizer, the global norm and the checkpoints stay ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

from vha_paddle.parallel import gloo
from vha_paddle.parallel.mesh import Mesh


@dataclass(frozen=True)
class Part:
    """A piece of a model in the order of the forward pass, built only on the stage that holds it."""

    build: Callable[[], nn.Layer]
    is_block: bool = False
    """Blocks are divided equally among the stages; the other parts go with their neighbours."""
    tied: bool = False
    """One of the two parts that share their `weight`."""
    call: Callable[[nn.Layer, paddle.Tensor], paddle.Tensor] | None = None
    """What the layer does at this place, where that is not its own forward."""


class _Block(nn.Layer):
    """fleet finds the layers to divide the stages by from the name of a class."""


def _describe(part: Part) -> LayerDesc:
    if part.tied:
        description = SharedLayerDesc("tied", nn.Layer, forward_func=part.call, shared_weight_attr="weight")
    else:
        description = LayerDesc(_Block if part.is_block else nn.Layer)
    description.build_layer = part.build
    return description


class _Stages(PipelineLayer):
    """This rank's chunks of the model. Each chunk sees the microbatches in their order, in every schedule."""

    def __init__(self, parts: Sequence[Part], mesh: Mesh, loss: Callable[..., paddle.Tensor]) -> None:
        super().__init__(
            [_describe(part) for part in parts],
            topology=fleet.get_hybrid_communicate_group().topology(),
            loss_fn=loss,
            seg_method="layer:^_Block$",
            num_virtual_pipeline_stages=mesh.virtual_pipeline,
        )
        self.announce: Callable[[int], None] = lambda index: None
        """Called with the index of the microbatch before each forward pass."""
        self._seen: dict[int | None, int] = {}
        self._first = 0

    def restart(self, first: int = 0) -> None:
        """The next microbatch that each chunk sees is number `first`."""
        self._seen.clear()
        self._first = first

    def forward(self, x: paddle.Tensor, chunk_id: int | None = None) -> paddle.Tensor:
        index = self._seen.get(chunk_id, self._first)
        self._seen[chunk_id] = index + 1
        self.announce(index)
        return super().forward(x, chunk_id)


class Pipeline(nn.Layer):
    """Runs microbatches through the stages of all pipeline ranks.

    Args:
        parts: the whole model.
        loss_BS: cross-entropy of each token from what the last part gives and the labels.
        micro_batch_size, num_microbatches: of each training step.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        loss_BS: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor],
        micro_batch_size: int,
        num_microbatches: int,
        mesh: Mesh,
    ) -> None:
        super().__init__()
        self._loss_BS, self._mesh, self._num_microbatches = loss_BS, mesh, num_microbatches
        self._scale = 1.0
        self._losses: list[np.ndarray[Any, Any]] = []
        strategy = fleet.fleet._user_defined_strategy
        strategy.pipeline_configs = {
            "micro_batch_size": micro_batch_size,
            "accumulate_steps": num_microbatches,
            # fleet would send each tensor rank's part of an activation and join them, as if all held the same;
            # under sequence parallelism each holds other tokens, and the loss is wrong without a word
            "enable_partial_send_recv": False,
        }
        self.stages = _Stages(parts, mesh, self._microbatch_loss)
        gloo.count_shared_weights_once(self.stages)
        # not an attribute that nn.Layer registers: it is a layer around `stages`
        self._schedule: list[Any] = [fleet.distributed_model(self.stages)]

    def forward_backward(
        self, inputs: Sequence[paddle.Tensor], labels: Sequence[paddle.Tensor], scale: float
    ) -> np.ndarray[Any, Any]:
        """Add the gradients of `scale` times the summed loss; returns each sequence's loss, on the last stage."""
        schedule = self._start(scale)
        schedule.forward_backward_pipeline(_pairs(inputs, labels), None)
        return self._collected()

    def losses(self, inputs: Sequence[paddle.Tensor], labels: Sequence[paddle.Tensor]) -> np.ndarray[Any, Any]:
        """Each sequence's summed loss, without gradients: on the last stage, empty on the others."""
        schedule = self._start(1.0)
        count = len(inputs)
        if self._mesh.virtual_pipeline > 1:  # interleaving takes whole rounds of microbatches
            padding = -count % self._num_microbatches
            inputs, labels = ([*column, *[column[-1]] * padding] for column in (inputs, labels))
        trained = schedule.accumulate_steps
        schedule.accumulate_steps = self._num_microbatches if self._mesh.virtual_pipeline > 1 else count
        with paddle.no_grad():
            for first in range(0, len(inputs), schedule.accumulate_steps):
                self.stages.restart(first)
                part = slice(first, first + schedule.accumulate_steps)
                schedule.eval_batch(_pairs(inputs[part], labels[part]), compute_loss=True)
        schedule.accumulate_steps = trained
        # the stages remember the shapes they exchange, and whether gradients come back: not from an evaluation
        schedule._p2p_helper.clear_meta_cache()
        return self._collected()[: sum(len(tokens) for tokens in inputs[:count])]

    def _start(self, scale: float) -> Any:
        self._scale = scale
        self._losses.clear()
        self.stages.restart()
        schedule = self._schedule[0]
        schedule.set_virtual_pipeline_rank(0)
        return schedule

    def _microbatch_loss(self, output: paddle.Tensor, labels_BS: paddle.Tensor) -> paddle.Tensor:
        loss_B = self._loss_BS(output, labels_BS).sum(axis=1)
        self._losses.append(loss_B.astype("float64").numpy())
        # fleet broadcasts this value, which nothing reads, and knows no float64; the gradient passes the cast as 1
        return (loss_B.sum() * self._scale).astype("float32")

    def _collected(self) -> np.ndarray[Any, Any]:
        return np.concatenate(self._losses) if self._losses else np.zeros(0)


def _pairs(
    inputs: Sequence[paddle.Tensor], labels: Sequence[paddle.Tensor]
) -> Iterator[tuple[paddle.Tensor, paddle.Tensor]]:
    """What fleet takes from its data set, in order: the first stage the inputs, the last the labels."""
    return zip(inputs, labels, strict=True)
