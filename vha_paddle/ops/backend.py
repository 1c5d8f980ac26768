"""Where an operation runs: the one place that tells GPU from CPU, and what the CPU forms are made of.

On a CPU Paddle computes most elementwise kernels on one thread and one pass at a time, so a chain of them is
bound by memory. The CPU forms in this folder therefore view the tensors as numpy arrays (`host_view`), give
each thread its own rows (`for_each_share`) and run the whole chain over a block that fits the cache
(`row_blocks`). numpy and Paddle both release the interpreter lock inside a kernel, so the threads overlap.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import paddle
from paddle import Tensor

_TYPE_STRING = {
    paddle.float32: "<f4",
    paddle.float64: "<f8",
    paddle.int32: "<i4",
    paddle.int64: "<i8",
}
_BLOCK_BYTES = 1 << 20  # small enough to stay in cache between passes, large enough to hide the calls
_MALLOPT_TRIM_THRESHOLD, _MALLOPT_MMAP_MAX = -1, -4  # from glibc's malloc.h


def on_gpu(x: Tensor) -> bool:
    """Whether the operation on `x` takes its GPU branch."""
    return x.place.is_gpu_place()


def gradients_wanted(*inputs: Tensor) -> tuple[bool, ...]:
    """For a PyLayer's forward to remember: which of its tensor inputs want a gradient."""
    return tuple(not x.stop_gradient for x in inputs)


def only_wanted(wanted: tuple[bool, ...], *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """What a PyLayer's backward must return: Paddle refuses a gradient for an input that wants none."""
    return tuple(g if wants else None for g, wants in zip(gradients, wanted, strict=True))


class _HostMemory:
    """A tensor's memory for numpy; it becomes the `base` of the array, which keeps the tensor alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": _TYPE_STRING[tensor.dtype],
            "shape": tuple(tensor.shape),
            "data": (tensor.data_ptr(), False),
        }


def host_view(x: Tensor) -> np.ndarray:
    """A writable numpy array over the memory of a contiguous CPU tensor (`Tensor.numpy()` copies).

    Autograd does not see what is written through it: write only to tensors the caller has just made.
    """
    if not x.is_contiguous():
        raise ValueError("host_view needs a contiguous tensor")
    if x.size == 0:  # has no memory
        return np.empty(x.shape, np.dtype(_TYPE_STRING[x.dtype]))
    return np.asarray(_HostMemory(x))


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that Paddle's GEMM uses, or None in a build without it."""
    path = os.path.join(os.path.dirname(paddle.__file__), "libs", "libiomp5.so")
    return ctypes.CDLL(path) if os.path.exists(path) else None


def num_threads() -> int:
    """The threads of an operation: as many as Paddle's GEMM uses when called from here."""
    openmp = _openmp()
    return openmp.omp_get_max_threads() if openmp else 1


def _set_num_threads(count: int) -> None:
    """For the kernels called from the current thread; OpenMP keeps one such number per thread."""
    openmp = _openmp()
    if openmp:
        openmp.omp_set_num_threads(count)


@functools.cache
def _pool(num_workers: int) -> ThreadPoolExecutor:
    """The threads beside the calling one."""
    return ThreadPoolExecutor(num_workers, "ops", initializer=_set_num_threads, initargs=(1,))


# A forked child has none of its parent's threads; it makes its own pool when it first needs one.
os.register_at_fork(after_in_child=_pool.cache_clear)


def for_each_share(count: int, work: Callable[[int, int], None]) -> None:
    """Split `range(count)` over the threads and call `work(start, stop)` once on each, without autograd.

    Kernels that `work` calls run on one thread. An exception of a share is raised here, after all have ended. Where
    there is nothing to do, nothing is called.
    """
    if count == 0:
        return
    before = num_threads()
    threads = min(before, count)
    if threads <= 1:
        _without_grad(work, 0, count)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    _set_num_threads(1)
    try:
        others = [
            _pool(before - 1).submit(_without_grad, work, start, stop) for start, stop in itertools.pairwise(bounds[1:])
        ]
        try:
            _without_grad(work, 0, bounds[1])
        finally:
            concurrent.futures.wait(others)  # they write to the caller's memory
    finally:
        _set_num_threads(before)
    for other in others:
        other.result()


def _without_grad(work: Callable[[int, int], None], start: int, stop: int) -> None:
    """Paddle keeps the autograd switch per thread, and a new thread starts with it on."""
    with paddle.no_grad():
        work(start, stop)


def row_blocks(start: int, stop: int, row: np.ndarray) -> Iterator[slice]:
    """Cut rows `start:stop` into slices of about a megabyte; `row` is one of them."""
    step = max(1, _BLOCK_BYTES // row.nbytes)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def prepare_cpu_process() -> None:
    """Settings of the whole process for fast training steps on CPU; a program calls it once, at its start.

    * Freed memory stays with the process. By default glibc returns every large buffer to the kernel, and the
      page faults of getting it back cost more than the elementwise kernel that fills it. The price is that the
      process keeps its peak memory until it ends.
    * OpenMP workers sleep as soon as their region ends. By default they spin for 0.2 s, which takes the cores
      from the threads of `for_each_share`.

    Does nothing where the C library or the OpenMP runtime is another one.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MALLOPT_MMAP_MAX, 0)
        libc.mallopt(_MALLOPT_TRIM_THRESHOLD, -1)
    openmp = _openmp()
    if openmp is not None:
        openmp.kmp_set_blocktime(0)
