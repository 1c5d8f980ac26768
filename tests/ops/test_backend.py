from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import paddle
import pytest

from vha_paddle.ops import backend


def test_host_view_writes_into_the_tensor() -> None:
    x = paddle.zeros([2, 3], "float64")
    backend.host_view(x)[1, 2] = 7.0
    assert float(x[1, 2]) == 7.0


def test_host_view_keeps_the_memory_alive() -> None:
    view = backend.host_view(paddle.full([1 << 16], 5.0))
    gc.collect()
    others = [paddle.full([1 << 16], 9.0) for _ in range(8)]
    assert (view == 5.0).all() and len(others) == 8


def test_host_view_refuses_a_strided_tensor() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        backend.host_view(paddle.zeros([4, 4])[:, :2])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_shares_cover_every_index_once(count: int, threads: int) -> None:
    seen: list[int] = []
    backend.for_each_share(count, lambda start, stop: seen.extend(range(start, stop)))
    assert sorted(seen) == list(range(count))


def test_shares_run_on_as_many_threads_as_the_gemm(threads: int) -> None:
    names: set[str] = set()
    together = threading.Barrier(threads, timeout=30)

    def work(start: int, stop: int) -> None:
        together.wait()  # passes only when all shares run at once
        names.add(threading.current_thread().name)

    backend.for_each_share(8, work)
    assert len(names) == threads


def test_a_share_uses_one_thread_and_no_autograd(threads: int) -> None:
    states: list[tuple[int, bool]] = []
    backend.for_each_share(8, lambda start, stop: states.append((backend.num_threads(), paddle.is_grad_enabled())))
    assert states == [(1, False)] * threads
    assert backend.num_threads() == threads
    assert paddle.is_grad_enabled()


@pytest.mark.parametrize("failing", [0, 7], ids=["first share", "last share"])
def test_an_error_in_a_share_is_raised_after_all_have_ended(failing: int, threads: int) -> None:
    ended: list[int] = []

    def work(start: int, stop: int) -> None:
        if start <= failing < stop:
            ended.append(start)
            raise ZeroDivisionError
        time.sleep(0.05)
        ended.append(start)

    with pytest.raises(ZeroDivisionError):
        backend.for_each_share(8, work)
    assert len(ended) == threads
    assert backend.num_threads() == threads


def test_row_blocks_cover_the_rows_in_order() -> None:
    row = np.zeros(1 << 15)  # 256 KiB: four to a block
    blocks = list(backend.row_blocks(3, 12, row))
    assert blocks == [slice(3, 7), slice(7, 11), slice(11, 12)]


def test_a_row_larger_than_a_block_is_a_block() -> None:
    assert list(backend.row_blocks(0, 2, np.zeros(1 << 20))) == [slice(0, 1), slice(1, 2)]


def test_a_prepared_process_reuses_its_memory_and_lets_idle_workers_sleep() -> None:
    program = """
import resource, paddle
from vha_paddle.ops import backend
backend.prepare_cpu_process()
def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    paddle.ones([1 << 24])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# sometimes the free place is a few bytes too short for the alignment, and the next is put beside it
print(min(page_faults() for _ in range(8)), backend._openmp().kmp_get_blocktime())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    page_faults, milliseconds_of_spinning = map(int, result.stdout.split()[-2:])
    assert page_faults < 1000  # 64 MiB anew would be 16384
    assert milliseconds_of_spinning == 0
