"""The ranks of a run as a mesh. At degree 1 every method is the identity and fleet is never started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from vha_paddle.ops.loss import cross_entropy
from vha_paddle.parallel import collectives
from vha_paddle.parallel.placement import Seat


@dataclass(frozen=True)
class Mesh:
    """One process's place among the ranks; groups are fleet's, None at degree 1."""

    rank: int = 0
    """Index of this process among all."""
    num_ranks: int = 1
    tensor_rank: int = 0
    tensor_degree: int = 1
    tensor_group: Any = None
    sequence: bool = False
    """Outside the tensor region each tensor rank holds its share of the sequence."""
    pipeline_rank: int = 0
    pipeline_degree: int = 1
    pipeline_group: Any = None
    virtual_pipeline: int = 1
    """Model chunks of each pipeline rank."""
    context_rank: int = 0
    context_degree: int = 1
    context_group: Any = None
    data_rank: int = 0
    """Which part of the global batch this process reads."""
    data_degree: int = 1
    """Parts that the global batch is cut into: data times sharding ranks."""
    sharding_rank: int = 0
    sharding_degree: int = 1
    sharding_group: Any = None
    """Ranks that divide the optimizer's state among them."""
    sharding_stage: int = 1
    expert_rank: int = 0
    expert_degree: int = 1
    expert_group: Any = None
    """Ranks, consecutive on the sharding axis, that hold different experts and exchange tokens."""
    expert_sharding_group: Any = None
    """The ranks of the sharding axis that hold the same experts; None where there is one."""
    gradient_groups: tuple[Any, ...] = ()
    """Groups over which gradients are summed, one per axis on which ranks see different tokens."""
    expert_gradient_groups: tuple[Any, ...] = ()
    """The same for the parameters of experts: without the ranks that hold other experts."""

    @property
    def is_main(self) -> bool:
        """Whether this process logs and writes what is written once."""
        return self.rank == 0

    @property
    def seat(self) -> Seat:
        """This process's place on the axes that cut parameters."""
        return Seat(self.tensor_rank, self.tensor_degree, self.expert_rank, self.expert_degree)

    @property
    def replica(self) -> int:
        """Which copy of weights and optimizer state this process belongs to: its place on the data axis."""
        return self.data_rank // self.sharding_degree

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the end of the pipeline, where the loss is."""
        return self.pipeline_rank == self.pipeline_degree - 1

    def own_rows(self, global_batch_size: int) -> slice:
        """The rows of the global batch that this rank trains on; they divide evenly over the data ranks."""
        share = global_batch_size // self.data_degree
        return slice(self.data_rank * share, (self.data_rank + 1) * share)

    def pieces(self, share: int) -> list[tuple[int, int]]:
        """The positions [start, stop) of the sequence that this rank holds, `share` of them in all.

        Context parallel cuts the sequence into 2c pieces; rank r holds piece r and piece 2c - 1 - r, so that early
        queries with few keys and late ones with many come to the same work on every rank.
        """
        if self.context_degree == 1:
            return [(0, share)]
        size = share // 2
        return [(i * size, (i + 1) * size) for i in collectives.pieces_of(self.context_rank, self.context_degree)]

    def own_positions(self, sequence_length: int) -> np.ndarray[Any, Any]:
        """Indices into a whole sequence of the positions that this rank holds."""
        return self._positions(sequence_length // self.context_degree)

    def outer_positions(self, share: int) -> np.ndarray[Any, Any]:
        """Positions of the `share` tokens that this rank holds outside the tensor region."""
        if not self.sequence:
            return self._positions(share)
        return self._positions(share * self.tensor_degree)[self.tensor_rank * share :][:share]

    def _positions(self, share: int) -> np.ndarray[Any, Any]:
        return np.concatenate([np.arange(start, stop) for start, stop in self.pieces(share)])

    def gather_context(self, x_BSKH: paddle.Tensor) -> paddle.Tensor:
        """Every context rank's positions, in the order of the sequence; gradients are summed and cut back."""
        return x_BSKH if self.context_degree == 1 else collectives.gather_context(x_BSKH, self.context_group)

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

    def part_inside(self, value: float) -> float:
        """This rank's part of a number that every tensor rank has *inside* the region, where they are summed."""
        return value / self.tensor_degree

    def cross_entropy(self, logits_BSV: paddle.Tensor, labels_BS: paddle.Tensor) -> paddle.Tensor:
        """Cross-entropy of each token, `[B, S]`; the vocabulary of the logits is split over the tensor ranks."""
        if self.tensor_degree == 1:
            return cross_entropy(logits_BSV, labels_BS)
        if logits_BSV.dtype in (paddle.bfloat16, paddle.float16):
            logits_BSV = logits_BSV.astype("float32")  # as the loss in one process does
        return collectives.vocab_parallel_cross_entropy(logits_BSV, labels_BS, self.tensor_group)

    def sum_over_batch(self, value: float) -> float:
        """Sum of every rank's number over the parts of the batch, from the last pipeline stage to all."""
        groups = self.gradient_groups + ((self.pipeline_group,) if self.pipeline_degree > 1 else ())
        return float(_reduced(np.array([value if self.is_last_stage else 0.0]), groups)[0]) if groups else value

    def sum_over_tokens(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Sum of every rank's numbers (float64) over the parts of the batch and the pipeline stages, on all ranks."""
        groups = self.gradient_groups + ((self.pipeline_group,) if self.pipeline_degree > 1 else ())
        return _reduced(values, groups)

    def sum_over_ranks(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Sum of every rank's numbers (float64), on all ranks."""
        return values if self.num_ranks == 1 else _reduced(values, (None,))

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The largest of every rank's numbers, each for itself, on all ranks."""
        if self.num_ranks == 1:
            return list(values)
        return [float(value) for value in _reduced(np.array(values), (None,), dist.ReduceOp.MAX)]

    def objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = []
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.num_ranks > 1:
            dist.barrier()

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on at least one rank."""
        return self.max_over_ranks([float(flag)])[0] > 0


def _reduced(
    values: np.ndarray[Any, Any], groups: tuple[Any, ...], operation: Any = dist.ReduceOp.SUM
) -> np.ndarray[Any, Any]:
    """Numbers (float64) combined over one group after the other; None is that of all ranks."""
    holder = paddle.to_tensor(values, dtype="float64")
    for group in groups:
        dist.all_reduce(holder, op=operation, group=group)
    result: np.ndarray[Any, Any] = holder.numpy()
    return result
