"""One round of saving and loading about 1 GB of state, beside `cp` of the same files: `checkpoint.py DIRECTORY`.

Every answer holds seconds of: `cp`, `save`, `load` with the files in the page cache; `cp_cold`, `load_cold` after
the files read were dropped from it; `stall`, how long an asynchronous save stopped training (its call, and the wait
before the next update); `slowdown`, by how much longer the forward and backward between the two took than without a
save; `asynchronous`, the save in all. Whatever is written is flushed to disk within its time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vha_paddle.host import prepare_process, set_compute_threads

prepare_process()
import paddle  # noqa: E402
import shape  # noqa: E402
from harness import serve  # noqa: E402

from vha_paddle.checkpoint.layout import RunState, open_checkpoint  # noqa: E402
from vha_paddle.checkpoint.load import load_optimizer, load_parameters  # noqa: E402
from vha_paddle.checkpoint.save import CheckpointSaver  # noqa: E402
from vha_paddle.config import Recipe, recipe_from_dict  # noqa: E402
from vha_paddle.model.decoder import build_decoder  # noqa: E402
from vha_paddle.parallel.mesh import Mesh  # noqa: E402
from vha_paddle.train.optimizer import Optimizer  # noqa: E402


def recipe_for(asynchronous: bool) -> Recipe:
    values = {
        "run": {"name": "benchmark", "seed": 0, "output": "unused"},
        "model": shape.model_config("vha").model_dump(),
        "data": {
            "train": "unused",
            "tokenizer": "unused",
            "sequence_length": 256,
            "global_batch_size": 1,
            "micro_batch_size": 1,
        },
        "optim": {"lr": 1e-3, "decay_target": "identity"},
        "schedule": {"kind": "cosine", "total_tokens": 256, "warmup_tokens": 0, "min_lr": 0.0},
        "checkpoint": {"asynchronous": asynchronous},
    }
    return recipe_from_dict(values, source="benchmark")


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir()), str(target)], check=True)


def drop_from_cache(directory: Path) -> None:
    """Only pages that are on disk are dropped; these files were flushed when they were written."""
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    set_compute_threads()
    directory = Path(sys.argv[1])
    tokenizer = directory / "tokenizer.model"
    tokenizer.write_bytes(b"a tokenizer")
    mesh = Mesh()
    recipe = recipe_for(False)
    model = build_decoder(recipe.model, mesh, seed=0)
    optimizer = Optimizer(model.parameters(), recipe, mesh)
    savers = {
        mode: CheckpointSaver(directory / mode, recipe_for(mode == "asynchronous"), tokenizer, mesh)
        for mode in ("synchronous", "asynchronous")
    }
    state = RunState(step=1, tokens=0, samples=0, seed=0, data_fingerprint="", version="")
    checkpoint, copied = directory / "synchronous/checkpoints/step-00000001", directory / "copy"

    def load() -> None:
        opened = open_checkpoint(checkpoint)
        load_parameters(model.named_tensors(), opened.model_tensors(), mesh)
        load_optimizer(optimizer, opened, mesh)

    tokens_BS = paddle.zeros([1, 256], "int64")

    def gradients() -> None:
        model.loss(tokens_BS, tokens_BS).mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    def step() -> dict[str, float]:
        for written in (directory / "synchronous", directory / "asynchronous", copied):
            shutil.rmtree(written, ignore_errors=True)
        os.sync()  # removing 1 GB is no part of writing it
        answer = {"save": seconds(lambda: savers["synchronous"].save(state, optimizer))}
        answer["bytes"] = sum(path.stat().st_size for path in checkpoint.iterdir())
        answer["load"] = seconds(load)
        answer["cp"] = seconds(lambda: copy(checkpoint, copied))
        shutil.rmtree(copied)
        os.sync()
        drop_from_cache(checkpoint)
        answer["load_cold"] = seconds(load)
        drop_from_cache(checkpoint)
        answer["cp_cold"] = seconds(lambda: copy(checkpoint, copied))
        shutil.rmtree(copied)
        os.sync()
        alone = seconds(gradients)
        start = time.perf_counter()
        answer["stall"] = seconds(lambda: savers["asynchronous"].save(state, optimizer))
        beside = seconds(gradients)
        answer["stall"] += seconds(savers["asynchronous"].wait_for_copy)
        answer["slowdown"] = beside - alone
        savers["asynchronous"].wait()
        answer["asynchronous"] = time.perf_counter() - start
        answer["seconds"] = answer["save"]
        return answer

    serve(step)


if __name__ == "__main__":
    main()
