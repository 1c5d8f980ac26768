"""Recipe against checkpoint: which keys a run may change where it continues.

A key is free where a run of the new recipe from its start would have come to the same checkpoint (under another layout,
to the same up to rounding). Any other makes a run that no recipe describes: that is refused, naming both values,
unless the command allows the key. Where the state of the checkpoint cannot serve the new value, nothing allows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vha_paddle.checkpoint.layout import Checkpoint
from vha_paddle.config import Model, Recipe
from vha_paddle.config.differences import differences
from vha_paddle.errors import UserError
from vha_paddle.tensors import model_tensors
from vha_paddle.train.schedule import learning_rate

FREE: Mapping[str, str] = {
    "run.name": "a name",
    "run.output": "the run may move",
    "run.start_from": "read only where a run starts",
    "data.train": "the path may change: the fingerprint of the data tells whether they did",
    "data.validation": "not trained on",
    "data.tokenizer": "the path may change: the fingerprint of the data tells whether it did",
    "data.micro_batch_size": "the same sum in other parts",
    "parallel": "the same sums on other ranks",
    "memory": "computes the same values again",
    "checkpoint": "when and where state is written",
    "failure.hang_seconds": "when a run ends",
    "failure.max_skipped_steps": "when a run ends",
    "logging": "what is measured and told",
    "debug": "what is checked",
}
"""Keys, or sections, that may change, and why."""

FIXED: Mapping[str, str] = {
    "run.seed": "it orders the data",
    "model": "its weights are of that model",
    "data.sequence_length": "its place in the data is counted in sequences of that",
    "data.global_batch_size": "its place in the data is counted in batches of that",
    "precision.compute": "the optimizer's state is of that",
}
"""Keys, or sections, that cannot change, and why."""


def refuse_changes(checkpoint: Checkpoint, recipe: Recipe, allowed: Collection[str]) -> None:
    """Compare the recipe with the one that the checkpoint was trained with.

    Raises:
        UserError: a key differs that is neither free nor in `allowed`, or one is in `allowed` that cannot change.
    """
    before, where = checkpoint.recipe, checkpoint.path.name
    changed = {
        key: (old, new) for key, old, new in differences(before, recipe) if not _is_free(key, checkpoint, recipe)
    }
    for key, (old, new) in changed.items():
        reason = _entry(FIXED, key)
        if reason is not None:
            weights = (
                f", which run.start_from={checkpoint.path} gives its weights"
                if _shapes(before.model) == _shapes(recipe.model)
                else "; it cannot take the weights, as tensors have other shapes"
            )
            raise UserError(
                f"{key}={_shown(new)}: {where} was trained with {_shown(old)}, and {reason}; use that, or another "
                f"run.output for a new run{weights}"
            )
    refused = {key: values for key, values in changed.items() if key not in allowed}
    if refused:
        told = ", ".join(f"{key}={_shown(new)} (it was {_shown(old)})" for key, (old, new) in refused.items())
        flags = " ".join(f"--allow-changed {key}" for key in refused)
        raise UserError(
            f"{told}: differs from what {where} was trained with; use that, another run.output for a new run, or "
            f"{flags} to change it from here on"
        )


def changed_keys(before: Recipe, after: Recipe) -> list[str]:
    """`section.key old -> new` for every key whose value differs, in the order of the recipe."""
    return [f"{key} {old} -> {new}" for key, old, new in differences(before, after)]


def _is_free(key: str, checkpoint: Checkpoint, recipe: Recipe) -> bool:
    if key.startswith("schedule."):
        return _has_the_same_past(checkpoint, recipe)
    return _entry(FREE, key) is not None


def _has_the_same_past(checkpoint: Checkpoint, recipe: Recipe) -> bool:
    """Whether both schedules gave every step until the checkpoint the same learning rate: a constant one may be made
    longer, a cosine may not."""
    peak, tokens = recipe.optim.lr, checkpoint.recipe.tokens_per_step
    ends = range(tokens, checkpoint.state.tokens + 1, tokens)
    schedules = (checkpoint.recipe.schedule, recipe.schedule)
    return all(len({learning_rate(schedule, peak, end) for schedule in schedules}) == 1 for end in ends)


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in model_tensors(model)}


def _entry(table: Mapping[str, str], key: str) -> str | None:
    return next((reason for name, reason in table.items() if f"{key}.".startswith(f"{name}.")), None)


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
