"""An error of memory, told beside what the plan had estimated and with the keys that lower it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from vha_paddle.config import Recipe
from vha_paddle.errors import RunError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.plan.memory import RankMemory, rank_memory

_GIB = 2**30
_SIGNS = ("ResourceExhausted", "Out of memory", "bad_alloc")
_ASKED = re.compile(r"Cannot allocate \S+|alloc memory of \d+ size|Unable to allocate .+? for an array", re.I)


@contextlib.contextmanager
def memory_explained(recipe: Recipe, mesh: Mesh) -> Iterator[None]:
    """An allocation that failed in the block is raised as what it means for the recipe.

    Raises:
        RunError: naming what was asked for, this rank's estimate, and the keys that lower its largest parts.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(_explanation(error, recipe, mesh)) from error


def is_out_of_memory(error: Exception) -> bool:
    """Paddle raises MemoryError, on some paths a RuntimeError or SystemError with the allocator's words."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | SystemError) and any(sign in str(error) for sign in _SIGNS)
    )


def _explanation(error: Exception, recipe: Recipe, mesh: Mesh) -> str:
    asked = _ASKED.search(str(error))
    estimate = rank_memory(recipe, mesh.pipeline_rank, mesh.sharding_rank)
    return (
        f"out of memory ({asked[0] if asked else type(error).__name__}); the plan's estimate for this rank is "
        f"{estimate.total / _GIB:.3g} GiB: {_parts(estimate)}; {_remedies(recipe)}; what a change would save: "
        "tools/plan.py"
    )


def _parts(estimate: RankMemory) -> str:
    parts = {
        "activations": estimate.activations + max(estimate.loss, estimate.block),
        "optimizer": estimate.optimizer,
        "gradients": estimate.gradients,
        "weights": estimate.weights,
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / _GIB:.3g}" for name, size in ordered)


def _remedies(recipe: Recipe) -> str:
    """What lowers memory and is not done yet."""
    parallel = recipe.parallel
    fewer = []
    if recipe.data.micro_batch_size > 1:
        fewer.append(f"lower data.micro_batch_size={recipe.data.micro_batch_size}")
    if recipe.memory.recompute != "full":
        fewer.append(f"raise memory.recompute={recipe.memory.recompute} to full")
    if recipe.checkpoint.asynchronous:
        fewer.append("on the host, checkpoint.asynchronous=false")
    degrees = ", ".join(f"parallel.{name}={getattr(parallel, name)}" for name in ("sharding", "tensor", "pipeline"))
    return ", ".join([*fewer, f"or raise {degrees}"])
