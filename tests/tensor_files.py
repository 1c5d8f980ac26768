"""safetensors files that several processes fill together, each its part, through mappings of the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vha_paddle.tensor_file import TensorSpec, read_tensors, write_tensors


def create_tensors(path: Path, tensors: Mapping[str, TensorSpec]) -> None:
    """Write a file of zeros."""
    write_tensors(path, tensors, (np.zeros(shape, dtype) for dtype, shape in tensors.values()), {})


def mapped_tensors(path: Path) -> dict[str, np.ndarray]:
    """Arrays of a file that there is; what is written into them is in the file."""
    entries = read_tensors(path).entries
    return {name: np.memmap(path, entry.dtype, "r+", entry.offset, entry.shape) for name, entry in entries.items()}
