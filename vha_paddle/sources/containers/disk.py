"""Bytes of a file, read where they are asked for into memory of the caller's: nothing is mapped, nothing stays."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.errors import UserError
from vha_paddle.files import read_at


def names_in(folder: Path) -> list[str]:
    """The names of the files and folders in `folder`, sorted; none where it is no folder.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None


class DiskFile:
    """A regular file of known size; it is open only while something is read."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            UserError: there is no such file, or it cannot be read.
        """
        self.path = path
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: not a file")
        self.size = status.st_size

    def read_into(self, offset: int, target: np.ndarray[Any, Any]) -> None:
        """Fill `target`, a contiguous array, with the bytes from `offset` on.

        Raises:
            UserError: the file cannot be read, or has become shorter than it was.
        """
        raw = target.reshape(-1).view(np.uint8).data
        try:
            with open(self.path, "rb", buffering=0) as file:
                count = read_at(file.fileno(), raw, offset)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from None
        if count != len(raw):
            raise UserError(f"{self.path}: became shorter while it was read; copy it again")

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes, which must be few, from `offset` on.

        Raises:
            UserError: as `read_into`.
        """
        target = np.empty(count, np.uint8)
        self.read_into(offset, target)
        return target.tobytes()
