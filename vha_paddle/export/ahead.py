"""The tensors of a checkpoint in the order of its model, each read once, some ahead of being asked for."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from vha_paddle.errors import RunError
from vha_paddle.sources.base import Weights

_AHEAD_BYTES = 128 << 20
_NEXT_BYTES = 512 << 20


class ReadAhead(Mapping[str, np.ndarray]):
    """Reads on a thread while others compute and write.

    What is read ahead stays below 128 MiB together with the tensor at work: memory that is used again is cheaper than
    new one. A next tensor that is larger is read ahead too, as long as the two take no more than the largest tensor of
    all and 512 MiB.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._sizes = {
            name: spec.dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64)) for name, spec in weights.specs.items()
        }
        self._limit = _NEXT_BYTES + max(self._sizes.values(), default=0)
        self._waiting = deque(weights.specs)
        self._pending: deque[tuple[str, Future[np.ndarray[Any, Any]]]] = deque()
        self._pool = ThreadPoolExecutor(1, "read ahead")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """The next tensor, to be let go of before the one after it is asked for.

        Raises:
            RunError: another one is the next.
        """
        expected = next(itertools.chain((each for each, _ in self._pending), self._waiting), None)
        if name != expected:
            raise RunError(f"{name} was asked for where {expected or 'nothing'} is to be read; nothing was kept")
        self._submit(0)
        _, future = self._pending.popleft()
        array = future.result()
        self._submit(self._sizes[name])
        return array

    def check_all_read(self) -> None:
        """Require that every tensor was asked for.

        Raises:
            RunError: one was not.
        """
        for name in itertools.chain((each for each, _ in self._pending), self._waiting):
            raise RunError(f"{name} was not used; nothing was kept")

    def _submit(self, at_work: int) -> None:
        """Have the next ones read, as many as there is room for beside `at_work` bytes; where these are none, at least
        one."""
        held = at_work + sum(self._sizes[name] for name, _ in self._pending)
        while self._waiting:
            name = self._waiting[0]
            held += self._sizes[name]
            if held > (_AHEAD_BYTES if self._pending else self._limit):
                return
            self._pending.append((name, self._pool.submit(self._weights.read, name)))
            self._waiting.popleft()
