"""Read a checkpoint under one layout and write it again: `python reshard_worker.py CHECKPOINT OUTPUT LAYOUT`.

It is written twice, to OUTPUT/synchronous and OUTPUT/asynchronous; while the second is being written, every weight
and every moment is overwritten.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import paddle

from tests.cases import LAYOUTS
from vha_paddle.checkpoint.load import load_optimizer, load_parameters, open_together, router_state
from vha_paddle.checkpoint.save import CheckpointSaver
from vha_paddle.config import Parallel, load_recipe
from vha_paddle.model.pipelined import build_model
from vha_paddle.parallel.ownership import with_weight
from vha_paddle.parallel.start import start_mesh
from vha_paddle.train.optimizer import Optimizer


def main() -> None:
    path, output, layout = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    recipe = load_recipe(path / "recipe.yaml")
    run = recipe.run.model_copy(update={"seed": 1234})
    recipe = recipe.model_copy(update={"parallel": Parallel(**LAYOUTS[layout]), "run": run})
    mesh = start_mesh(recipe.parallel, recipe.num_ranks)
    checkpoint = open_together(path, mesh)
    model = build_model(recipe, mesh, recipe.precision.compute)
    optimizer = Optimizer(model.parameters(), recipe, mesh)
    load_parameters(model.named_tensors(), checkpoint.model_tensors(), mesh)
    load_optimizer(optimizer, checkpoint, mesh)
    if model.balance is not None:
        model.balance.restore(router_state(model.balance.state(), checkpoint))
    # the copies must not differ in the tensors alone by chance
    state = replace(checkpoint.state, version=layout)
    for mode in ("synchronous", "asynchronous"):
        mode_recipe = recipe.model_copy(
            update={"checkpoint": recipe.checkpoint.model_copy(update={"asynchronous": mode == "asynchronous"})}
        )
        saver = CheckpointSaver(output / mode, mode_recipe, checkpoint.tokenizer_path, mesh)
        saver.save(state, optimizer, None if model.balance is None else model.balance.state())
        if mode == "asynchronous":
            saver.wait_for_copy()
            held = with_weight(optimizer.parameters, mesh)
            tensors = [*held, *(t for states in optimizer.slots().values() for t in states.values())]
            for tensor in tensors:
                tensor.set_value(paddle.full_like(tensor, 3.0))
        saver.wait()
    mesh.barrier()


if __name__ == "__main__":
    main()
