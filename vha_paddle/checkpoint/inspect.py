"""What a checkpoint holds, whether it is intact, and the same tensors in other files. Needs no Paddle."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.checkpoint.layout import (
    Checkpoint,
    Content,
    find_fault,
    open_checkpoint,
    open_without_digests,
    other_files,
    read_manifest,
    record_of,
    resolve_checkpoint,
    tensor_file,
    write_manifest,
)
from vha_paddle.checkpoint.logical import LogicalEntry, LogicalTensors, natural_key
from vha_paddle.checkpoint.writing import OwnTensor, write_own_tensors
from vha_paddle.errors import RunError, UserError
from vha_paddle.files import atomic_directory
from vha_paddle.plan.stages import assign_owners
from vha_paddle.tensor_file import FileRecord

Progress = Callable[[int], None]
"""Told the bytes done since it was last told."""


def describe(path: Path) -> dict[str, Any]:
    """Where the run stood, the layout that wrote the checkpoint, its files and its tensors; reads no tensor.

    Raises:
        UserError: no checkpoint, a file is missing or has another size, or tensors are not covered exactly once.
    """
    checkpoint = open_without_digests(path)
    state, recipe = checkpoint.state, checkpoint.recipe
    model, optimizer, router = checkpoint.model_tensors(), checkpoint.optimizer_tensors(), checkpoint.router_tensors()
    return {
        "path": str(checkpoint.path),
        "run": recipe.run.name,
        "step": state.step,
        "tokens": state.tokens,
        "samples": state.samples,
        "seed": state.seed,
        "vha_paddle": state.version,
        "layout": recipe.parallel.model_dump(),
        "parameters": sum(math.prod(entry.shape) for entry in model.entries.values()),
        "bytes": sum(file.bytes for file in checkpoint.files.values()),
        "files": [{"name": name, "bytes": file.bytes} for name, file in checkpoint.files.items()],
        "tensors": [_row(name, tensors.entries[name]) for tensors in (model, optimizer, router) for name in tensors],
    }


def total_bytes(path: Path) -> int:
    """Bytes of all files of a checkpoint, as its manifest says.

    Raises:
        UserError: no checkpoint.
    """
    return sum(record.bytes for record in read_manifest(resolve_checkpoint(path)).values())


def find_faults(path: Path, progress: Progress) -> dict[str, str | None]:
    """Each file of a checkpoint with what is wrong with it, or None; digests are computed anew.

    Where all files are intact, that each tensor is covered exactly once is checked too.

    Raises:
        UserError: no checkpoint.
        RunError: the files are as they were written, but do not hold each tensor exactly once.
    """
    path = resolve_checkpoint(path)
    files = read_manifest(path)
    faults = {name: find_fault(path / name, record, progress=progress) for name, record in files.items()}
    if not any(faults.values()):
        try:
            checkpoint = open_without_digests(path)
            checkpoint.model_tensors()
            checkpoint.optimizer_tensors()
            checkpoint.router_tensors()
        except UserError as error:
            raise RunError(str(error)) from None
    return faults


def reshard(path: Path, output: Path, num_files: int, progress: Progress) -> None:
    """Write the logical tensors of a checkpoint, whole, into `num_files` files each for model and optimizer.

    The files are about equal in size. Memory holds one tensor at a time; `output` appears complete or not at all.

    Raises:
        UserError: no checkpoint or a damaged one, or an `output` that exists or lies inside it.
        RunError: the disk is full.
    """
    if num_files < 1:
        raise UserError(f"--files {num_files}: must be at least 1; correct the value")
    if output.exists() or output.is_symlink():
        raise UserError(f"{output}: exists; name a directory to make")
    checkpoint = open_checkpoint(path)
    if output.resolve().is_relative_to(checkpoint.path.resolve()):
        raise UserError(f"{output}: lies inside the checkpoint; name a directory outside it")
    try:
        with atomic_directory(output) as directory:
            _write(checkpoint, directory, num_files, progress)
    except OSError as error:
        raise RunError(f"{output}: cannot be written ({error.strerror})") from None


def _write(checkpoint: Checkpoint, directory: Path, num_files: int, progress: Progress) -> None:
    files: dict[str, FileRecord] = {}
    contents: dict[Content, LogicalTensors] = {
        "model": checkpoint.model_tensors(),
        "optimizer": checkpoint.optimizer_tensors(),
    }
    router = checkpoint.router_tensors()
    if router.entries:  # of a mixture of experts
        contents["router"] = router
    for content, tensors in contents.items():
        shares = divide({name: entry.num_bytes for name, entry in tensors.entries.items()}, num_files)
        for number, names in enumerate(shares):
            name = tensor_file(content, number, len(shares))
            files[name] = write_own_tensors(directory / name, _whole(tensors, names, progress))
    for name in other_files(checkpoint.files):
        shutil.copyfile(checkpoint.path / name, directory / name)
        files[name] = record_of(directory / name)
    write_manifest(directory, files)


def _whole(tensors: LogicalTensors, names: Iterable[str], progress: Progress) -> dict[str, OwnTensor]:
    def read(name: str) -> np.ndarray[Any, Any]:
        progress(tensors.entries[name].num_bytes)
        return tensors.array(name)

    entries = {name: tensors.entries[name] for name in names}
    return {
        name: OwnTensor((entry.dtype, entry.shape), None, functools.partial(read, name))
        for name, entry in entries.items()
    }


def divide(sizes: dict[str, int], count: int) -> list[list[str]]:
    """Names in at most `count` groups of about equal size: the largest first, each to the smallest group.

    There is one group at least, and none is empty beside others.
    """
    groups: list[list[str]] = [[] for _ in range(max(1, min(count, len(sizes))))]
    for name, group in zip(sizes, assign_owners(list(sizes.values()), len(groups)), strict=True):
        groups[group].append(name)
    return [sorted(group, key=natural_key) for group in groups]


def _row(name: str, entry: LogicalEntry) -> dict[str, Any]:
    parts = []
    for piece in entry.pieces:
        cut = piece.cut
        where = {} if cut is None else {"view": cut.view, "start": cut.start, "stop": cut.stop}
        parts.append({"file": piece.file.path.name, **where})
    return {"name": name, "shape": entry.shape, "dtype": entry.dtype.name, "parts": parts}


def table(figures: dict[str, Any]) -> Iterator[str]:
    """What `describe` found, as lines for people."""
    used = {axis: value for axis, value in figures["layout"].items() if value is True or value not in (1, False)}
    layout = ", ".join(axis if value is True else f"{axis} {value}" for axis, value in used.items()) or "one process"
    yield f"{figures['path']}: {figures['run']}, step {figures['step']:,}, {figures['tokens']:,} tokens"
    yield f"written by vha_paddle {figures['vha_paddle']} under {layout}"
    yield f"{figures['parameters']:,} parameters, {figures['bytes']:,} bytes in {len(figures['files'])} files"
    yield ""
    rows = [("file", "bytes")] + [(file["name"], f"{file['bytes']:,}") for file in figures["files"]]
    yield from _aligned(rows)
    yield ""
    rows_of_tensors = [("tensor", "shape", "dtype", "file")]
    for tensor in figures["tensors"]:
        files = [part["file"] for part in tensor["parts"]]
        where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        shape = " x ".join(str(size) for size in tensor["shape"])
        rows_of_tensors.append((tensor["name"], shape, tensor["dtype"], where))
    yield from _aligned(rows_of_tensors)


def _aligned(rows: list[Any]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
