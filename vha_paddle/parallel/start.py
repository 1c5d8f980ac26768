"""Join the ranks that the launcher started, and lay the recipe's degrees over them."""

from __future__ import annotations

import os
from typing import Any

import paddle
import paddle.distributed as dist

from vha_paddle.config import Parallel
from vha_paddle.errors import UserError
from vha_paddle.parallel import gloo
from vha_paddle.parallel.mesh import Mesh

# fleet's default order has no place for experts: it ignores ep_degree without a word. Experts lie along sharding.
_EXPERT_ORDER = ["moe_sharding", "sharding", "pp", "sep", "cp", "dp", "ep", "mp"]


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
            f"{'process was' if launched == 1 else 'processes were'} started; launch with "
            f"`python -m paddle.distributed.launch --nproc_per_node {num_ranks} …` or change parallel.*"
        )
    if num_ranks == 1:
        return Mesh()
    return _mesh(parallel, _start_fleet(parallel))


def _start_fleet(parallel: Parallel) -> Any:
    """Start fleet; returns its groups."""
    from paddle.distributed import fleet

    if paddle.device.get_device() == "cpu":
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"  # how fleet is told; the wheel's default is NCCL
        gloo.install()
    strategy = fleet.DistributedStrategy()
    degrees: dict[str, Any] = {
        "dp_degree": parallel.data,
        "mp_degree": parallel.tensor,
        "pp_degree": parallel.pipeline,
        "sharding_degree": parallel.sharding,
        "sep_degree": parallel.context,
    }
    if parallel.expert > 1:
        strategy.hybrid_parallel_order = _EXPERT_ORDER
        degrees |= {"ep_degree": parallel.expert, "moe_sharding_degree": parallel.sharding // parallel.expert}
    strategy.hybrid_configs = degrees | {"mp_configs": {"need_broadcast_data": False}}
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
    expert_sharding = sharding
    if parallel.expert > 1:
        expert_sharding = group(parallel.sharding // parallel.expert, "moe_sharding")
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
        expert_group=group(parallel.expert, "expert"),
        gradient_groups=tuple(axis for axis in (data, sharding, context) if axis is not None),
        expert_gradient_groups=tuple(axis for axis in (data, expert_sharding, context) if axis is not None),
    )
