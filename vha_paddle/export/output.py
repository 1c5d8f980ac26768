"""The directory that an export makes: it appears complete or not at all, whenever the run ends.

An export is built in a hidden directory `.OUT.*.tmp` beside OUT, which takes the name OUT at the very end. A killed run
leaves it behind; the next run to the same OUT removes it. A run holds a lock on its directory, which the system drops
when the run dies, so none removes what another is writing. An earlier export that is replaced steps aside as
`.OUT.*.old` for the moment between two renames; a run that is killed then leaves no OUT, and the next puts it back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vha_paddle.errors import RunError, UserError
from vha_paddle.files import atomic_directory, fsync_directory, fsync_tree

REPORT_FILE = "fold_report.json"

_BESIDE_WEIGHTS = 64 << 20
"""Bytes kept free for tokenizer, configuration and report."""


def check_output(out: Path, source: Path, overwrite: bool, mark: str = REPORT_FILE) -> None:
    """Refuse an output that is there already; with `overwrite`, one that is not an earlier one of the same kind; and
    one inside the checkpoint or around it.

    Args:
        mark: name of a file that every output of the kind holds.

    Raises:
        UserError: naming `out` and the remedy.
    """
    if out.name in ("", ".."):  # nothing can be built beside it and take its name
        raise UserError(f"{out}: is no name that a directory can be given; name the directory to make")
    here, there = out.resolve(), source.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        where = "lies inside" if here.is_relative_to(there) else "holds"
        raise UserError(f"{out}: {where} the checkpoint; name a directory outside it")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out}: is a file or a link; name a directory to make")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{out}: exists; name another, or add --overwrite to replace what an earlier run wrote there")
    if not (out / mark).is_file():
        raise UserError(f"{out}: holds no {mark}, so no earlier run wrote it and it is not overwritten; name another")


def check_space(out: Path, num_bytes: int) -> None:
    """Require that the disk has room, before anything is computed.

    Args:
        num_bytes: of the weights. An earlier export at `out` stays until the new one is complete, so it counts as used.

    Raises:
        RunError: it has not.
    """
    existing = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    free, needed = shutil.disk_usage(existing).free, num_bytes + _BESIDE_WEIGHTS
    if needed > free:
        raise RunError(f"{out}: needs {needed:,} bytes, {free:,} are free on its disk; make room or name another disk")


def clear_what_was_left(out: Path) -> list[str]:
    """Remove what killed runs to the same output have left; gives a line of each.

    Directories of runs that are alive stay, and those on a disk without locks.
    """
    lines = []
    mine = re.compile(rf"\.{re.escape(out.name)}\.[a-z0-9_]{{8}}\.(tmp|old)")  # as tempfile.mkdtemp names them
    for path in sorted(out.parent.iterdir()) if out.parent.is_dir() else []:
        match = mine.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        with _lock(path) as locked:
            if locked and match[1] == "old" and not out.exists():
                os.replace(path, out)
                lines.append(f"{out}: put back; a killed run had moved it aside")
            elif locked:
                shutil.rmtree(path)
                lines.append(f"{path}: removed; a killed run had left it")
    return lines


@contextlib.contextmanager
def output_directory(out: Path, source: Path, overwrite: bool, mark: str = REPORT_FILE) -> Iterator[Path]:
    """A temporary directory that takes the name `out` when the block ends well.

    An earlier export at `out` stays in place until the new one is on disk, and returns if the exchange fails.

    Raises:
        UserError: as `check_output`.
    """
    check_output(out, source, overwrite, mark)
    retired: Path | None = None
    try:
        with contextlib.ExitStack() as locks:
            with atomic_directory(out) as directory:
                locks.enter_context(_lock(directory))
                yield directory
                check_output(out, source, overwrite, mark)  # another process may have written meanwhile
                if out.exists():
                    fsync_tree(directory)
                    locks.enter_context(_lock(out))
                    retired = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
                    os.replace(out, retired)
            if retired is not None:
                shutil.rmtree(retired)
                fsync_directory(out.parent)
    except BaseException:
        if retired is not None and not out.exists():
            os.replace(retired, out)
        raise


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Hold a directory as this process's own until the block ends; False where another does, or none can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)
