"""Which checkpoints of a run are kept, and how others go."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vha_paddle.checkpoint.layout import list_steps, open_without_digests, step_directory
from vha_paddle.errors import UserError
from vha_paddle.files import remove


def remove_old_checkpoints(output: Path, keep: int, tokens_per_step: int, every_tokens: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, the first one of every `every_tokens`, and the last good one.
    Called by one rank after a newer one is complete and durable.

    Nothing is removed where no checkpoint is good.
    """
    good = last_good_step(output)
    if good is None:
        return
    steps = list_steps(output)
    kept = {good, *steps[-keep:]}
    if every_tokens is not None:
        kept.update(first_of_each(steps, tokens_per_step, every_tokens))
    for step in sorted(set(steps) - kept):
        directory = step_directory(output, step)
        hidden = directory.with_name(f".{directory.name}.removed.tmp")  # one half removed must not look whole
        with contextlib.suppress(OSError):  # tried again after the next save
            os.replace(directory, hidden)
            remove(hidden)


def first_of_each(steps: list[int], tokens_per_step: int, every_tokens: int) -> list[int]:
    """Of checkpoints, oldest first, those that are the first at or after a multiple of `every_tokens`.

    Removing any of the others changes nothing about these.
    """
    passed = [step * tokens_per_step // every_tokens for step in (0, *steps)]  # multiples, at each
    return [step for step, before, now in zip(steps, passed, passed[1:], strict=False) if now > before]


def last_good_step(output: Path) -> int | None:
    """The newest checkpoint with all its files, whose last step was applied and not skipped: if weights have become
    unusable, it is of a time before. None where there is none."""
    for step in reversed(list_steps(output)):
        with contextlib.suppress(UserError):
            if open_without_digests(step_directory(output, step)).state.skipped_in_a_row == 0:
                return step
    return None


def set_aside(directory: Path) -> Path:
    """Keep a damaged checkpoint under a name that is no checkpoint's; returns the name.

    Raises:
        OSError: it cannot be renamed.
    """
    number, aside = 1, directory.with_name(f"{directory.name}.damaged")
    while os.path.lexists(aside):
        number += 1
        aside = directory.with_name(f"{directory.name}.damaged-{number}")
    os.replace(directory, aside)
    return aside
