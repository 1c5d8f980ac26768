"""What the main thread is doing: the seconds of each phase for the log, and where it is for the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable


class Phases:
    """The phases of training, one at a time.

    Args:
        tell: is told the step and the phase that begins.
    """

    def __init__(self, tell: Callable[[int, str], None] = lambda step, phase: None) -> None:
        self._tell = tell
        self._seconds: dict[str, float] = {}
        self._phase, self._since = "start", time.perf_counter()

    def enter(self, step: int, phase: str) -> None:
        """The phase before ends, `phase` of `step` (counted from 1) begins."""
        self._end()
        self._phase = phase
        self._tell(step, phase)

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call, in the order in which they began. Their sum is the time between
        the two calls."""
        self._end()
        taken, self._seconds = self._seconds, {}
        return taken

    def _end(self) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now
