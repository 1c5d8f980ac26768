"""Which rank answers for a parameter, where several hold the same values.

Along the sharding axis (ZeRO) each parameter has one owner, which alone keeps its moments and master weight and
updates it. The division is by whole tensors, largest first to the least loaded, so it depends on the model only.
Of the ranks that are equal on every other axis, the first counts a gradient in the global norm and writes the
parameter into checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.plan import stages


def assign_owners(parameters: Sequence[paddle.Tensor], degree: int) -> dict[str, int]:
    """Which of `degree` ranks owns each parameter, by canonical name."""
    ranks = stages.assign_owners([parameter.size for parameter in parameters], degree)
    return {info_of(parameter).name: rank for parameter, rank in zip(parameters, ranks, strict=True)}


def owners_of(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> dict[str, int]:
    """Where on the sharding axis the owner of each parameter stands, by canonical name. `parameters` are all."""
    owners = {}
    for is_expert in (False, True):
        # ranks with other experts divide nothing among them: only those with the same experts do
        apart = mesh.expert_degree if is_expert else 1
        group = [parameter for parameter in parameters if info_of(parameter).is_expert == is_expert]
        for name, index in assign_owners(group, mesh.sharding_degree // apart).items():
            owners[name] = index * apart + mesh.sharding_rank % apart
    return owners


def owned(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> list[paddle.Tensor]:
    """The parameters that this rank updates; all of them without sharding."""
    owners = owners_of(parameters, mesh)
    return [parameter for parameter in parameters if owners[info_of(parameter).name] == mesh.sharding_rank]


def with_gradient(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> list[paddle.Tensor]:
    """The parameters whose gradients this rank has after backward: from stage 2 on, of its own and of experts."""
    return list(parameters) if mesh.sharding_stage == 1 else _own_and_experts(parameters, mesh)


def with_weight(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> list[paddle.Tensor]:
    """The parameters whose values this rank keeps between steps: at stage 3 its own and those of experts."""
    return list(parameters) if mesh.sharding_stage < 3 else _own_and_experts(parameters, mesh)


def _own_and_experts(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> list[paddle.Tensor]:
    owners = owners_of(parameters, mesh)
    return [
        parameter
        for parameter in parameters
        if info_of(parameter).is_expert or owners[info_of(parameter).name] == mesh.sharding_rank
    ]


def answered_for(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> list[paddle.Tensor]:
    """The parameters (or parts) that this rank counts and writes: over all ranks, each part exactly once."""
    if mesh.replica != 0 or mesh.context_rank != 0:
        return []
    return [
        parameter
        for parameter in owned(parameters, mesh)
        if not info_of(parameter).is_tied_copy
        and (mesh.tensor_rank == 0 or info_of(parameter).placement.axis is not None)
    ]
