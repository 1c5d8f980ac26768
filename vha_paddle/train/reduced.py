"""A recipe read, reduced for the machine at hand, and overridden: `--reduced` of the tools."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import paddle

from vha_paddle.config import Recipe, load_recipe
from vha_paddle.config.load import with_overrides
from vha_paddle.config.reduced import MOST_RANKS, reduced
from vha_paddle.errors import UserError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.data import RunData
from vha_paddle.train.resume import checkpoint_to_continue


def load_reduced(path: Path, overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe reduced for this machine, then overridden; and what the reduction changed.

    Raises:
        UserError: as `load_recipe`.
    """
    on_cpu = paddle.device.get_device() == "cpu"
    # the GPU side of this line: not run on a GPU in this project's tests
    most_ranks = MOST_RANKS if on_cpu else min(MOST_RANKS, paddle.device.cuda.device_count())
    small = reduced(load_recipe(path), on_cpu, most_ranks)
    return with_overrides(small.recipe, overrides), small.changes


def check_earlier_run(recipe: Recipe, allow_changed: Collection[str]) -> None:
    """Find out in one process what every rank would: whether an earlier run in `run.output` can be continued.

    Raises:
        UserError: it cannot, or the data do not fit.
    """
    fingerprint = RunData(recipe).batches.fingerprint
    try:
        checkpoint_to_continue(recipe, fingerprint, Mesh(), allow_changed)
    except UserError as error:
        output = recipe.run.output
        raise UserError(f"{error}: add run.output={output}_2 to the command, or remove {output}") from None
