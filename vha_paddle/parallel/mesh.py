"""The ranks of a run as a mesh. At degree 1 every method is the identity and fleet is never started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist

from vha_paddle.config import Parallel
from vha_paddle.errors import UserError
from vha_paddle.ops.loss import cross_entropy
from vha_paddle.parallel import collectives, gloo


@dataclass(frozen=True)
class Mesh:
    """One process's place among the ranks."""

    rank: int = 0
    """Index of this process among all."""
    num_ranks: int = 1
    tensor_rank: int = 0
    tensor_degree: int = 1
    tensor_group: Any = None
    """fleet's group of the tensor-parallel ranks; None at degree 1."""
    sequence: bool = False
    """Outside the tensor region each tensor rank holds its share of the sequence."""
    data_rank: int = 0
    """Which part of the global batch this process reads."""
    data_degree: int = 1
    """Parts that the global batch is cut into: data times sharding ranks."""
    replica_groups: tuple[Any, ...] = ()
    """fleet's groups over which gradients are summed, one per axis of data parallelism."""
    sharding_rank: int = 0
    sharding_degree: int = 1
    sharding_group: Any = None
    """Ranks that divide the optimizer's state among them."""

    @property
    def is_main(self) -> bool:
        """Whether this process logs and writes what is written once."""
        return self.rank == 0

    @property
    def replica(self) -> int:
        """Which copy of weights and optimizer state this process belongs to: its place on the data axis."""
        return self.data_rank // self.sharding_degree

    def enter_tensor_region(self, x: paddle.Tensor) -> paddle.Tensor:
        """Into the region where ranks hold different heads or channels: identity forward, gradients summed.

        Under sequence parallelism the sequence is gathered here, and the gradients cut back to the share.
        """
        if self.sequence:
            return collectives.gather_sequence(x, self.tensor_group)
        return x if self.tensor_degree == 1 else collectives.copy_to_group(x, self.tensor_group)

    def leave_tensor_region(self, x: paddle.Tensor) -> paddle.Tensor:
        """Out of the region: partial results are summed, and under sequence parallelism cut to each rank's share."""
        if self.sequence:
            return collectives.scatter_sequence_sum(x, self.tensor_group)
        return x if self.tensor_degree == 1 else collectives.reduce_in_group(x, self.tensor_group)

    def sum_over_tensor(self, x: paddle.Tensor) -> paddle.Tensor:
        """Sum of partial results *inside* the region, forward and backward.

        Each rank goes on to use the sum on its own channels, so the gradient of the sum is itself partial:
        fleet's `_mp_allreduce`, whose backward is the identity, would be wrong here.
        """
        return x if self.tensor_degree == 1 else collectives.sum_in_group(x, self.tensor_group)

    def cross_entropy(self, logits_BSV: paddle.Tensor, labels_BS: paddle.Tensor) -> paddle.Tensor:
        """Cross-entropy of each token, `[B, S]`; the vocabulary of the logits is split over the tensor ranks."""
        if self.tensor_degree == 1:
            return cross_entropy(logits_BSV, labels_BS)
        return collectives.vocab_parallel_cross_entropy(logits_BSV, labels_BS, self.tensor_group)

    def sum_over_data(self, value: float) -> float:
        """Sum of every data rank's number."""
        if not self.replica_groups:
            return value
        holder = paddle.to_tensor([value], dtype="float64")
        for group in self.replica_groups:
            dist.all_reduce(holder, group=group)
        return float(holder.numpy()[0])

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.num_ranks > 1:
            dist.barrier()

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on at least one rank."""
        if self.num_ranks == 1:
            return flag
        holder = paddle.to_tensor([float(flag)], dtype="float64")
        dist.all_reduce(holder, op=dist.ReduceOp.MAX)
        return bool(holder.numpy()[0] > 0)


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
    return _start_fleet(parallel)


def _start_fleet(parallel: Parallel) -> Mesh:
    from paddle.distributed import fleet

    if paddle.device.get_device() == "cpu":
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"  # how fleet is told; the wheel's default is NCCL
        gloo.install()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": parallel.data,
        "mp_degree": parallel.tensor,
        "pp_degree": 1,
        "sharding_degree": parallel.sharding,
        "mp_configs": {"need_broadcast_data": False},
    }
    fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    # fleet's layers insist on this generator at construction; our values are drawn elsewhere (init.py)
    fleet.meta_parallel.model_parallel_random_seed(0)
    groups = fleet.get_hybrid_communicate_group()
    data_group, sharding_group = groups.get_data_parallel_group(), groups.get_sharding_parallel_group()
    sharding_rank = groups.get_sharding_parallel_rank()
    axes = ((parallel.data, data_group), (parallel.sharding, sharding_group))
    return Mesh(
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        tensor_rank=groups.get_model_parallel_rank(),
        tensor_degree=parallel.tensor,
        tensor_group=groups.get_model_parallel_group() if parallel.tensor > 1 else None,
        sequence=parallel.sequence,
        data_rank=groups.get_data_parallel_rank() * parallel.sharding + sharding_rank,
        data_degree=parallel.data * parallel.sharding,
        replica_groups=tuple(group for degree, group in axes if degree > 1),
        sharding_rank=sharding_rank,
        sharding_degree=parallel.sharding,
        sharding_group=sharding_group if parallel.sharding > 1 else None,
    )
