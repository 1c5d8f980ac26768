"""Read a checkpoint under one layout and write it again: `python reshard_worker.py CHECKPOINT OUTPUT LAYOUT`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tests.cases import LAYOUTS
from vha_paddle.checkpoint.layout import open_checkpoint
from vha_paddle.checkpoint.load import load_optimizer, load_parameters
from vha_paddle.checkpoint.save import save_checkpoint
from vha_paddle.config import Parallel
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.start import start_mesh
from vha_paddle.train.optimizer import Optimizer


def main() -> None:
    checkpoint, output, layout = open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
    recipe = checkpoint.recipe.model_copy(update={"parallel": Parallel(**LAYOUTS[layout])})
    mesh = start_mesh(recipe.parallel, recipe.num_ranks)
    model = build_decoder(recipe.model, mesh, seed=1234)
    optimizer = Optimizer(model.parameters(), recipe, mesh)
    load_parameters(model.named_tensors(), checkpoint.model_tensors(), mesh)
    load_optimizer(optimizer, checkpoint, mesh)
    state = replace(checkpoint.state, version=layout)  # the copies must not differ in the tensors alone by chance
    save_checkpoint(output, state, optimizer, recipe, checkpoint.tokenizer_path, mesh)
    mesh.barrier()


if __name__ == "__main__":
    main()
