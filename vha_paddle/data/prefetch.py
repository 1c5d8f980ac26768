"""What the next step needs is read while the current one computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Prefetched(Generic[Value]):
    """A function of the step whose next value is computed in a thread, ahead of being asked for.

    It changes when the function is called, not what is returned: the function must depend on the step alone.
    """

    def __init__(self, function: Callable[[int], Value]) -> None:
        self._function = function
        self._thread = ThreadPoolExecutor(1, "data")
        self._ahead: tuple[int, Future[Value]] | None = None

    def __call__(self, step: int) -> Value:
        """The value of `step`; that of the step after is begun. Whatever the function raises is raised here, at the
        step it belongs to."""
        if self._ahead is not None and self._ahead[0] == step:
            future = self._ahead[1]
        else:
            future = self._thread.submit(self._function, step)
        value = future.result()
        self._ahead = step + 1, self._thread.submit(self._function, step + 1)
        return value
