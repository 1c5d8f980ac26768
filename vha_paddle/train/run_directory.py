"""One run at a time in a run directory: two would overwrite each other's metrics and checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from vha_paddle.errors import UserError
from vha_paddle.parallel.agreement import together
from vha_paddle.parallel.mesh import Mesh

LOCK_FILE = ".lock"


@contextlib.contextmanager
def run_directory(output: Path, mesh: Mesh) -> Iterator[None]:
    """Hold the directory, made if need be, for this run; every rank calls it. A lock ends with its process.

    Raises:
        UserError: on every rank: another process trains there, or the directory cannot be written.
    """
    with contextlib.ExitStack() as held:
        with together(mesh):
            if mesh.is_main:
                _lock(output, held)
        yield


def _lock(output: Path, held: contextlib.ExitStack) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(open(output / LOCK_FILE, "w", encoding="utf-8"))
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fault = "another process is training there; stop it, or use another directory"
        raise UserError(f"run.output={output}: {fault}") from None
    except OSError as error:
        fault = f"cannot be written ({error.strerror}); use another directory"
        raise UserError(f"run.output={output}: {fault}") from None
