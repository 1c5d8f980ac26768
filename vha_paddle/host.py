"""What must be settled about the machine before Paddle is imported, and its threads after."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path


def prepare_process() -> None:
    """Call before the first `import paddle` of a command.

    Paddle's import says that it found no ccache, and its C++ side logs every connection: neither is for the user
    of a training run.

    Paddle's CPU wheel carries an MKL that picks its oldest kernels on processors that are not Intel's: a float32
    GEMM runs at 39 GFLOP/s a core where 101 are possible (AMD EPYC, AVX2 kernels). The variable names the kernel
    family; it changes nothing on Intel processors, and a value the user has set is kept.
    """
    warnings.filterwarnings("ignore", message="No ccache found")
    os.environ.setdefault("GLOG_minloglevel", "1")
    if _is_amd_with_avx2():
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")


def end_on_sigterm() -> None:
    """Make SIGTERM the end of a command like any other, so that it removes what it is writing.

    Call again after `import paddle`, which takes the signal for itself: it would print a stack of C++ functions and end
    the process at once.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def set_compute_threads() -> int:
    """Give this process its share of the cores and settle its memory; returns the number of threads.

    Call after `import paddle`. Paddle computes on one thread unless told otherwise; several ranks on one machine
    must not each take all cores. A number of threads that the user chose through OMP_NUM_THREADS is kept.
    """
    import paddle.distributed as dist
    import threadpoolctl

    from vha_paddle.ops.backend import prepare_cpu_process

    prepare_cpu_process()
    chosen = os.environ.get("OMP_NUM_THREADS", "1")
    if chosen.isdigit() and int(chosen) > 1:
        return int(chosen)
    local_ranks = int(os.environ.get("PADDLE_LOCAL_SIZE", dist.ParallelEnv().world_size))
    threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
    threadpoolctl.threadpool_limits(threads)
    return threads


def _is_amd_with_avx2() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "AuthenticAMD" in text and " avx2 " in text
