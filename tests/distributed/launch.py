"""Start the ranks of a test as `paddle.distributed.launch` would, and let none of them outlive it.

`run_ranks` is for tests. Run as a program (`python launch.py SCRIPT ARGUMENTS...`) this file is what each
rank starts with: it ties the rank to the life of its parent, then runs the script.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTS = range(20_000, 32_000)  # below the kernel's ephemeral range, so no outgoing connection takes one
TAIL_LINES = 60
POLL_SECONDS = 0.02
DUMP_SECONDS = 1.0  # for hung ranks to write where they are
LISTEN_SECONDS = 20.0
PR_SET_PDEATHSIG = 1


def run_ranks(script_or_module: Path | str, world_size: int, args: Sequence[str], timeout: float = 300) -> None:
    """Run a script (a path) or module (a dotted name) in `world_size` processes and wait for all of them.

    Whatever happens, no process of theirs is left.

    Raises:
        AssertionError: a rank ended with an error, or `timeout` seconds passed; shows the tail of its output.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        logs = [Path(directory) / f"rank{rank}.log" for rank in range(world_size)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for log, environment in zip(logs, environments(world_size), strict=True):
                with log.open("wb") as output:
                    command = [sys.executable, __file__, str(script_or_module), *args]
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            problem, culprits = _wait(processes, timeout)
        finally:
            for process in processes:
                # the leader is not reaped yet, so its group id cannot have become another group's
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait()
        if problem:
            raise AssertionError("\n".join([problem, *(_tail(rank, logs[rank]) for rank in culprits)]))


def environments(world_size: int) -> list[dict[str, str]]:
    """What the launcher sets, for each rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "MASTER_"))}
    master, *ports = free_ports(1 + world_size)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    shared = {
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_MASTER": f"127.0.0.1:{master}",
        "PADDLE_NNODES": "1",
        "PADDLE_TRAINERS_NUM": str(world_size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "OMP_NUM_THREADS": "1",  # ranks share few cores
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    return [
        kept
        | shared
        | {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_LOCAL_RANK": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_CURRENT_ENDPOINT": endpoint,
        }
        for rank, endpoint in enumerate(endpoints)
    ]


def free_ports(count: int) -> list[int]:
    """Distinct ports that nothing listens on: all are held until the last is found."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("", port)))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise AssertionError(f"no {count} free ports in {PORTS}")


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> tuple[str, list[int]]:
    """Wait for success of all or failure of one: ("", []) or what happened and to which ranks."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [_exit_code(process) for process in processes]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            return ", ".join(f"rank {rank} ended with exit code {codes[rank]}" for rank in failed), failed
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return "", []
        if time.monotonic() > deadline:
            for rank in running:
                os.kill(processes[rank].pid, signal.SIGUSR1)
            time.sleep(DUMP_SECONDS)
            return f"ranks {running} are still running after {timeout:.0f} s", running
        time.sleep(POLL_SECONDS)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """None while it runs, else its exit code or minus the signal that ended it; unlike `poll`, no reaping."""
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _tail(rank: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"--- rank {rank}, the last of {len(lines)} lines", *lines[-TAIL_LINES:]])


def _run_as_rank(script_or_module: str, args: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the test process be killed itself
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if os.environ["PADDLE_TRAINER_ID"] != "0":
        _wait_for_main_rank()
    sys.argv = [script_or_module, *args]
    sys.path[0] = str(ROOT)
    if script_or_module.endswith(".py"):
        runpy.run_path(script_or_module, run_name="__main__")
    else:
        runpy.run_module(script_or_module, run_name="__main__", alter_sys=True)


def _wait_for_main_rank() -> None:
    """Wait until rank 0 listens: Paddle's store client would sleep 3 s after a refused connection."""
    importlib.import_module("paddle")  # most of the start-up time, spent while rank 0 does the same
    listening = f":{int(os.environ['PADDLE_MASTER'].rsplit(':', 1)[1]):04X}"
    deadline = time.monotonic() + LISTEN_SECONDS
    while time.monotonic() < deadline:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            if any(row[1].endswith(listening) and row[3] == "0A" for row in rows):
                return
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    _run_as_rank(sys.argv[1], sys.argv[2:])
