"""ZeRO: what the ranks of the sharding axis send each other, given the owners of `ownership.py`."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.distributed as dist

from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import assign_owners
from vha_paddle.parallel.placement import info_of


def broadcast_from_owners(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> None:
    """Give every sharding rank the values that the owners updated, in place."""
    if mesh.sharding_degree == 1:
        return
    owners = assign_owners(parameters, mesh.sharding_degree)
    with paddle.no_grad():
        for parameter in parameters:
            source = mesh.sharding_group.ranks[owners[info_of(parameter).name]]
            dist.broadcast(parameter, src=source, group=mesh.sharding_group)
