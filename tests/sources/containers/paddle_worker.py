"""Two ranks save a flex folder with Paddle itself: every way in which a tensor can lie in it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
from paddle import distributed as dist
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from tests.sources.containers.fixtures import Part, cut, flattened, flattened_box, sample, stored, whole

RANKS = 2


def layout() -> dict[str, tuple[np.ndarray, list[Part]]]:
    """Every tensor, and what each rank holds of it: with `Part.rank` -1, every rank holds the same."""
    import ml_dtypes

    bfloat16 = ml_dtypes.bfloat16
    arrays = {
        "rows": sample(6, 5, dtype=bfloat16, seed=1),
        "columns": sample(5, 8, dtype=bfloat16, seed=2),
        "middle": sample(3, 4, 5, seed=3),
        "copied": sample(7, dtype=bfloat16, seed=4),
        "copied too": sample(3, 3, seed=5),
        "copied last": sample(2, seed=6),
        "flat": sample(2, 3, 5, seed=7),
        "flat whole": sample(4, 4, seed=8),
        "flat columns": sample(4, 6, seed=9),
        "one": sample(1, seed=10),
        "large": sample(300, 200, seed=11),
    }
    left, right = cut(arrays["flat columns"], 1, RANKS)
    parts = {
        "rows": cut(arrays["rows"], 0, RANKS),
        "columns": cut(arrays["columns"], 1, RANKS),
        "middle": cut(arrays["middle"], 1, RANKS),
        "flat": flattened(arrays["flat"], [13, 30]),  # inside a row
        "flat whole": flattened(arrays["flat whole"], [16], ranks=[1]),
        # rank 0 holds of the left columns, rank 1 of the right ones, the whole each
        "flat columns": flattened_box(left, [12], [0]) + flattened_box(right, [12], [1]),
        "large": flattened(arrays["large"], [41_235, 60_000]),
    }
    return {name: (array, parts.get(name) or whole(array, -1)) for name, array in arrays.items()}


def main() -> None:
    dist.init_parallel_env()
    state = {}
    for name, (array, parts) in layout().items():
        for part in parts:
            if part.rank not in (-1, dist.get_rank()):
                continue
            dtype = "bfloat16" if array.dtype.itemsize == 2 else "float32"
            local = paddle.to_tensor(stored(part.of(array)))
            assert str(local.dtype) == f"paddle.{dtype}"
            elements = None if part.elements is None else slice(*part.elements)
            state[name] = ShardedWeight(
                name, local, part.shape, array.shape, part.offset, elements is not None, elements
            )
    dist.save_state_dict(state, sys.argv[1], save_replicas=sys.argv[2] == "replicas")


if __name__ == "__main__":
    assert Path(sys.argv[0]).name == "paddle_worker.py"
    main()
