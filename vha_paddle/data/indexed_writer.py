"""Writing indexed datasets in memory that does not grow with them: documents of ids, or pieces that are joined.

A piece is the tokens of some documents in one file and the number of tokens of each in another; a dataset is its pieces
one after another. What is joined has the same bytes whatever the pieces were.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vha_paddle.data.indexed_format import HEADER, MAGIC, TOKEN_TYPES, Manifest, suffixed, token_type
from vha_paddle.errors import RunError, UserError
from vha_paddle.files import fsync_directory, fsync_tree

SIZE_TYPE = np.dtype("<i4")

_BLOCK = 1 << 22  # bytes of .bin, or numbers of .idx, that are handled together


@dataclass(frozen=True)
class Piece:
    """Some documents of a dataset.

    Attributes:
        tokens: file of their ids.
        sizes: file that holds the tokens of each document, as int32.
        sizes_offset: bytes of `sizes` before the first.
        documents: how many.
        sha256: digest that `tokens` must have, or None.
    """

    tokens: Path
    sizes: Path
    sizes_offset: int
    documents: int
    sha256: str | None = None


class PieceWriter:
    """Writes one piece: ids to one open file, sizes to another.

    Attributes:
        documents, tokens: how many were added.
    """

    def __init__(self, tokens_file: BinaryIO, sizes_file: BinaryIO, vocab_size: int, eod_id: int | None) -> None:
        self._tokens_file, self._sizes_file = tokens_file, sizes_file
        self._vocab_size, self._eod = vocab_size, [] if eod_id is None else [eod_id]
        self.documents = self.tokens = 0

    def add(self, documents: Sequence[Sequence[int]]) -> None:
        """Append documents, each ended by `eod_id`.

        Raises:
            UserError: one is empty, or an id is not in [0, vocab_size).
        """
        flat: list[int] = []
        sizes = []
        for number, ids in enumerate(documents, start=self.documents):
            if len(ids) == 0:
                raise UserError(f"document {number} has no token; leave empty documents out")
            flat.extend(ids)
            flat.extend(self._eod)
            sizes.append(len(ids) + len(self._eod))
        if not sizes:
            return
        array = np.array(flat, dtype=np.int64)
        if array.min() < 0 or array.max() >= self._vocab_size:
            self._refuse(array, sizes)
        self._tokens_file.write(array.astype(token_type(self._vocab_size)).tobytes())
        self._sizes_file.write(np.array(sizes, dtype=SIZE_TYPE).tobytes())
        self.documents += len(sizes)
        self.tokens += len(array)

    def _refuse(self, array: np.ndarray, sizes: list[int]) -> None:
        first = int(np.flatnonzero((array < 0) | (array >= self._vocab_size))[0])
        number = self.documents + int(np.searchsorted(np.cumsum(sizes), first, side="right"))
        raise UserError(
            f"document {number} holds token id {array[first]}, which is not in [0, vocab_size={self._vocab_size}); "
            "use the vocabulary of the tokenizer that made it"
        )


def join_pieces(
    prefix: Path,
    pieces: Sequence[Piece],
    vocab_size: int,
    *,
    eod_id: int | None,
    tokenizer_sha256: str | None,
    source: str,
    id_counts: np.ndarray | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write `<prefix>.bin`, `.idx` and `.json` of the documents of `pieces`, in their order.

    Args:
        prefix: path without suffix, in a folder that is moved into place when it is whole.
        id_counts: how often each id occurs is added to it, while the bytes are at hand.
        advance: told the bytes of .bin that were written since the last call.

    Raises:
        RunError: a piece does not hold what it should: it was changed or damaged since it was written.
    """
    dtype = token_type(vocab_size)
    digest = hashlib.sha256()
    num_bytes = 0
    with open(suffixed(prefix, ".bin"), "wb") as target:
        for piece in pieces:
            piece_digest = hashlib.sha256()
            with open(piece.tokens, "rb") as file:
                while block := file.read(_BLOCK):
                    target.write(block)
                    digest.update(block)
                    if piece.sha256 is not None:
                        piece_digest.update(block)
                    if id_counts is not None:
                        id_counts += _counted(block, dtype, vocab_size, piece.tokens)
                    num_bytes += len(block)
                    advance(len(block))
            if piece.sha256 not in (None, piece_digest.hexdigest()):
                raise RunError(f"{piece.tokens} does not have the digest of its manifest; make it again")
    with open(suffixed(prefix, ".idx"), "wb") as file:
        tokens = _write_index(file, pieces, dtype)
    if tokens * dtype.itemsize != num_bytes:
        raise RunError(f"{prefix}: sizes for {tokens} tokens, {num_bytes} bytes of them; delete the pieces, run again")
    manifest = Manifest(
        tokens=tokens,
        documents=sum(piece.documents for piece in pieces),
        vocab_size=vocab_size,
        eod_id=eod_id,
        tokenizer_sha256=tokenizer_sha256,
        bin_sha256=digest.hexdigest(),
        source=source,
    )
    suffixed(prefix, ".json").write_text(json.dumps(asdict(manifest), indent=2) + "\n", "utf-8")
    return manifest


def _counted(block: bytes, dtype: np.dtype[Any], vocab_size: int, path: Path) -> np.ndarray:
    """How often each id of a vocabulary occurs."""
    ids = np.frombuffer(block, dtype=dtype)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RunError(f"{path} holds a token id beyond vocab_size {vocab_size}; it is damaged: make it again")
    return np.bincount(ids, minlength=vocab_size)


def _write_index(file: BinaryIO, pieces: Sequence[Piece], dtype: np.dtype[Any]) -> int:
    """Write an .idx and return the number of tokens. The sizes are read twice, so that they need not be kept."""
    documents = sum(piece.documents for piece in pieces)
    code = next(code for code, known in TOKEN_TYPES.items() if known == dtype)
    file.write(HEADER.pack(MAGIC, 1, code, documents, documents + 1))
    for sizes in _sizes(pieces):
        file.write(sizes.tobytes())
    tokens = 0
    for sizes in _sizes(pieces):
        ends = tokens + np.cumsum(sizes, dtype="<i8")
        file.write(((ends - sizes) * dtype.itemsize).astype("<i8").tobytes())
        tokens = int(ends[-1])
    for start in range(0, documents + 1, _BLOCK):
        file.write(np.arange(start, min(start + _BLOCK, documents + 1), dtype="<i8").tobytes())
    return tokens


def _sizes(pieces: Sequence[Piece]) -> Iterator[np.ndarray]:
    """The sizes of all documents, some at a time."""
    for piece in pieces:
        with open(piece.sizes, "rb") as file:
            file.seek(piece.sizes_offset)
            for start in range(0, piece.documents, _BLOCK):
                count = min(_BLOCK, piece.documents - start)
                sizes = np.fromfile(file, dtype=SIZE_TYPE, count=count)
                if len(sizes) != count:
                    raise RunError(f"{piece.sizes} is cut short; delete it, run again")
                yield sizes


def write_indexed(
    prefix: Path,
    documents: Iterable[Sequence[int]],
    vocab_size: int,
    *,
    eod_id: int | None,
    tokenizer_sha256: str | None,
    source: str,
) -> Manifest:
    """Write `<prefix>.bin`, `.idx` and `.json`, a document being one sequence.

    Tokens are uint16 for vocabularies below 65,536 and int32 otherwise. If `eod_id` is given it is appended to each
    document. The .idx takes its name last and an old one is removed first, so whenever it is there the files beside it
    are whole and belong to it.

    Args:
        prefix: path without suffix; its folder is made if needed.
        documents: token ids of each document, at least one token each.
        vocab_size: every id must be below it.

    Raises:
        UserError: there is no document, one is empty, or an id is not in [0, vocab_size).
    """
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{prefix.name}.", suffix=".tmp", dir=prefix.parent) as folder:
        piece_folder, whole = Path(folder, "piece"), Path(folder, "whole")
        piece_folder.mkdir()
        whole.mkdir()
        tokens, sizes = piece_folder / "tokens", piece_folder / "sizes"
        with open(tokens, "wb") as tokens_file, open(sizes, "wb") as sizes_file:
            writer = PieceWriter(tokens_file, sizes_file, vocab_size, eod_id)
            for document in documents:
                writer.add([document])
        if writer.documents == 0:
            raise UserError(f"no document for {prefix}.bin; give some text")
        manifest = join_pieces(
            whole / "data",
            [Piece(tokens, sizes, 0, writer.documents)],
            vocab_size,
            eod_id=eod_id,
            tokenizer_sha256=tokenizer_sha256,
            source=source,
        )
        fsync_tree(whole)
        suffixed(prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx"):
            os.replace(whole / f"data{suffix}", suffixed(prefix, suffix))
        fsync_directory(prefix.parent)
    return manifest
