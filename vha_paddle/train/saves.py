"""Saves that may fail: a full disk costs a checkpoint, not the run, until too many have failed one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vha_paddle.checkpoint.layout import RunState
from vha_paddle.checkpoint.save import CheckpointSaver, OptimizerState, Router
from vha_paddle.errors import RunError


class Saves:
    """The saves of one run. Every rank holds one, and all learn of a failure together (`CheckpointSaver.wait`)."""

    def __init__(self, saver: CheckpointSaver, max_failed: int, warn: Callable[[str], None]) -> None:
        """`warn` is told of each save that failed."""
        self._saver, self._max_failed, self._warn = saver, max_failed, warn
        self.failed = 0
        """Saves that failed since the last one that did not."""

    def save(self, state: RunState, optimizer: OptimizerState, router: Router | None) -> None:
        """Save, or under `checkpoint.asynchronous` begin to; the save before is finished first.

        Raises:
            RunError: more than `checkpoint.max_failed_saves` have failed one after another.
        """
        self._try(self._saver.wait)
        self._try(lambda: self._save(state, optimizer, router))

    def save_now(self, state: RunState, optimizer: OptimizerState, router: Router | None) -> Path:
        """Save, and return when the checkpoint is there.

        Raises:
            RunError: it could not be written.
        """
        self._try(self._saver.wait)
        path = self._saver.save(state, optimizer, router)
        self._saver.wait()
        return path

    def _save(self, state: RunState, optimizer: OptimizerState, router: Router | None) -> bool:
        self._saver.save(state, optimizer, router)
        return not self._saver.is_writing

    def _try(self, action: Callable[[], bool]) -> None:
        """Do what may fail; it returns whether a checkpoint was completed."""
        try:
            completed = action()
        except RunError as error:
            self.failed += 1
            if self.failed > self._max_failed:
                raise RunError(
                    f"{error} (saves failed one after another: {self.failed}; checkpoint.max_failed_saves="
                    f"{self._max_failed})"
                ) from None
            self._warn(f"{error}; training goes on ({self.failed} of {self._max_failed} saves that may fail in a row)")
        else:
            self.failed = 0 if completed else self.failed
