"""What every format offers: a table of tensors, and the values of one when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, before it is read."""

    name: str
    """As the files call it."""
    dtype: np.dtype[Any]
    """Of its values; bfloat16 is ml_dtypes', whatever form the bit patterns have on disk."""
    shape: tuple[int, ...]
    """Of the whole tensor, whatever pieces it lies in."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class StoredTensors(Protocol):
    """The tensors of a file or folder. Opening reads no tensor, only what describes them."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the tensors come from and what describes them, sorted; for a digest of the source."""

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        """By name, in the order of the files."""

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The values of one tensor: a new C-contiguous array that keeps no file open or mapped.

        Memory: the array, and at most one piece of it where it lies in pieces that are cut across its rows.

        Raises:
            UserError: the file has changed or is damaged.
            KeyError: there is no such tensor.
        """
