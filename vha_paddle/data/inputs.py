"""Which files are read, and in which pieces: files, globs and folders become slices, slices become parts.

A part is what one worker encodes at a time, what a run that is killed repeats at most, and what the machines of a
cluster share out. Parts follow from the names and sizes of the input alone, so every machine that is given the same
input finds the same ones.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vha_paddle.errors import UserError

# Suffix to format and compression. The longer suffixes come first.
SUFFIXES: dict[str, tuple[str, str]] = {
    ".jsonl.gz": ("jsonl", "gzip"),
    ".jsonl.zst": ("jsonl", "zstd"),
    ".txt.gz": ("text", "gzip"),
    ".txt.zst": ("text", "zstd"),
    ".jsonl": ("jsonl", "none"),
    ".txt": ("text", "none"),
    ".parquet": ("parquet", "none"),
}
SMALLEST_PART, LARGEST_PART = 4 << 20, 64 << 20  # bytes of input
_PARTS = 1024  # aimed at between the two: enough for the workers of a machine to end together
_PART_SLICES = 4096  # of small files; the journal names a part, so a part should be worth its entry


@dataclass(frozen=True)
class InputFile:
    """A file to read, named as the user named it, or as it lies in the folder that was named."""

    path: str
    format: str
    compression: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Slice:
    """Some of a file: the lines that begin in bytes [start, stop), the row groups of that share, or all of it.

    The built-in corpus has the format `builtin` and no path.
    """

    path: str
    format: str
    compression: str
    start: int
    stop: int
    file_bytes: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


Part = tuple[Slice, ...]

BUILTIN_PART: Part = (Slice("", "builtin", "none", 0, 0, 0),)


def find_inputs(names: Sequence[str]) -> list[InputFile]:
    """Resolve what the user named into files.

    Files keep the order of `names`. What a glob or a folder stands for is sorted by path, because the order in which a
    file system lists files differs between machines. Hidden files and folders below a folder are no input: editors,
    version control and copying programs keep theirs there. Links are followed. A file that is named twice is read once.

    Raises:
        UserError: a name stands for nothing that can be read.
    """
    files: dict[str, InputFile] = {}
    for name in names:
        for path in _paths(name):
            known = _format_of(path)
            if known is None:
                raise UserError(f"input {path} must end in {_spelled_suffixes()}; rename or convert it")
            try:
                status = os.stat(path)
            except OSError as error:
                raise UserError(f"input {path} cannot be read: {error.strerror}; restore it, or take it away") from None
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"input {path} is neither a file nor a folder, as a pipe is; name a file")
            files.setdefault(os.path.realpath(path), InputFile(path, *known, status.st_size, status.st_mtime_ns))
    return list(files.values())


def _paths(name: str) -> list[str]:
    if os.path.isdir(name):
        below = sorted(_below(name, set()), key=lambda path: Path(path).parts)
        if not below:
            raise UserError(f"input {name} has no file below it that ends in {_spelled_suffixes()}; name one that has")
        return below
    if os.path.exists(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        raise UserError(f"input {name} does not exist; name a file, a folder or a glob such as 'web/*.jsonl.gz'")
    return [path for match in found for path in (_paths(match) if os.path.isdir(match) else [match])]


def _below(folder: str, visited: set[str]) -> Iterator[str]:
    """Files of the known kinds below a folder that is not among those `visited`; a link may lead back to one."""
    real = os.path.realpath(folder)
    if real in visited:
        return
    visited.add(real)
    try:
        entries = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    except OSError as error:
        raise UserError(f"input {folder} cannot be read: {error.strerror}") from None
    for entry in entries:
        if os.path.isdir(entry):
            yield from _below(entry, visited)
        elif _format_of(entry):
            yield entry


def _format_of(path: str) -> tuple[str, str] | None:
    return next((known for suffix, known in SUFFIXES.items() if path.endswith(suffix)), None)


def _spelled_suffixes() -> str:
    return ", ".join(SUFFIXES)


def default_part_bytes(files: Sequence[InputFile]) -> int:
    """Input bytes of a part for this input: some seconds of work, and for much input some minutes."""
    return min(max(sum(file.bytes for file in files) // _PARTS, SMALLEST_PART), LARGEST_PART)


def make_parts(files: Sequence[InputFile], part_bytes: int) -> list[Part]:
    """Divide what can be divided, and put together what is small, in the order of the input.

    A part has about `part_bytes`, or one file that cannot be divided, such as a compressed one.
    """
    parts: list[Part] = []
    pending: list[Slice] = []
    pending_bytes = 0
    for piece in _slices(files, part_bytes):
        if pending and (pending_bytes + piece.bytes > part_bytes or len(pending) == _PART_SLICES):
            parts.append(tuple(pending))
            pending, pending_bytes = [], 0
        pending.append(piece)
        pending_bytes += piece.bytes
    return [*parts, tuple(pending)] if pending else parts


def _slices(files: Sequence[InputFile], part_bytes: int) -> Iterator[Slice]:
    for file in files:
        divisible = file.compression == "none" and file.format in ("jsonl", "parquet")
        count = max(1, -(-file.bytes // part_bytes)) if divisible else 1
        bounds = [file.bytes * index // count for index in range(count + 1)]
        for start, stop in zip(bounds, bounds[1:], strict=False):
            yield Slice(file.path, file.format, file.compression, start, stop, file.bytes)


def shard_of(parts: Sequence[Part], shard: int, num_shards: int) -> list[Part]:
    """Share `shard` of `num_shards`, counted from 1: consecutive parts of about the same number of bytes.

    The shares follow one another in the order of the input, so what is made of them can be joined.
    """
    total = sum(part_bytes(part) for part in parts)
    share: list[Part] = []
    before = 0
    for part in parts:
        middle = 2 * before + part_bytes(part)
        if min(middle * num_shards // max(2 * total, 1), num_shards - 1) == shard - 1:
            share.append(part)
        before += part_bytes(part)
    return share


def part_bytes(part: Part) -> int:
    """Input bytes of a part."""
    return sum(piece.bytes for piece in part)
