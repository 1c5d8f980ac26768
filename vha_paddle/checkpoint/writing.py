"""One checkpoint while it is written: every rank its own files, then rank 0 the manifest and the name.

Ranks tell each other through the temporary directory alone, because this runs on a thread beside training, whose
collectives a second one would disturb. When a rank's files are on disk it puts a marker there with their sizes and
digests; rank 0 waits for all markers, so no rank reads another's files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.checkpoint.layout import (
    RECIPE_FILE,
    STATE_FILE,
    TENSOR_METADATA,
    Content,
    RunState,
    read_json,
    record_of,
    tensor_file,
    write_json,
    write_manifest,
    write_state,
)
from vha_paddle.checkpoint.logical import Cut, cuts_metadata
from vha_paddle.config import Recipe, recipe_to_yaml
from vha_paddle.data.tokenizer_files import stored_name, tokenizer_files
from vha_paddle.errors import RunError
from vha_paddle.files import atomic_write, fsync_directory, remove
from vha_paddle.tensor_file import FileRecord, TensorSpec, write_tensors

MARKER_SECONDS = 1800.0  # that rank 0 waits for the slowest rank after its own files are written
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.01, 1.0


@dataclass(frozen=True)
class OwnTensor:
    """A tensor, or part of one, that this rank writes."""

    spec: TensorSpec
    cut: Cut | None
    read: Callable[[], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class CommonFiles:
    """What rank 0 writes beside the tensors."""

    recipe: Recipe
    tokenizer: Path
    """As `data.tokenizer`; each of its files is copied."""
    state: RunState


class Writing:
    """This rank's part in writing one checkpoint. Errors are kept for the thread that waits."""

    def __init__(
        self,
        temporary: Path,
        final: Path,
        rank: int,
        num_ranks: int,
        contents: Mapping[Content, Mapping[str, OwnTensor]],
        common: CommonFiles,
        copy: Callable[[], None] | None = None,
    ) -> None:
        """`copy` takes the state out of training's way; it is called first, on the thread that writes the files."""
        self.temporary, self.final, self.rank, self.num_ranks = temporary, final, rank, num_ranks
        self._contents, self._common, self._copy = contents, common, copy
        self.file_error: Exception | None = None
        """Why this rank's own files could not be written."""
        self.completion_error: Exception | None = None
        """Why rank 0 could not complete the checkpoint."""
        self._copied, self._files_done, self._abandoned = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, asynchronous: bool) -> None:
        """Write this rank's files, in the background with `asynchronous`; completing it is always left to a thread."""

        def run() -> None:
            if asynchronous:
                self._write_files()
            if self.rank == 0 and self.file_error is None:
                self._complete()

        if not asynchronous:
            self._write_files()
        # a daemon: a process that ends in the middle leaves a hidden directory, which the next save removes
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Until training may change the state."""
        self._copied.wait()

    def wait_for_files(self) -> None:
        """Until this rank's files are written, or it has failed to."""
        self._files_done.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Until this rank has nothing left to do; after `seconds`, rank 0 stops waiting for the others."""
        assert self._thread is not None
        self._files_done.wait()
        self._thread.join(seconds)
        self._abandoned.set()
        self._thread.join()

    def abandon(self) -> None:
        """Stop waiting for other ranks: one has failed."""
        self.wait(0)

    def _write_files(self) -> None:
        try:
            if self._copy is not None:
                self._copy()
                self._copied.set()
            files = {}
            for content, tensors in self._contents.items():
                if tensors:
                    name = tensor_file(content, self.rank, self.num_ranks)
                    files[name] = asdict(write_own_tensors(self.temporary / name, tensors))
            self._mark({"files": files})
        except Exception as error:  # on a thread it would be lost
            self.file_error = error
            with contextlib.suppress(OSError):
                self._mark({"failure": reason(error)})
        finally:
            self._contents = {}
            self._copied.set()
            self._files_done.set()

    def _mark(self, value: dict[str, Any]) -> None:
        write_json(_marker(self.temporary, self.rank), value)

    def _complete(self) -> None:
        try:
            files = self._collect()
            files |= write_common(self.temporary, self._common)
            write_manifest(self.temporary, files)
            for rank in range(self.num_ranks):
                _marker(self.temporary, rank).unlink()
            fsync_directory(self.temporary)
            put_in_place(self.temporary, self.final)
        except Exception as error:  # on a thread it would be lost
            self.completion_error = error

    def _collect(self) -> dict[str, FileRecord]:
        """Every rank's files, once all have written theirs.

        Raises:
            RunError: a rank failed, wrote nothing for too long, or the save was abandoned.
        """
        files: dict[str, FileRecord] = {}
        missing = list(range(self.num_ranks))
        deadline, pause = time.monotonic() + MARKER_SECONDS, _FIRST_POLL_SECONDS
        while True:
            for rank in [rank for rank in missing if _marker(self.temporary, rank).exists()]:
                marker = read_json(_marker(self.temporary, rank))
                if "failure" in marker:
                    raise RunError(f"rank {rank}: {marker['failure']}")
                files |= {name: FileRecord(**record) for name, record in marker["files"].items()}
                missing.remove(rank)
            if not missing:
                return files
            if self._abandoned.wait(pause) or time.monotonic() > deadline:
                raise RunError(f"rank {missing[0]} has not written its files")
            pause = min(2 * pause, _LAST_POLL_SECONDS)


def write_own_tensors(path: Path, tensors: Mapping[str, OwnTensor]) -> FileRecord:
    """Write one file of tensors, each read when its turn comes."""
    return write_tensors(
        path,
        {name: tensor.spec for name, tensor in tensors.items()},
        (tensor.read() for tensor in tensors.values()),
        TENSOR_METADATA | cuts_metadata({name: tensor.cut for name, tensor in tensors.items()}),
    )


def write_common(directory: Path, common: CommonFiles) -> dict[str, FileRecord]:
    """Write recipe, tokenizer and state; what the manifest is to say of them."""
    with atomic_write(directory / RECIPE_FILE) as file:
        file.write(recipe_to_yaml(common.recipe).encode())
    tokenizer = {stored_name(source): source for source in tokenizer_files(common.tokenizer)}
    for name, source in tokenizer.items():
        with atomic_write(directory / name) as file, open(source, "rb") as content:
            shutil.copyfileobj(content, file)
    write_state(directory, common.state)
    return {name: record_of(directory / name) for name in (RECIPE_FILE, *tokenizer, STATE_FILE)}


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name. One of the same step is replaced: the run was resumed before it."""
    replaced = final.with_name(f".{final.name}.replaced.tmp")
    if os.path.lexists(final):
        os.replace(final, replaced)
    os.replace(temporary, final)
    fsync_directory(final.parent)
    with contextlib.suppress(OSError):  # there was none, or the next save removes it
        remove(replaced)


def reason(error: Exception) -> str:
    """An error in a few words, with the file that it is about where one is known."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def _marker(directory: Path, rank: int) -> Path:
    return directory / f".rank-{rank:05d}.json"
