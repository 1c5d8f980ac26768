"""The worlds of test_gloo.py: ranks that are started together, and the cases they go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import paddle.distributed as dist
from paddle.distributed import fleet

Case = Callable[[], None]


@dataclass(frozen=True)
class World:
    size: int
    start: Callable[[], Any]
    cases: dict[str, Case] = field(default_factory=dict)
    """Functions that all ranks call, in this order."""

    def case(self, function: Case) -> Case:
        self.cases[function.__name__] = function
        return function


def start_fleet(**degrees: int) -> None:
    strategy = fleet.DistributedStrategy()
    unused = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
    strategy.hybrid_configs = unused | degrees | {"mp_configs": {"need_broadcast_data": False}}
    strategy.hybrid_configs["sharding_configs"].split_param = True
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    fleet.meta_parallel.model_parallel_random_seed(0)


four = World(4, dist.init_parallel_env)
tensor = World(2, lambda: start_fleet(mp_degree=2))
sharding = World(2, lambda: start_fleet(sharding_degree=2))
pipeline = World(2, lambda: start_fleet(pp_degree=2))
WORLDS = {"four": four, "tensor": tensor, "sharding": sharding, "pipeline": pipeline}
