"""safetensors files, written as a stream and read slice by slice.

The safetensors library writes a file from tensors that are all in memory, and digests nothing. Here a file is
written one tensor after the other and digested on the way; a reader takes the slices it needs. So the layout (an
8-byte length, a JSON header, raw little-endian tensors) is written here. Any safetensors reader opens the result; the
tests read it with the library's own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from vha_paddle.contiguous import contiguous
from vha_paddle.errors import UserError
from vha_paddle.files import read_at

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
MAX_AXES = 32  # of a numpy array
MAX_TENSOR_BYTES = 2**60
_CHUNK_BYTES = 2 << 20  # still in the processor's cache when they are written and digested
_CHUNKS_AHEAD = 8  # that may wait to be written and digested

TensorSpec = tuple[np.dtype[Any], tuple[int, ...]]
"""dtype and shape."""


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

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        self.path, self.entries, self.metadata = path, entries, metadata

    @functools.cached_property
    def _bytes(self) -> np.ndarray[Any, Any]:
        """The whole file, mapped when its first tensor is asked for: of many files a rank needs few."""
        return np.memmap(self.path, np.uint8, "r")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A view of tensor `name` in the file, to be read only.

        Raises:
            UserError: the file has no such tensor.
        """
        entry = self._entry(name)
        raw = self._bytes[entry.offset : entry.offset + entry.num_bytes]
        return raw.view(entry.dtype).reshape(entry.shape)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Tensor `name`, read into memory of its own: no page of the file stays mapped.

        Raises:
            UserError: the file has no such tensor, or has become shorter since it was opened.
        """
        entry = self._entry(name)
        array = np.empty(entry.shape, entry.dtype)
        self.read_into(name, array)
        return array

    def read_into(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Read tensor `name` into a contiguous array of its dtype and as many values. Raises as `read`."""
        entry = self._entry(name)
        raw = array.reshape(-1).view(np.uint8).data
        try:
            with open(self.path, "rb", buffering=0) as file:
                count = read_at(file.fileno(), raw, entry.offset)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from None
        if count != len(raw):
            raise UserError(f"{self.path}: has become shorter while it was read; use another copy")

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise UserError(f"{self.path}: tensor {name} is missing; the file belongs to another model")
        return self.entries[name]


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, TensorSpec],
    arrays: Iterable[np.ndarray[Any, Any]],
    metadata: Mapping[str, str],
    reserve: bool = False,
) -> FileRecord:
    """Write a whole file, flush it to disk, and return its size and digest without reading it again.

    Args:
        arrays: one for each of `tensors`, in their order, none of which may change before the end. Each is asked for
            while those before it are written.
        reserve: whether the room for all is taken first, so that a full disk shows before any array is asked for.
            Some network disks do that slowly, by writing.

    Raises:
        OSError: the disk is full or fails.
    """
    header, num_bytes = _header(tensors, metadata)
    with open(path, "wb", buffering=0) as file, _Sink(file.fileno()) as sink:
        if reserve:
            os.posix_fallocate(file.fileno(), 0, len(header) + num_bytes)
        sink.put(memoryview(header))
        for (name, (dtype, shape)), array in zip(tensors.items(), arrays, strict=True):
            if (array.dtype, array.shape) != (dtype, shape):
                raise ValueError(f"{name}: {array.dtype} {array.shape} came where {dtype} {shape} was announced")
            for chunk in _chunks(array):
                sink.put(chunk)
        sha256 = sink.finish()
        os.fsync(file.fileno())
        return FileRecord(len(header) + num_bytes, sha256)


def _chunks(array: np.ndarray[Any, Any]) -> Iterator[memoryview]:
    """The bytes in C order, some at a time; so of a matrix that lies otherwise no whole copy comes to be."""
    by_rows = array.ndim == 2 and not array.flags.c_contiguous
    rows = array if by_rows else np.ascontiguousarray(array).reshape(-1)
    count = max(1, _CHUNK_BYTES // (rows.itemsize * math.prod(rows.shape[1:])))
    for start in range(0, len(rows), count):
        chunk = contiguous(rows[start : start + count])
        yield chunk.reshape(-1).view(np.uint8).data  # bfloat16 has no buffer


class _Sink:
    """Writes and digests on two threads of its own, so that what is to be written next is made meanwhile: on one core
    SHA-256 takes as long as the disk, and so do new pages of the page cache."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._sha256 = descriptor, hashlib.sha256()
        self._pools = ThreadPoolExecutor(1, "write"), ThreadPoolExecutor(1, "digest")
        self._pending: deque[tuple[Future[None], ...]] = deque()

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: Any) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def put(self, chunk: memoryview) -> None:
        """Take in `chunk`, which must not change before `finish`. Few are kept waiting: they occupy memory.

        Raises:
            OSError: an earlier chunk cannot be written.
        """
        if len(self._pending) == _CHUNKS_AHEAD:
            self._wait_for_one()
        writer, digester = self._pools
        self._pending.append((writer.submit(self._write, chunk), digester.submit(self._sha256.update, chunk)))

    def finish(self) -> str:
        """Wait for all; returns the digest, hexadecimal. Raises as `put`."""
        while self._pending:
            self._wait_for_one()
        return self._sha256.hexdigest()

    def _wait_for_one(self) -> None:
        for future in self._pending.popleft():
            future.result()

    def _write(self, chunk: memoryview) -> None:
        start, written = os.lseek(self._descriptor, 0, os.SEEK_CUR), 0
        while written < len(chunk):
            written += os.write(self._descriptor, chunk[written:])
        # Linux starts to write the pages out (they stay cached), so that the final fsync finds little left to do
        os.posix_fadvise(self._descriptor, start, written, os.POSIX_FADV_DONTNEED)


def _header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """The first bytes of a file, and the number of bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, position


def read_tensors(path: Path) -> TensorFile:
    """Open a safetensors file for reading, after checking that its header describes exactly this file.

    Raises:
        UserError: the file is absent, truncated, or its header is not a valid description of its bytes.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise UserError(f"{path}: truncated or not a safetensors file (header of {length} bytes)")
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of thousands of digits
        raise UserError(f"{path}: not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a safetensors file (its header is not an object)")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: not a safetensors file (its __metadata__ is not an object of strings)")
    start = 8 + length
    entries = {name: _entry(path, name, value, start, size) for name, value in header.items()}
    position = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != position:
            raise UserError(f"{path}: truncated or damaged (the tensors overlap or leave a gap)")
        position += entry.num_bytes
    if position != size:
        raise UserError(f"{path}: truncated or damaged (the tensors do not fill the file exactly)")
    return TensorFile(path, entries, metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _entry(path: Path, name: str, value: Any, start: int, size: int) -> Entry:
    """Check one header entry against the file before anything is allocated from it."""
    try:
        dtype, shape, (begin, end) = DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        # an empty tensor may not claim axes that no array can have
        possible = whole and len(shape) <= MAX_AXES and math.prod(n or 1 for n in shape) <= MAX_TENSOR_BYTES
        valid = possible and start + end <= size and end - begin == dtype.itemsize * math.prod(shape)
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise UserError(f"{path}: the header entry of tensor {name} is invalid; the file is damaged")
    return Entry(dtype, shape, start + begin)
