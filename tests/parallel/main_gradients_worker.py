"""Two ranks add the gradients of bfloat16 weights: `python main_gradients_worker.py LAYOUT`."""

from __future__ import annotations

import sys

import numpy as np

from tests.parallel.test_main_gradients import Toy, gradients, rounded
from vha_paddle.config import Parallel
from vha_paddle.parallel.gradients import complete_gradients
from vha_paddle.parallel.main_gradients import gradient_of
from vha_paddle.parallel.ownership import with_gradient
from vha_paddle.parallel.sharding import Sharding
from vha_paddle.parallel.start import start_mesh

LAYOUTS = {
    "data": Parallel(data=2),
    "sharding_stage_1": Parallel(sharding=2),
    "sharding_stage_2": Parallel(sharding=2, sharding_stage=2),
}


def main() -> None:
    mesh = start_mesh(LAYOUTS[sys.argv[1]], 2)
    toy, values = Toy("bfloat16", mesh), gradients()
    sharding = Sharding(toy, [], mesh)
    for pair in values[mesh.data_rank :: 2]:
        toy.forward_backward(*pair)
    sharding.finish_backward()
    complete_gradients(toy.parameters(), mesh)
    held = with_gradient(toy.parameters(), mesh)
    assert len(held) == (1 if mesh.sharding_stage == 2 else 2)
    for index, parameter in enumerate((toy.w1, toy.w2)):
        if any(parameter is one for one in held):
            expected = rounded(values)[:, index].astype(np.float64).sum(axis=0)
            assert np.abs(gradient_of(parameter).numpy() - expected).max() < 1e-3
    mesh.barrier()


if __name__ == "__main__":
    main()
