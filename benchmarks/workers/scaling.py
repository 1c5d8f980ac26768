"""One training step over the ranks of a layout, one core each: `scaling.py KEY=DEGREE` (`tensor=1` is one process).

This process is rank 0 and starts the others, which wait on their stdin, so that nothing spins between steps.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

from vha_paddle.host import prepare_process

prepare_process()

from harness import serve  # noqa: E402

from tests.distributed.launch import environments  # noqa: E402


def recipe_of(layout: str):  # noqa: ANN201
    from vha_paddle.config import recipe_from_dict

    key, degree = layout.split("=")
    attention = {"kind": "vha", "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64, "postmix_rank": 4}
    return recipe_from_dict(
        {
            "run": {"name": "scaling", "seed": 0, "output": "unused"},
            "model": {
                "vocab_size": 2048,
                "hidden_size": 512,
                "intermediate_size": 1536,
                "num_hidden_layers": 4,
                "tie_word_embeddings": True,
                "attention": attention,
            },
            "data": {
                "train": "unused",
                "tokenizer": "unused",
                "sequence_length": 512,
                "global_batch_size": 8,
                "micro_batch_size": 1,
            },
            "optim": {"lr": 1e-4, "decay_target": "identity"},
            "schedule": {"kind": "cosine", "total_tokens": 8192, "warmup_tokens": 0, "min_lr": 0.0},
            "parallel": {key: int(degree)},
        },
        source="scaling",
    )


def prepare(layout: str):  # noqa: ANN201
    """A function that trains one step on this rank."""
    import numpy as np

    from vha_paddle.host import set_compute_threads
    from vha_paddle.model.pipelined import build_model
    from vha_paddle.parallel.start import start_mesh
    from vha_paddle.train.optimizer import Optimizer
    from vha_paddle.train.step import train_step

    recipe = recipe_of(layout)
    os.environ["PADDLE_LOCAL_SIZE"] = "1"  # the core is all this rank has
    assert set_compute_threads() == 1
    mesh = start_mesh(recipe.parallel, recipe.num_ranks)
    model = build_model(recipe, mesh, "float32")
    optimizer = Optimizer(model.parameters(), recipe, mesh)
    tokens_BS = np.random.default_rng(0).integers(0, 2048, (8, 513))[mesh.own_rows(8)]

    def step() -> None:
        train_step(model, optimizer, tokens_BS[:, :-1], tokens_BS[:, 1:], 0, 1, 1e-4, 1.0, mesh)

    return step


def follow(layout: str) -> None:
    """Another rank: a step for each line."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with rank 0
    step = prepare(layout)
    for _ in sys.stdin:
        step()


def lead(layout: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    of_ranks = environments(recipe_of(layout).num_ranks)
    others = []
    for rank, environment in enumerate(of_ranks[1:], start=1):
        os.sched_setaffinity(0, {cores[rank]})
        command = [sys.executable, __file__, layout, "follow"]
        others.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True))
    os.sched_setaffinity(0, {cores[0]})
    if others:
        os.environ.update(of_ranks[0])
    own = prepare(layout)

    def step() -> dict[str, float]:
        start = time.perf_counter()
        for other in others:
            assert other.stdin is not None
            other.stdin.write("step\n")
            other.stdin.flush()
        own()
        return {"seconds": time.perf_counter() - start}

    serve(step)


if __name__ == "__main__":
    follow(sys.argv[1]) if sys.argv[2:] == ["follow"] else lead(sys.argv[1])
