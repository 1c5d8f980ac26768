"""safetensors files that several processes fill, and that are read slice by slice.

The safetensors library writes a file from whole tensors in one process. A checkpoint here is written by many
ranks, each putting its own slices of the logical tensors into one file, and is read by ranks that need other
slices; so the layout (an 8-byte length, a JSON header, raw little-endian tensors) is written here. Any
safetensors reader opens the result; the tests read it with the library's own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from vha_paddle.errors import UserError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype, logical shape and the byte where it starts."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class TensorFile:
    """An open safetensors file; `array(name)` is a view of the disk, so taking a slice reads that slice only."""

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], mode: str) -> None:
        self.path, self.entries, self.metadata = path, entries, metadata
        self._bytes = np.memmap(path, np.uint8, "r" if mode == "r" else "r+")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A view of tensor `name` in the file; writable when the file was opened with `fill_tensors`.

        Raises:
            UserError: the file has no such tensor.
        """
        if name not in self.entries:
            raise UserError(f"{self.path}: tensor {name} is missing; the file belongs to another model")
        entry = self.entries[name]
        raw = self._bytes[entry.offset : entry.offset + entry.num_bytes]
        return raw.view(entry.dtype).reshape(entry.shape)

    def flush(self) -> None:
        """Put what was written into the views onto the disk."""
        assert isinstance(self._bytes, np.memmap)
        self._bytes.flush()


def create_tensors(
    path: Path, tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]
) -> None:
    """Create `path` with its header and room for every tensor; `fill_tensors` then opens it for writing."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.flush()
        # reserve the room now: a full disk is an error here, but a dead process when a mapped page is written
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + position)


def fill_tensors(path: Path) -> TensorFile:
    """Open a created file so that writes into its arrays reach the disk."""
    return _open(path, "r+")


def read_tensors(path: Path) -> TensorFile:
    """Open a safetensors file for reading, after checking that its header describes exactly this file.

    Raises:
        UserError: the file is absent, truncated, or its header is not a valid description of its bytes.
    """
    return _open(path, "r")


def _open(path: Path, mode: str) -> TensorFile:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise UserError(f"{path}: truncated or not a safetensors file (header of {length} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise UserError(f"{path}: not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a safetensors file (its header is not an object)")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: not a safetensors file (its __metadata__ is not an object)")
    start = 8 + length
    entries = {name: _entry(path, name, value, start, size) for name, value in header.items()}
    if sum(entry.num_bytes for entry in entries.values()) != size - start:
        raise UserError(f"{path}: truncated or damaged (the tensors do not fill the file exactly)")
    return TensorFile(path, entries, metadata, mode)


def _entry(path: Path, name: str, value: Any, start: int, size: int) -> Entry:
    """Check one header entry against the file before anything is allocated from it."""
    try:
        dtype, shape, (begin, end) = DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        valid = whole and start + end <= size and end - begin == dtype.itemsize * math.prod(shape)
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise UserError(f"{path}: the header entry of tensor {name} is invalid; the file is damaged")
    return Entry(dtype, shape, start + begin)
