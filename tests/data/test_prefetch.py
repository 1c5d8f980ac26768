"""Reading ahead changes when something is read, never what."""

from __future__ import annotations

import threading

import pytest

from vha_paddle.data.prefetch import Prefetched
from vha_paddle.errors import RunError

SECONDS = 60  # to wait for a thread at most


def test_each_step_gets_its_own_value_in_any_order() -> None:
    squares = Prefetched(lambda step: step * step)
    assert [squares(step) for step in (3, 4, 5, 2, 7, 7, 8)] == [9, 16, 25, 4, 49, 49, 64]


def test_the_next_step_is_read_while_the_caller_works() -> None:
    read = {step: threading.Event() for step in range(10)}

    def reading(step: int) -> int:
        read[step].set()
        return threading.get_ident()

    prefetched = Prefetched(reading)
    assert prefetched(5) != threading.get_ident()
    assert read[6].wait(SECONDS), "step 6 was not read ahead"
    assert not read[7].is_set()


def test_a_step_is_read_once() -> None:
    steps: list[int] = []

    def reading(step: int) -> int:
        steps.append(step)
        return step

    prefetched = Prefetched(reading)
    for step in range(4):
        assert prefetched(step) == step
    assert steps[:4] == [0, 1, 2, 3] and len(steps) <= 5


def test_an_error_is_raised_in_the_caller_at_the_step_that_it_belongs_to() -> None:
    def reading(step: int) -> int:
        if step == 2:
            raise RunError("the disk is gone")
        return step

    prefetched = Prefetched(reading)
    assert [prefetched(0), prefetched(1)] == [0, 1]
    with pytest.raises(RunError, match="the disk is gone"):
        prefetched(2)
