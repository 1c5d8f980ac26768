"""Join the ranks that the launcher started, and lay the recipe's degrees over them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist

from vha_paddle.config import Parallel
from vha_paddle.errors import UserError
from vha_paddle.parallel import gloo
from vha_paddle.parallel.gloo_channels import is_waiting
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.watchdog import Watchdog


def launched_ranks() -> int:
    """How many processes the launcher started (1 without a launcher)."""
    return dist.ParallelEnv().world_size


def start_mesh(parallel: Parallel, num_ranks: int) -> Mesh:
    """Join the ranks the launcher started and build the mesh a recipe asks for.

    Raises:
        UserError: the launcher started another number of processes than the degrees multiply to.
    """
    launched = launched_ranks()
    if launched != num_ranks:
        raise UserError(
            f"parallel: the degrees multiply to {num_ranks} ranks but {launched} "
            f"{'process was' if launched == 1 else 'processes were'} started; start {num_ranks} with "
            "`python -m paddle.distributed.launch` (--nnodes times --nproc_per_node) or change parallel.*"
        )
    if num_ranks == 1:
        return Mesh()
    return _mesh(parallel, _start_fleet(parallel))


def start_watchdog(mesh: Mesh, hang_seconds: float, advice: Callable[[], str]) -> Watchdog:
    """Watch over the ranks of a mesh until the block ends; every rank calls it. `advice`: what to do if one is lost.

    Where collectives are NCCL's nothing tells which ranks wait, and the one that is longest in its phase is named.
    """
    host = dist.ParallelEnv().current_endpoint.rsplit(":", 1)[0] or "127.0.0.1"

    def share(address: str | None) -> str | None:
        return mesh.objects(address)[0]

    return Watchdog(mesh.rank, mesh.num_ranks, share, hang_seconds, advice, is_waiting, host)


def _start_fleet(parallel: Parallel) -> Any:
    """Start fleet; returns its groups."""
    from paddle.distributed import fleet

    if paddle.device.get_device() == "cpu":
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"  # how fleet is told; the wheel's default is NCCL
        gloo.install()
    fleet.utils.log_util.set_log_level("WARNING")  # a strategy announces itself before `init` can be told
    strategy = fleet.DistributedStrategy()
    degrees: dict[str, Any] = {
        "dp_degree": parallel.data,
        "mp_degree": parallel.tensor,
        "pp_degree": parallel.pipeline,
        "sharding_degree": parallel.sharding,
        "sep_degree": parallel.context,
    }
    strategy.hybrid_configs = degrees | {
        "mp_configs": {"need_broadcast_data": False},
        "pp_configs": {"delay_scale_loss": True},  # the loss is scaled by us; fleet would divide it by microbatches
    }
    with warnings.catch_warnings():
        # of groups that fleet makes for other ranks
        warnings.filterwarnings("ignore", message="Current global rank .* is not in group")
        fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    # fleet's layers insist on this generator at construction; our values are drawn elsewhere (init.py)
    fleet.meta_parallel.model_parallel_random_seed(0)
    return fleet.get_hybrid_communicate_group()


def _mesh(parallel: Parallel, groups: Any) -> Mesh:
    sharding_rank = groups.get_sharding_parallel_rank()

    def group(degree: int, name: str) -> Any:
        return getattr(groups, f"get_{name}_parallel_group")() if degree > 1 else None

    context = group(parallel.context, "sep")
    sharding = group(parallel.sharding, "sharding")
    data = group(parallel.data, "data")
    expert, expert_sharding = _expert_groups(groups, parallel) if parallel.expert > 1 else (None, sharding)
    return Mesh(
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        tensor_rank=groups.get_model_parallel_rank(),
        tensor_degree=parallel.tensor,
        tensor_group=group(parallel.tensor, "model"),
        sequence=parallel.sequence,
        pipeline_rank=groups.get_stage_id(),
        pipeline_degree=parallel.pipeline,
        pipeline_group=group(parallel.pipeline, "pipe"),
        virtual_pipeline=parallel.virtual_pipeline,
        context_rank=groups.get_sep_parallel_rank() if parallel.context > 1 else 0,
        context_degree=parallel.context,
        context_group=context,
        data_rank=groups.get_data_parallel_rank() * parallel.sharding + sharding_rank,
        data_degree=parallel.data * parallel.sharding,
        sharding_rank=sharding_rank,
        sharding_degree=parallel.sharding,
        sharding_group=sharding,
        sharding_stage=parallel.sharding_stage,
        expert_rank=sharding_rank % parallel.expert,
        expert_degree=parallel.expert,
        expert_group=expert,
        expert_sharding_group=expert_sharding,
        gradient_groups=tuple(axis for axis in (data, sharding, context) if axis is not None),
        expert_gradient_groups=tuple(axis for axis in (data, expert_sharding, context) if axis is not None),
    )


def _expert_groups(groups: Any, parallel: Parallel) -> tuple[Any, Any]:
    """This rank's group of different experts, and that of ranks with the same ones (None where it is alone).

    Neighbours on the sharding axis hold different experts. fleet's own groups do not serve: with its default order of
    axes it drops `ep_degree` without a word, and with the order that keeps it experts span the tensor ranks.
    """
    found = []
    for ranks in groups.topology().get_comm_list("sharding"):
        different = [ranks[first : first + parallel.expert] for first in range(0, len(ranks), parallel.expert)]
        same = [list(column) for column in zip(*different, strict=True)]
        for members in (*different, *(column for column in same if len(column) > 1)):
            group = dist.new_group(members)  # every rank creates every group, in this order
            if dist.get_rank() in members:
                found.append(group)
    return found[0], found[1] if len(found) > 1 else None
