"""What several ranks must get right beside training alike; each worker asserts on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

HERE = Path(__file__).parent


@pytest.mark.parametrize(("tensor", "sharding"), [(2, 2), (1, 4)])
def test_gradients_of_all_sorts_are_summed_counted_and_clipped_as_in_one_process(tensor: int, sharding: int) -> None:
    run_ranks(HERE / "expert_worker.py", 4, [str(tensor), str(sharding)])


def test_a_parameter_that_differs_between_replicas_is_named_on_every_rank() -> None:
    run_ranks(HERE / "agreement_worker.py", 4, [])
