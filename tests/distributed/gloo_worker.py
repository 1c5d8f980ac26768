"""What each rank of test_gloo.py runs: `gloo_worker.py NAME_OF_WORLD DIRECTORY`.

A rank notes every case it has passed in DIRECTORY/<world>.<rank>, and ends at the first that fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import paddle.distributed as dist

from tests.distributed import gloo_collective_cases, gloo_fleet_cases  # noqa: F401 - they fill the worlds
from tests.distributed.gloo_worlds import WORLDS
from vha_paddle.parallel import gloo


def main(name: str, directory: Path) -> None:
    world = WORLDS[name]
    gloo.install()
    world.start()
    with (directory / f"{name}.{dist.get_rank()}").open("w") as passed:
        for case, function in world.cases.items():
            print(f"=== {case}", flush=True)
            function()
            print(case, file=passed, flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
