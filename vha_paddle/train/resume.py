"""Where a run continues: the newest checkpoint of its directory, if it fits the recipe."""

from __future__ import annotations

from pathlib import Path

from vha_paddle.checkpoint.layout import RECIPE_FILE, Checkpoint, checkpoints_directory, list_steps, step_directory
from vha_paddle.checkpoint.load import open_together
from vha_paddle.config import Recipe
from vha_paddle.config.differences import differences
from vha_paddle.errors import UserError
from vha_paddle.parallel.mesh import Mesh


def checkpoint_to_continue(recipe: Recipe, data_fingerprint: str, mesh: Mesh) -> Checkpoint | None:
    """The newest checkpoint in `run.output`, or None in a fresh directory; every rank calls it.

    Raises:
        UserError: it is damaged, or does not fit the recipe.
    """
    output = Path(recipe.run.output)
    steps = mesh.objects(list_steps(output))[0]  # the main rank's: a shared disk may show others later
    if not steps:
        return None
    if recipe.checkpoint.resume == "never":
        raise UserError(
            f"checkpoint.resume=never: {checkpoints_directory(output)} already holds checkpoints; "
            "use auto to continue them or another run.output"
        )
    try:
        checkpoint = open_together(step_directory(output, steps[-1]), mesh)
    except UserError as error:
        if len(steps) == 1:
            raise
        newest, before = (step_directory(output, step).name for step in (steps[-1], steps[-2]))
        raise UserError(f"{error}: move {newest} away to continue from {before}") from None
    _check_fit(checkpoint, recipe, data_fingerprint)
    return checkpoint


def _check_fit(checkpoint: Checkpoint, recipe: Recipe, data_fingerprint: str) -> None:
    changed = [line for line in changed_keys(checkpoint.recipe, recipe) if line.startswith("model.")]
    if changed:
        raise UserError(
            f"{checkpoint.path / RECIPE_FILE}: the checkpoint was trained with another model section "
            f"({', '.join(changed)}); use its recipe, or another run.output for a new run"
        )
    before, now = checkpoint.recipe.precision.compute, recipe.precision.compute
    if before != now:  # master weights are in one of the two only
        raise UserError(
            f"precision.compute={now}: the checkpoint was trained in {before}, and the optimizer's state is of that; "
            f"use it, or take the weights alone into another run.output with run.start_from={checkpoint.path}"
        )
    if checkpoint.state.data_fingerprint != data_fingerprint:
        raise UserError(
            f"{checkpoint.path}: was trained on other data (files, data.sequence_length or run.seed differ); "
            "restore them, or use another run.output for a new run"
        )
    if checkpoint.state.samples != checkpoint.state.step * recipe.data.global_batch_size:
        raise UserError(
            f"data.global_batch_size={recipe.data.global_batch_size}: the checkpoint was trained with "
            f"{checkpoint.state.samples // checkpoint.state.step}; use that to continue it"
        )
    if checkpoint.state.step > recipe.num_steps:
        raise UserError(
            f"schedule.total_tokens={recipe.schedule.total_tokens}: {recipe.num_steps} steps, but "
            f"{checkpoint.path.name} is beyond them; raise it, or use another run.output"
        )


def changed_keys(before: Recipe, after: Recipe) -> list[str]:
    """`section.key old -> new` for every key whose value differs, in the order of the recipe."""
    return [f"{key} {old} -> {new}" for key, old, new in differences(before, after)]
