"""What gradients need between backward and the optimizer step: sums over ranks, the global norm, clipping."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.distributed as dist

from vha_paddle.parallel.collectives import all_reduce_gradients
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of


def complete_gradients(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> None:
    """Sum what the ranks computed of each gradient on their part of the work.

    Over the tensor ranks: parameters that every one holds whole but uses on its heads (or, under sequence
    parallelism, its tokens). Over the data ranks: all parameters; the loss is a mean over the global batch, so the
    gradients add up and are not averaged. Called once per optimizer step, after the last backward and before the
    norm: twice would double them.
    """
    if mesh.tensor_degree > 1:
        partial = [parameter.grad for parameter in parameters if info_of(parameter).placement.partial_gradient]
        all_reduce_gradients(partial, mesh.tensor_group)
    for group in mesh.replica_groups:
        all_reduce_gradients([parameter.grad for parameter in parameters], group)


def clip_by_global_norm(parameters: Sequence[paddle.Tensor], max_norm: float, mesh: Mesh) -> float:
    """Scale all gradients so that their norm together is at most `max_norm`; returns the norm before.

    The squares of split parameters are summed over the tensor ranks; a parameter that every rank holds whole
    counts once.
    """
    split = [p.grad for p in parameters if info_of(p).placement.axis is not None]
    whole = [p.grad for p in parameters if info_of(p).placement.axis is None]
    with paddle.no_grad():
        squares = _sum_of_squares(split)
        if mesh.tensor_degree > 1:
            dist.all_reduce(squares, group=mesh.tensor_group)
        squares = squares + _sum_of_squares(whole)
        norm = float(paddle.sqrt(squares).numpy()[0])
        if norm > max_norm:
            for parameter in parameters:
                parameter.grad.scale_(max_norm / norm)
    return norm


def _sum_of_squares(gradients: Sequence[paddle.Tensor]) -> paddle.Tensor:
    """`[1]`, in float64: the sum over a billion elements keeps its digits."""
    total = paddle.zeros([1], dtype="float64")
    for gradient in gradients:
        total = total + paddle._C_ops.squared_l2_norm(gradient).astype("float64")
    return total
