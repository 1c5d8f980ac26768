"""Start a run: threads, data checks, mesh, trainer; in the order in which a mistake is cheapest to find."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from vha_paddle.config import Recipe
from vha_paddle.errors import Interrupted
from vha_paddle.host import set_compute_threads
from vha_paddle.parallel.start import start_mesh, start_watchdog
from vha_paddle.train.data import RunData
from vha_paddle.train.interrupt import interrupts
from vha_paddle.train.out_of_memory import memory_explained
from vha_paddle.train.phases import Phases
from vha_paddle.train.resume import what_continues
from vha_paddle.train.trainer import Trainer, check_precision


def run(recipe: Recipe, allow_changed: Collection[str] = ()) -> None:
    """Train `recipe` to its end on the ranks that were started.

    Args:
        allow_changed: keys that may differ from the recipe of the checkpoint that is continued, though they change
            what is trained.

    Raises:
        UserError: the recipe does not fit its files, the device or the number of ranks; nothing was written.
        RunError: training failed.
        Interrupted: a signal asked for the end; the step it came in is saved.
    """
    with interrupts() as signals:
        set_compute_threads()
        check_precision(recipe)
        data = RunData(recipe)
        mesh = start_mesh(recipe.parallel, recipe.num_ranks)
        watching = start_watchdog(mesh, recipe.failure.hang_seconds, lambda: what_continues(Path(recipe.run.output)))
        with watching as watchdog, memory_explained(recipe, mesh):
            trainer = Trainer(recipe, data, mesh, Phases(watchdog.enter), allow_changed)
            signals.training_begins()
            reached_the_end = trainer.fit(signals.is_requested)
            if not reached_the_end:
                signals.agreed()
                mesh.barrier()  # the launcher gives the others three seconds when the first rank ends
    if not reached_the_end:
        raise Interrupted(f"interrupted: step {trainer.step} is saved; the same command continues the run")
