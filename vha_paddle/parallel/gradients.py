"""What gradients need between backward and the optimizer step: sums over ranks, the global norm, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from vha_paddle.parallel.collectives import all_reduce_gradients
from vha_paddle.parallel.main_gradients import gradient_of
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import answered_for, owned, with_gradient
from vha_paddle.parallel.placement import info_of
from vha_paddle.tensors import GROUPS, group_of


@dataclass(frozen=True)
class GradientNorms:
    """Norms over all ranks, before clipping."""

    total: float
    by_group: dict[str, float]
    """Of the groups of parameters (`tensors.GROUPS`) that the model has; their squares add up to the total's."""


def complete_gradients(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> None:
    """Sum what the ranks computed of each gradient on their part of the work.

    Over the tensor ranks: parameters that every one holds whole but uses on its heads (or, under sequence
    parallelism, its tokens). Over the data ranks: all parameters; the loss is a mean over the global batch, so the
    gradients add up and are not averaged. Called once per optimizer step, after the last backward and before the
    norm: twice would double them.
    """
    parameters = with_gradient(parameters, mesh)
    if mesh.tensor_degree > 1:
        partial = [gradient_of(parameter) for parameter in parameters if info_of(parameter).placement.partial_gradient]
        all_reduce_gradients(partial, mesh.tensor_group)
    for groups, is_expert in ((mesh.gradient_groups, False), (mesh.expert_gradient_groups, True)):
        gradients = [gradient_of(parameter) for parameter in parameters if info_of(parameter).is_expert == is_expert]
        for group in groups:
            if mesh.sharding_stage > 1 and group is mesh.sharding_group and not is_expert:
                continue  # done in backward
            all_reduce_gradients(gradients, group)


def clip_by_global_norm(parameters: Sequence[paddle.Tensor], max_norm: float, mesh: Mesh) -> GradientNorms:
    """Scale all gradients so that their norm together is at most `max_norm`; returns the norms before.

    Each part of each parameter is counted by the one rank that answers for it.
    """
    with paddle.no_grad():
        counted = mesh.sum_over_ranks(_squares_and_counts(parameters, mesh))
        squares = {group: float(square) for group, (square, count) in zip(GROUPS, counted, strict=True) if count}
        norms = GradientNorms(
            math.sqrt(sum(squares.values())), {group: math.sqrt(square) for group, square in squares.items()}
        )
        if norms.total > max_norm:
            for parameter in with_gradient(parameters, mesh):
                gradient_of(parameter).scale_(max_norm / norms.total)
    return norms


def _squares_and_counts(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> np.ndarray:
    """A row per group: the sum of squares, in float64 so that one over a billion elements keeps its digits, and how
    many parameters it is of. What ranks hold differs, so the groups that there are follow from their sum."""
    totals = [paddle.zeros([1], dtype="float64") for _ in GROUPS]
    counts = np.zeros(len(GROUPS))

    def add(parameter: paddle.Tensor, times: float) -> None:
        index = GROUPS.index(group_of(info_of(parameter).name))
        square = paddle._C_ops.squared_l2_norm(gradient_of(parameter)).astype("float64")
        totals[index] = totals[index] + times * square
        counts[index] += times

    for parameter in answered_for(parameters, mesh):
        add(parameter, 1.0)
    for parameter in _computed_again(parameters, mesh):
        add(parameter, 0.0)  # nothing, unless this rank alone has come to no finite number: then no number at all
    squares: np.ndarray = paddle.concat(totals).numpy()
    return np.stack([squares, counts], axis=1)


def _computed_again(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> list[paddle.Tensor]:
    """Those whose gradient the first tensor rank counts and this one has computed for itself, without a sum that would
    carry a fault of one to all."""
    if mesh.tensor_rank == 0:
        return []
    placements = [(parameter, info_of(parameter).placement) for parameter in owned(parameters, mesh)]
    return [parameter for parameter, placed in placements if placed.axis is None and not placed.partial_gradient]
