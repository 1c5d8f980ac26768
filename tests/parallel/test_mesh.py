"""Which positions of a sequence a rank holds."""

from __future__ import annotations

import numpy as np
import pytest

from vha_paddle.parallel.mesh import Mesh


def context_ranks(degree: int) -> list[Mesh]:
    return [Mesh(context_rank=rank, context_degree=degree) for rank in range(degree)]


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
class TestContextRanks:
    length = 96

    def test_hold_every_position_once_in_ascending_order(self, degree: int) -> None:
        held = [mesh.own_positions(self.length) for mesh in context_ranks(degree)]
        assert all((np.diff(positions) > 0).all() for positions in held)
        assert sorted(np.concatenate(held)) == list(range(self.length))

    def test_have_the_same_number_of_causal_scores_to_compute(self, degree: int) -> None:
        work = [int((mesh.own_positions(self.length) + 1).sum()) for mesh in context_ranks(degree)]
        assert len(set(work)) == 1 and sum(work) == self.length * (self.length + 1) // 2

    def test_find_their_positions_from_their_share(self, degree: int) -> None:
        for mesh in context_ranks(degree):
            pieces = mesh.pieces(self.length // degree)
            assert np.array_equal(np.concatenate([np.arange(*piece) for piece in pieces]), mesh.own_positions(96))


@pytest.mark.parametrize("context", [1, 2])
def test_sequence_parallel_ranks_divide_the_positions_of_their_context_rank(context: int) -> None:
    for context_rank in range(context):
        ranks = [
            Mesh(
                context_rank=context_rank,
                context_degree=context,
                tensor_rank=tensor_rank,
                tensor_degree=4,
                sequence=True,
            )
            for tensor_rank in range(4)
        ]
        shares = [mesh.outer_positions(32 // context // 4) for mesh in ranks]
        assert np.array_equal(np.concatenate(shares), ranks[0].own_positions(32))
