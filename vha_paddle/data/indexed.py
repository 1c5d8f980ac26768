"""Reading an indexed dataset (`indexed_format.py`) that may be any size and may come from anywhere.

Writing one is `write_indexed`, which stands in `indexed_writer.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.data.indexed_format import HEADER, MAGIC, TOKEN_TYPES, Manifest, file_sha256, suffixed
from vha_paddle.data.indexed_writer import write_indexed
from vha_paddle.errors import UserError

__all__ = ["HEADER", "IndexedTokens", "Manifest", "write_indexed"]

# What is looked at of a large file is part of its digest, so it decides which runs can be resumed.
_CHUNK = 1 << 22  # tokens, or sequences, looked at together
_MOST_SCANNED = 1 << 28  # tokens looked at when a file is opened; of twice as many and more, chunks at equal distances


class IndexedTokens:
    """An indexed dataset opened for reading: nothing is loaded, nothing is trusted before it is checked.

    The tokens are mapped with numpy: training needs one flat stream, and importing PaddleNLP costs every rank
    seconds at each start.

    Attributes:
        bin_path: path of the .bin.
        tokens: all token ids of the .bin in order, read-only, uint16 or int32, mapped from disk.
        sizes: tokens in each sequence.
        document_starts: first sequence of each document, and the number of sequences at the end.
        manifest: the content of `<prefix>.json`, or None if there is no such file.
    """

    def __init__(self, prefix: Path, *, vocab_size: int | None = None, tokenizer_sha256: str | None = None) -> None:
        """Open `<prefix>.bin` and `.idx` and check them against what the model expects.

        With `vocab_size` every token is looked at, and the manifest's digest compared; of a large file a sample, whose
        digest becomes part of `digest`. That takes up to two seconds if the disk keeps up. The loader looks at each
        token again when it is read.

        Args:
            prefix: path without suffix.
            vocab_size: of the model; no token may reach it.
            tokenizer_sha256: digest of the tokenizer in use; the manifest must name the same.

        Raises:
            UserError: a file is missing or damaged, a token id that is looked at reaches `vocab_size`, the tokens are
            not those of the manifest, or the tokenizer is another.
        """
        self.prefix, self._vocab_size = Path(prefix), vocab_size
        self.bin_path, idx_path = suffixed(self.prefix, ".bin"), suffixed(self.prefix, ".idx")
        for path in (idx_path, self.bin_path):
            if not (path.is_file() and os.access(path, os.R_OK)):
                raise UserError(f"{path} is no file to read; make it with tools/prepare_data.py or correct its name")
        dtype, self.sizes, self.document_starts = _read_index(idx_path, self.bin_path)
        self.tokens: np.ndarray = np.memmap(self.bin_path, dtype=dtype, mode="r")
        manifest_path = suffixed(self.prefix, ".json")
        self.manifest = Manifest.read(manifest_path) if manifest_path.is_file() else None
        if self.manifest is not None:
            self._check_manifest(self.manifest, manifest_path)
        if tokenizer_sha256 is not None:
            self._check_tokenizer(tokenizer_sha256)
        self._seen_sha256 = None if vocab_size is None else self._look_at_tokens()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    @cached_property
    def digest(self) -> str:
        """sha256 of the .bin: the manifest's, or computed from the file (once, about 1 GB/s; while its tokens are
        looked at, if all are).

        A large file with a manifest is not read through, so a `+` follows, and the sha256 of the sample of it that was
        looked at: data that took its place are told from it though the manifest stayed.
        """
        seen = self._seen_sha256
        if self.manifest is None:
            return seen if seen is not None and not self._is_sampled else file_sha256(self.bin_path)
        return self.manifest.bin_sha256 + (f"+{seen}" if seen is not None and self._is_sampled else "")

    def chunks(self) -> Iterator[np.ndarray]:
        """The token stream in consecutive pieces that fit in memory.

        Raises:
            UserError: the file cannot be read, or a token reaches the `vocab_size` that it was opened with.
        """
        return self._chunks(range(0, self.num_tokens, _CHUNK))

    def _chunks(self, starts: Iterable[int]) -> Iterator[np.ndarray]:
        """Read, not mapped: touching a mapping ends the process with a signal where the disk fails."""
        dtype = self.tokens.dtype
        for start in starts:
            try:
                with open(self.bin_path, "rb") as file:
                    file.seek(start * dtype.itemsize)
                    content = file.read(_CHUNK * dtype.itemsize)
            except OSError as error:
                raise UserError(f"{self.bin_path}: cannot be read ({error.strerror}); restore it") from None
            if len(content) != min(_CHUNK, self.num_tokens - start) * dtype.itemsize:
                raise UserError(f"{self.bin_path}: became shorter while it was read; prepare the data again")
            chunk = np.frombuffer(content, dtype)
            if self._vocab_size is not None:
                self._check_vocabulary(chunk, self._vocab_size)
            yield chunk

    def _check_manifest(self, manifest: Manifest, path: Path) -> None:
        found = (self.num_tokens, self.num_documents)
        if (manifest.tokens, manifest.documents) != found:
            raise UserError(
                f"manifest {path} counts {manifest.tokens} tokens in {manifest.documents} documents, "
                f"the files hold {found[0]} in {found[1]}; prepare the data again"
            )

    def _check_tokenizer(self, expected: str) -> None:
        made_with = None if self.manifest is None else self.manifest.tokenizer_sha256
        if made_with != expected:
            raise UserError(
                f"{self.prefix} was made with tokenizer {made_with or '(not recorded)'}, the one in use is "
                f"{expected}; use the tokenizer.model that lies beside the data, or prepare the data again"
            )

    @property
    def _is_sampled(self) -> bool:
        """Whether there are too many tokens to look at all of them."""
        return self.num_tokens >= 2 * _MOST_SCANNED

    def _look_at_tokens(self) -> str:
        """Look at all tokens, or of a large file at a sample; returns the digest of what was looked at."""
        step = _CHUNK * max(1, self.num_tokens // _MOST_SCANNED)
        starts = [*range(0, self.num_tokens, step), *([self.num_tokens - _CHUNK] if self._is_sampled else [])]
        digest = hashlib.sha256()
        for chunk in self._chunks(starts):
            digest.update(chunk.data)
        found = digest.hexdigest()
        if not self._is_sampled and self.manifest is not None and found != self.manifest.bin_sha256:
            raise UserError(
                f"{self.bin_path} has sha256 {found}, its manifest names {self.manifest.bin_sha256}; it was changed or "
                "is damaged: restore it or prepare the data again"
            )
        return found

    def _check_vocabulary(self, chunk: np.ndarray, vocab_size: int) -> None:
        lowest, highest = int(chunk.min()), int(chunk.max())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise UserError(
                f"{self.bin_path} holds token id {wrong}, which is not in [0, vocab_size={vocab_size}); "
                "raise the model's vocab_size or prepare the data with its tokenizer"
            )


def _read_index(idx_path: Path, bin_path: Path) -> tuple[np.dtype[Any], np.ndarray, np.ndarray]:
    """Token type, sizes and document index of an .idx that agrees with itself and with its .bin's length."""

    def require(condition: bool, problem: str) -> None:
        if not condition:
            raise UserError(f"{idx_path} {problem}; it is damaged or of another kind: prepare the data again")

    idx_bytes = idx_path.stat().st_size
    require(idx_bytes >= HEADER.size, f"has {idx_bytes} bytes, fewer than its header")
    with open(idx_path, "rb") as file:
        magic, version, code, num_sequences, num_starts = HEADER.unpack(file.read(HEADER.size))
    require(magic == MAGIC, "does not begin with the magic of an indexed dataset")
    require(version == 1, f"has version {version}, not 1")
    require(code in TOKEN_TYPES, f"has token type {code}, neither 4 (int32) nor 8 (uint16)")
    expected_bytes = HEADER.size + 12 * num_sequences + 8 * num_starts
    require(idx_bytes == expected_bytes, f"has {idx_bytes} bytes where its header says {expected_bytes}")
    require(num_sequences > 0 and num_starts > 1, "holds no sequence")

    content = np.memmap(idx_path, dtype=np.uint8, mode="r")[HEADER.size :]
    sizes = content[: 4 * num_sequences].view("<i4")
    pointers = content[4 * num_sequences : 12 * num_sequences].view("<i8")
    document_starts = content[12 * num_sequences :].view("<i8")
    dtype = TOKEN_TYPES[code]
    end = 0  # of the sequences looked at so far, in bytes of .bin
    for start in range(0, num_sequences, _CHUNK):
        some = slice(start, start + _CHUNK)
        require(int(sizes[some].min()) >= 0, "holds a sequence of negative length")
        ends = end + np.cumsum(sizes[some], dtype=np.int64) * dtype.itemsize
        follow = pointers[start] == end and np.array_equal(pointers[some][1:], ends[:-1])
        require(bool(follow), "has pointers that do not follow its sizes")
        end = int(ends[-1])
    covered = document_starts[0] == 0 and document_starts[-1] == num_sequences
    for start in range(0, num_starts - 1, _CHUNK):
        covered = covered and (np.diff(document_starts[start : start + _CHUNK + 1]) >= 0).all()
    require(bool(covered), "has a document index out of order")
    bin_bytes = bin_path.stat().st_size
    require(bin_bytes == end, f"describes {end} bytes and {bin_path.name} has {bin_bytes}")
    require(bin_bytes > 0, "holds no token")
    return dtype, sizes, document_starts
