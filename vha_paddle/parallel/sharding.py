"""ZeRO stage 1: the ranks of the sharding axis divide the optimizer's state; gradients and weights stay whole.

Each parameter has one owner, which alone keeps its moments and master weight and updates it; the others receive the
new value. The division is by whole tensors, largest first to the least loaded, so it depends on the model only.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.distributed as dist

from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of


def assign_owners(parameters: Sequence[paddle.Tensor], degree: int) -> dict[str, int]:
    """Sharding rank that owns each parameter, by canonical name."""
    load = [0] * degree
    owners = {}
    for parameter in sorted(parameters, key=lambda parameter: -parameter.size):  # a stable sort: ties keep their order
        rank = load.index(min(load))
        owners[info_of(parameter).name] = rank
        load[rank] += parameter.size
    return owners


def owned(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> list[paddle.Tensor]:
    """The parameters that this rank updates; all of them without sharding."""
    owners = assign_owners(parameters, mesh.sharding_degree)
    return [parameter for parameter in parameters if owners[info_of(parameter).name] == mesh.sharding_rank]


def broadcast_from_owners(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> None:
    """Give every sharding rank the values that the owners updated, in place."""
    if mesh.sharding_degree == 1:
        return
    owners = assign_owners(parameters, mesh.sharding_degree)
    with paddle.no_grad():
        for parameter in parameters:
            source = mesh.sharding_group.ranks[owners[info_of(parameter).name]]
            dist.broadcast(parameter, src=source, group=mesh.sharding_group)
