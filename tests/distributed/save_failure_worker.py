"""Save a checkpoint that the last rank cannot write: `python save_failure_worker.py OUTPUT MODE FATE`.

MODE is `synchronous` or `asynchronous`. FATE of the last rank is `full` (its disk) or `killed`, which happens in
the middle of a save when the other rank has written all its files. Each rank leaves what it was told in rankN.txt.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cases import CASES
from tests.checkpoints import STATE
from vha_paddle.checkpoint import writing
from vha_paddle.checkpoint.save import CheckpointSaver
from vha_paddle.errors import RunError
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.start import start_mesh
from vha_paddle.train.optimizer import Optimizer

WRITE = writing.write_own_tensors


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def killed(path: Path, tensors: Any) -> None:
    WRITE(path, tensors)
    while not (path.parent / ".rank-00000.json").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    output, mode, fate = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    recipe = CASES[0].recipe("tensor_2")
    asynchronous = recipe.checkpoint.model_copy(update={"asynchronous": mode == "asynchronous"})
    recipe = recipe.model_copy(update={"checkpoint": asynchronous})
    mesh = start_mesh(recipe.parallel, recipe.num_ranks)
    optimizer = Optimizer(build_decoder(recipe.model, mesh, seed=0).parameters(), recipe, mesh)
    saver = CheckpointSaver(output, recipe, output / "tokenizer.model", mesh)
    saver.save(STATE, optimizer)
    saver.wait()
    if mesh.rank == mesh.num_ranks - 1:
        writing.write_own_tensors = {"full": full, "killed": killed}[fate]
    try:
        saver.save(replace(STATE, step=STATE.step + 1), optimizer)
        saver.wait()
    except RunError as error:
        (output / f"rank{mesh.rank}.txt").write_text(str(error), encoding="utf-8")
    mesh.barrier()


if __name__ == "__main__":
    main()
