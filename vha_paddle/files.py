"""Files that are either whole or absent: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Flush every file and directory below `path` to disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(folder, name), "rb+") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(folder))


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` with the bytes of a file from `offset` on; returns how many there were.

    A read may give some of them only, on network file systems and beyond 2 GiB; nothing at all is the end.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def remove(path: Path) -> None:
    """Remove a directory with all that is in it, a file, or a link, which leaves what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; on success it is flushed and takes its name, on error it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
        fsync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Give a temporary directory beside `path`; on success its tree is flushed and it takes the name `path`.

    Raises:
        FileExistsError: `path` is there already and not an empty directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        fsync_tree(temporary)
        os.chmod(temporary, 0o755)
        if path.exists() and any(path.iterdir()):
            raise FileExistsError(f"{path} exists")
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
