"""Which pipeline schedule runs, how many microbatches a stage keeps, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from vha_paddle.config import Parallel
from vha_paddle.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    name: str
    pipeline: int
    virtual: int
    microbatches: int

    @property
    def bubble(self) -> float:
        """Share of a rank's time in which it waits for other stages: (p - 1) / (m v + p - 1)."""
        idle = self.pipeline - 1
        return idle / (self.microbatches * self.virtual + idle)

    def chunks_kept(self, stage: int) -> int:
        """Most forward passes of a model chunk that a stage keeps until their backward pass."""
        passes = self.microbatches * self.virtual
        later = self.pipeline - stage - 1
        if self.name == "forward then backward":
            return passes
        if self.name == "interleaved 1F1B":
            # the first round of microbatches is longer where they do not divide by the stages
            first_round = self.pipeline + self.microbatches % self.pipeline
            return min(2 * later + (self.virtual - 1) * first_round + 1, passes)
        return min(later + 1, passes)

    @property
    def losses_kept(self) -> int:
        """Microbatches whose loss waits for its backward pass on the last stage."""
        return self.microbatches if self.name == "forward then backward" else 1


def schedule_of(parallel: Parallel, microbatches: int) -> Schedule:
    """fleet's choice among its schedules.

    Raises:
        UserError: virtual stages with microbatches that no schedule takes.
    """
    pipeline, virtual = parallel.pipeline, parallel.virtual_pipeline
    if virtual == 1:
        name = "one stage" if pipeline == 1 else "1F1B"
    elif microbatches >= 2 * pipeline:
        name = "interleaved 1F1B"
    elif microbatches == pipeline:
        name = "forward then backward"
    else:
        raise UserError(
            f"parallel.virtual_pipeline={virtual}: {microbatches} microbatches on {pipeline} stages; there must be as "
            f"many as stages or at least {2 * pipeline}; raise data.global_batch_size, or use virtual_pipeline=1"
        )
    return Schedule(name=name, pipeline=pipeline, virtual=virtual, microbatches=microbatches)
