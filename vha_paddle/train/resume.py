"""Where a run continues: the newest whole checkpoint of its directory, if it fits the recipe."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from vha_paddle.checkpoint.layout import Checkpoint, checkpoints_directory, list_steps, step_directory
from vha_paddle.checkpoint.load import find_damage, open_together
from vha_paddle.config import Recipe
from vha_paddle.data.fingerprint import difference
from vha_paddle.errors import UserError
from vha_paddle.parallel.agreement import together
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.changes import refuse_changes


@dataclass(frozen=True)
class Continuation:
    """The checkpoint to go on from."""

    checkpoint: Checkpoint
    damaged: dict[Path, str]
    """Newer ones that are not whole, newest first, and what is wrong with each."""


def checkpoint_to_continue(
    recipe: Recipe, data_fingerprint: str, mesh: Mesh, allowed: Collection[str] = ()
) -> Continuation | None:
    """The newest whole checkpoint in `run.output`, or None in a fresh directory; every rank calls it, and all get the
    same. Nothing is written.

    Args:
        allowed: keys that may differ from the checkpoint's recipe though they change what is trained.

    Raises:
        UserError: none is whole, or it does not fit the recipe, or they cannot be looked at.
    """
    output = Path(recipe.run.output)
    with together(mesh):
        found = list_steps(output)
    steps = mesh.objects(found)[0]  # the main rank's: a shared disk may show others later
    if not steps:
        return None
    if recipe.checkpoint.resume == "never":
        raise UserError(
            f"checkpoint.resume=never: {checkpoints_directory(output)} already holds checkpoints; "
            "use auto to continue them or another run.output"
        )
    damaged: dict[Path, str] = {}
    for step in reversed(steps):
        path = step_directory(output, step)
        fault = find_damage(path, mesh)
        if fault is None:
            checkpoint = open_together(path, mesh, with_digests=False)
            _check_fit(checkpoint, recipe, data_fingerprint, allowed)
            return Continuation(checkpoint, damaged)
        damaged[path] = fault
    raise UserError(
        f"{next(iter(damaged.values()))}, and no checkpoint before it is whole; restore one, or move "
        f"{checkpoints_directory(output)} away to start anew"
    )


def what_continues(output: Path) -> str:
    """In a few words where the same command goes on. Only names are looked at, and the start may pass over a damaged
    checkpoint."""
    steps = list_steps(output)
    if not steps:
        return "nothing was saved yet, the same command starts anew"
    return f"last checkpoint {step_directory(output, steps[-1]).name}, the same command continues"


def _check_fit(checkpoint: Checkpoint, recipe: Recipe, data_fingerprint: str, allowed: Collection[str]) -> None:
    if checkpoint.state.step > recipe.num_steps:
        raise UserError(
            f"schedule.total_tokens={recipe.schedule.total_tokens}: {recipe.num_steps} steps, but "
            f"{checkpoint.path.name} is beyond them; raise it, or use another run.output"
        )
    refuse_changes(checkpoint, recipe, allowed)
    if checkpoint.state.data_fingerprint != data_fingerprint:
        names = [part.prefix for part in recipe.data.training_sets]
        what = difference(checkpoint.state.data_fingerprint, data_fingerprint, names)
        raise UserError(
            f"{checkpoint.path}: was trained on other data ({what}); restore them, or use another run.output for a new "
            "run"
        )
