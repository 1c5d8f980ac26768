"""Start a run: threads, data checks, mesh, trainer; in the order in which a mistake is cheapest to find."""

from __future__ import annotations

from vha_paddle.config import Recipe
from vha_paddle.host import set_compute_threads
from vha_paddle.parallel.start import start_mesh, start_watchdog
from vha_paddle.train.phases import Phases
from vha_paddle.train.trainer import RunData, Trainer, check_precision


def run(recipe: Recipe) -> None:
    """Train `recipe` to its end on the ranks that were started.

    Raises:
        UserError: the recipe does not fit its files, the device or the number of ranks; nothing was written.
        RunError: training failed.
    """
    set_compute_threads()
    check_precision(recipe)
    data = RunData(recipe)
    mesh = start_mesh(recipe.parallel, recipe.num_ranks)
    with start_watchdog(mesh, recipe.failure.hang_seconds) as watchdog:
        Trainer(recipe, data, mesh, Phases(watchdog.enter)).fit()
