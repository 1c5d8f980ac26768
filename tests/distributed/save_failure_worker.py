"""Save a checkpoint while the last rank cannot write: `python save_failure_worker.py OUTPUT`."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

from tests.cases import CASES
from tests.checkpoints import STATE
from vha_paddle.checkpoint import save
from vha_paddle.errors import RunError
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.start import start_mesh
from vha_paddle.train.optimizer import Optimizer


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def main() -> None:
    output = Path(sys.argv[1])
    recipe = CASES[0].recipe("tensor_2")
    mesh = start_mesh(recipe.parallel, recipe.num_ranks)
    optimizer = Optimizer(build_decoder(recipe.model, mesh, seed=0).parameters(), recipe, mesh)
    last = mesh.rank == mesh.num_ranks - 1
    if last:
        save.fill_tensors = full
    try:
        save.save_checkpoint(output, STATE, optimizer, recipe, output / "tokenizer.model", mesh)
    except RunError as error:
        (output / f"rank{mesh.rank}.txt").write_text(str(error), encoding="utf-8")
    mesh.barrier()


if __name__ == "__main__":
    main()
