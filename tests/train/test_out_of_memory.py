"""An allocation that fails is told beside the plan's estimate, with the keys that lower it."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.train.conftest import MakeRecipe
from vha_paddle.errors import RunError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.plan.memory import rank_memory
from vha_paddle.train.out_of_memory import memory_explained

# As Paddle words it on a GPU; not seen on one in this project's tests.
GPU = """

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
----------------------
Error Message Summary:
----------------------
ResourceExhaustedError:

Out of memory error on GPU 0. Cannot allocate 5.250000GB memory on GPU 0, 79.134399GB memory has been allocated and \
available memory is only 52.937500MB.
"""


def explained(make_recipe: MakeRecipe, cause: object, **changes: object) -> str:
    recipe = make_recipe(**changes)
    with pytest.raises(RunError) as caught, memory_explained(recipe, Mesh()):
        if isinstance(cause, Exception):
            raise cause
        cause()  # type: ignore[operator]
    estimate = rank_memory(recipe, 0, 0).total / 2**30
    assert f"the plan's estimate for this rank is {estimate:.3g} GiB: " in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, SystemError])
def test_paddles_error_on_a_gpu_is_explained(make_recipe: MakeRecipe, kind: type[Exception]) -> None:
    said = explained(make_recipe, kind(GPU))
    assert said.startswith("out of memory (Cannot allocate 5.250000GB); the plan")
    assert "lower data.micro_batch_size=2, raise memory.recompute=none to full, or raise parallel.sharding=1" in said


@pytest.mark.parametrize(
    ("cause", "asked"),
    [
        (lambda: paddle.empty([1 << 46]), "alloc memory of 281474976710656 size"),
        (lambda: np.empty(1 << 55), "Unable to allocate 256. PiB for an array"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("std::bad_alloc"), "RuntimeError"),
    ],
)
def test_errors_of_the_hosts_memory_are_explained(make_recipe: MakeRecipe, cause: object, asked: str) -> None:
    said = explained(make_recipe, cause, data__micro_batch_size=1, memory__recompute="full")
    assert said.startswith(f"out of memory ({asked}); ")
    assert "micro_batch" not in said and "recompute" not in said  # nothing is left to lower there


def test_other_errors_pass(make_recipe: MakeRecipe) -> None:
    for error in (RuntimeError("something else"), ValueError("bad_alloc"), RunError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, memory_explained(make_recipe(), Mesh()):
            raise error
        assert caught.value is error
