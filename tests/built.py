"""A rank's model of any layout, built in one process without memory for its values."""

from __future__ import annotations

from types import SimpleNamespace

import paddle
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

from vha_paddle.config import Model, Parallel
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.parallel.mesh import Mesh


def built_for(model: Model, parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, Mesh]:
    """The decoder of rank 0 under tensor, sequence, sharding and expert degrees: its parameters have shapes alone.

    fleet's layers ask their group for its size only, and insist on a strategy and on a generator of their own.
    """
    group = None
    if parallel.tensor > 1:
        group = SimpleNamespace(nranks=parallel.tensor, rank=0, id=0, process_group=None)
        monkeypatch.setattr(fleet.fleet, "_user_defined_strategy", fleet.DistributedStrategy(), raising=False)
        generators = get_rng_state_tracker()
        monkeypatch.setattr(generators, "states_", {})
        monkeypatch.setattr(generators, "seeds_", set())
        generators.add("model_parallel_rng", 1)
    mesh = Mesh(
        tensor_degree=parallel.tensor,
        tensor_group=group,
        sequence=parallel.sequence,
        data_degree=parallel.sharding,
        sharding_degree=parallel.sharding,
        expert_degree=parallel.expert,
    )
    with paddle.LazyGuard():
        return build_decoder(model, mesh, seed=1), mesh
