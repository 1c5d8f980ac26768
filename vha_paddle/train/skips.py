"""Steps that are not applied: a loss or gradient that is not finite, and losses far above those before.

A skipped step takes its batch and its place in the schedule, and leaves weights, moments and routers as they were. What
is decided on is the loss and the norm of the whole batch, and what is remembered is in the checkpoint's state, so a
resumed run skips what an unbroken one skips.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from vha_paddle.config.schema import Failure

SPIKE_WINDOW = 128
"""Losses of steps that were applied, the last so many, to whose mean and deviation a loss is compared."""


class Skips:
    """What a run remembers of its losses and of the steps it skipped.

    Args:
        total, in_a_row, losses: as a checkpoint has them.
    """

    def __init__(self, rules: Failure, total: int = 0, in_a_row: int = 0, losses: Sequence[float] = ()) -> None:
        self._rules = rules
        self.total, self.in_a_row = total, in_a_row
        """Steps skipped so far; the last ones of them, one after another."""
        self._losses = deque(losses if rules.spike_sigmas is not None else (), maxlen=SPIKE_WINDOW)

    @property
    def losses(self) -> tuple[float, ...]:
        """The window, oldest first; empty where spikes are not looked for."""
        return tuple(self._losses)

    @property
    def is_over_budget(self) -> bool:
        return self.total > self._rules.max_skipped_steps

    def fault(self, loss: float, grad_norm: float) -> str | None:
        """Why a step is to be skipped, or None."""
        fault, sigmas = not_finite(loss, grad_norm), self._rules.spike_sigmas
        if fault is not None or sigmas is None or len(self._losses) < SPIKE_WINDOW:
            return fault
        mean = math.fsum(self._losses) / SPIKE_WINDOW
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in self._losses) / SPIKE_WINDOW)
        if loss <= mean + sigmas * sigma:
            return None
        return (
            f"loss {loss:.4f} is {(loss - mean) / sigma if sigma else math.inf:.1f} sigma above the mean {mean:.4f} of "
            f"{SPIKE_WINDOW} losses before"
        )

    def applied(self, loss: float) -> None:
        """A step was applied."""
        self.in_a_row = 0
        if self._rules.spike_sigmas is not None:
            self._losses.append(loss)

    def skipped(self) -> None:
        """A step was skipped."""
        self.total += 1
        self.in_a_row += 1


def not_finite(loss: float, grad_norm: float) -> str | None:
    """Why a step cannot be applied, or None."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return f"loss {loss} and gradient norm {grad_norm}: not finite"
