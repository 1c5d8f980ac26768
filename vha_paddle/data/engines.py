"""Who encodes the parts: this process, several processes of this machine, or the tasks of a Ray cluster.

All three run `encode_part`, in any order; what it writes does not depend on which.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import vha_paddle
from vha_paddle.data.inputs import part_bytes
from vha_paddle.data.parts import Counts, Task, encode_part
from vha_paddle.errors import RunError, UserError

Advance = Callable[[int], None]
Encoded = Generator[tuple[int, Counts], None, None]
"""Number and counts of each part, when it is done."""

_REPORTED_BYTES = 1 << 20
_FAILURES: dict[str, type[Exception]] = {"UserError": UserError, "RunError": RunError}


def run_here(tasks: Sequence[Task], advance: Advance) -> Encoded:
    """Encode in this process.

    Raises:
        UserError, OSError: of `encode_part`.
    """
    for task in tasks:
        yield task.number, encode_part(task, advance)


def run_processes(tasks: Sequence[Task], num_workers: int, advance: Advance) -> Encoded:
    """Encode in processes of this machine, which end when this one does, however it ends.

    Raises:
        UserError: of `encode_part`.
        RunError: a worker cannot write, or was killed.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(tasks))
    with contextlib.ExitStack() as stack:
        workers: dict[Any, BaseProcess] = {}  # by our end of the connection
        for _ in range(min(num_workers, len(tasks))):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            stack.callback(_end, process)
            stack.callback(ours.close)
            workers[ours] = process
        for connection, process in workers.items():
            _send(connection, process, waiting.pop())
        num_missing = len(tasks)
        while num_missing:
            ready: list[Any] = wait(list(workers))
            for connection in ready:
                kind, value = _received(connection, workers[connection])
                if kind == "advance":
                    advance(value)
                elif kind == "done":
                    num_missing -= 1
                    if waiting:
                        _send(connection, workers[connection], waiting.pop())
                    yield value
                else:
                    raise _FAILURES[kind](value)


def _send(connection: Connection, process: BaseProcess, task: Task) -> None:
    try:
        connection.send(task)
    except OSError:
        raise _lost(process) from None


def _received(connection: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = connection.recv()
        return message
    except (EOFError, OSError):
        raise _lost(process) from None


def _lost(process: BaseProcess) -> RunError:
    process.join(10)
    return RunError(
        f"a worker ended with code {process.exitcode} (-9: killed, as by a system that is out of memory); "
        "run the same command again, with fewer --workers where memory is short"
    )


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _serve(connection: Connection) -> None:
    """A worker: encodes the tasks that it is sent until the connection or the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            report = _Report(connection)
            outcome = _outcome(task, report)
            report.send()
            connection.send(outcome)


class _Report:
    """Tells the parent how far a worker is, a few times a second."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pending = 0

    def __call__(self, count: int) -> None:
        self._pending += count
        if self._pending >= _REPORTED_BYTES:
            self.send()

    def send(self) -> None:
        self._connection.send(("advance", self._pending))
        self._pending = 0


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _outcome(task: Task, advance: Advance) -> tuple[str, Any]:
    """What `encode_part` gave or raised, as something that any process can receive."""
    try:
        return "done", (task.number, encode_part(task, advance))
    except (UserError, RunError) as error:
        return type(error).__name__, str(error)
    except OSError as error:
        return "RunError", f"cannot write {task.folder}: {error}"


def run_ray(tasks: Sequence[Task], advance: Advance) -> Encoded:
    """Encode in the tasks of a Ray cluster, which Ray places. Every node must see the same files under the same names.

    A cluster is joined where Ray finds one (`ray start`, RAY_ADDRESS), else one is started on this machine. Ray
    repeats a task whose node was lost.

    Raises:
        UserError: Ray is not installed, or of `encode_part`.
        RunError: a task cannot write, or failed for good.
    """
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("--ray needs the package ray (pip install ray); or use --workers and --shard") from None
    if not ray.is_initialized():
        package = str(Path(vha_paddle.__file__).parents[1])  # which the nodes have not installed, but see
        ray.init(log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": package}})
    remote = ray.remote(_ray_task)
    sizes = {task.number: part_bytes(task.part) for task in tasks}
    waiting = [remote.remote(task) for task in tasks]
    try:
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            try:
                kind, value = ray.get(done[0])
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                raise RunError(f"a Ray task failed: {reason}; run the same command again") from None
            if kind != "done":
                raise _FAILURES[kind](value)
            advance(sizes[value[0]])
            yield value
    finally:
        for reference in waiting:
            ray.cancel(reference)


def _ray_task(task: Task) -> tuple[str, Any]:
    return _outcome(task, lambda _: None)
