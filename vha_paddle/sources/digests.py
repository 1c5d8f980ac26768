"""SHA-256 of a checkpoint's files, taken while its tensors are read."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vha_paddle.errors import UserError
from vha_paddle.files import read_at
from vha_paddle.sources.base import Source

_CHUNK_BYTES = 16 << 20


def digest_of_list(digests: Mapping[str, str]) -> str:
    """One SHA-256 for several files: of their list, sorted by name, as `sha256sum` prints it."""
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(listed.encode()).hexdigest()


class Digests:
    """Digests of `source.files` on a thread of its own, from when it is entered.

    Tensors are read in the order of layers, from all files at once; a digest needs each file from its first byte to its
    last. So the files are read a second time, side by side, the same share of each in turn: what the one finds on the
    disk the other finds in the page cache. SHA-256 takes half a second for a gigabyte and leaves Python to others.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._given_up = source, threading.Event()
        self._pool = ThreadPoolExecutor(1, "source digests")
        self._future: Future[dict[str, str]] | None = None

    def __enter__(self) -> Digests:
        self._future = self._pool.submit(self._compute)
        return self

    def __exit__(self, *_: Any) -> None:
        self._given_up.set()
        self._pool.shutdown()

    def result(self) -> dict[str, str]:
        """The digest of each file, hexadecimal, once all are read.

        Raises:
            UserError: a file is not as the checkpoint states, or cannot be read.
        """
        assert self._future is not None, "entered before"
        return self._future.result()

    def _compute(self) -> dict[str, str]:
        paths = {name: self._source.path / name for name in self._source.files}
        digests = {name: hashlib.sha256() for name in paths}
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        try:
            sizes = {name: path.stat().st_size for name, path in paths.items()}
            turns = -(-max(sizes.values(), default=0) // _CHUNK_BYTES)
            for turn in range(turns):
                for name, path in paths.items():
                    if self._given_up.is_set():
                        return {}
                    start, stop = (sizes[name] * each // turns for each in (turn, turn + 1))
                    digests[name].update(_chunk(path, start, buffer[: stop - start]))
        except OSError as error:
            raise UserError(f"{self._source.path}: cannot be read ({error})") from None
        found = {name: digest.hexdigest() for name, digest in digests.items()}
        for name, stated in self._source.files.items():
            if stated not in (None, found[name]):
                raise UserError(f"{paths[name]}: differs from the manifest (damaged or edited); use another checkpoint")
        return found


def _chunk(path: os.PathLike[str], start: int, buffer: memoryview) -> memoryview:
    """Some bytes of a file, up to its end."""
    with open(path, "rb", buffering=0) as file:
        return buffer[: read_at(file.fileno(), buffer, start)]
