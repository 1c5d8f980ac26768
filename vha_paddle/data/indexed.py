"""Token ids on disk: Megatron's indexed dataset, `<prefix>.bin` and `<prefix>.idx`, with a manifest beside.

PaddleNLP's builder writes the two files; PaddleNLP, Megatron-LM and this module read them. The layout of
.idx, little-endian: 9 bytes of magic, u64 version 1, u8 code of the token type, u64 number of sequences n,
u64 length of the document index d, then i32 sizes[n] in tokens, i64 pointers[n] in bytes of .bin, i64
documents[d] (the first sequence of each document, and n). The .bin is the tokens of all sequences, one after
another.

`<prefix>.json` says what the two cannot: the vocabulary, the tokenizer and where the text came from. Data
that was made elsewhere may lack it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import struct
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.errors import RunError, UserError
from vha_paddle.files import fsync_directory, fsync_tree

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, length of the document index
# The two token types that hold a vocabulary and that Megatron-LM reads.
TOKEN_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
UINT16_VOCABULARY = 65_536  # vocabularies below this are stored in 2 bytes a token

_CHUNK = 1 << 22  # tokens looked at together when a whole file is scanned


@dataclass(frozen=True)
class Manifest:
    """The content of `<prefix>.json`.

    Attributes:
        tokens: tokens in the .bin, end-of-document tokens included.
        documents: documents in the .idx.
        vocab_size: every token id is below it.
        eod_id: id that ends each document, or None.
        tokenizer_sha256: digest of the `tokenizer.model`, or None if it is unknown.
        bin_sha256: digest of the .bin, hexadecimal.
        source: where the text came from, for a reader.
    """

    tokens: int
    documents: int
    vocab_size: int
    eod_id: int | None
    tokenizer_sha256: str | None
    bin_sha256: str
    source: str

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a manifest.

        Raises:
            UserError: it is no JSON object with exactly these keys and kinds of value.
        """
        kinds = {field.name: str(field.type) for field in fields(cls)}
        remedy = "prepare the data again"
        try:
            content: Any = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"manifest {path} cannot be read ({error}); {remedy}") from None
        if not isinstance(content, dict) or set(content) != set(kinds):
            raise UserError(f"manifest {path} must be an object with the keys {', '.join(kinds)}; {remedy}")
        for key, kind in kinds.items():
            if {int: "int", str: "str", type(None): "None"}.get(type(content[key])) not in kind.split(" | "):
                raise UserError(f"manifest {path}: {key} is {content[key]!r} and must be {kind}; {remedy}")
        return cls(**content)


def write_indexed(
    prefix: Path,
    documents: Iterable[Sequence[int]],
    vocab_size: int,
    *,
    eod_id: int | None,
    tokenizer_sha256: str | None,
    source: str,
) -> Manifest:
    """Write `<prefix>.bin`, `.idx` and `.json` through PaddleNLP's builder, a document being one sequence.

    Tokens are uint16 for vocabularies below 65,536 and int32 otherwise. If `eod_id` is given it is appended
    to each document. The .idx takes its name last and an old one is removed first, so whenever it is there
    the files beside it are whole and belong to it.

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
        bin_path, idx_path, manifest_path = (Path(folder, f"data.{kind}") for kind in ("bin", "idx", "json"))
        checked = _checked_documents(documents, vocab_size, eod_id)
        num_documents, num_tokens = _build(bin_path, idx_path, checked, vocab_size)
        if num_documents == 0:
            raise UserError(f"no document for {prefix}.bin; give some text")
        manifest = Manifest(
            tokens=num_tokens,
            documents=num_documents,
            vocab_size=vocab_size,
            eod_id=eod_id,
            tokenizer_sha256=tokenizer_sha256,
            bin_sha256=_sha256(bin_path),
            source=source,
        )
        manifest_path.write_text(json.dumps(asdict(manifest), indent=2) + "\n", "utf-8")
        fsync_tree(Path(folder))
        _suffixed(prefix, ".idx").unlink(missing_ok=True)
        for path in (bin_path, manifest_path, idx_path):
            os.replace(path, _suffixed(prefix, path.suffix))
        fsync_directory(prefix.parent)
    return manifest


def _checked_documents(documents: Iterable[Sequence[int]], vocab_size: int, eod_id: int | None) -> Iterator[np.ndarray]:
    """Each document as int64 ids, checked against the vocabulary and ended."""
    ending = np.array([] if eod_id is None else [eod_id], dtype=np.int64)
    for index, document in enumerate(documents):
        if len(document) == 0:
            raise UserError(f"document {index} has no token; leave empty documents out")
        ids = np.concatenate([np.asarray(document, dtype=np.int64), ending])
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if wrong.size:
            raise UserError(
                f"document {index} holds token id {wrong[0]}, which is not in [0, vocab_size={vocab_size}); "
                "use the vocabulary of the tokenizer that made it"
            )
        yield ids


def _build(bin_path: Path, idx_path: Path, documents: Iterator[np.ndarray], vocab_size: int) -> tuple[int, int]:
    """Run PaddleNLP's builder, then its reader on the result; returns the numbers of documents and of tokens."""
    with _quiet_import():
        from paddlenlp.data.indexed_dataset import MMapIndexedDatasetBuilder, make_dataset

    dtype = np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32
    builder = MMapIndexedDatasetBuilder(str(bin_path), dtype=dtype)
    num_documents = num_tokens = 0
    for ids in documents:
        builder.add_item(ids)
        builder.end_document()
        num_documents += 1
        num_tokens += len(ids)
    if num_documents:
        with contextlib.redirect_stdout(None):  # it prints statistics; stdout is the tool's own result
            builder.finalize(str(idx_path))
            written = make_dataset(str(bin_path.with_suffix("")), "mmap", skip_warmup=True)
        found = (len(written), int(written.sizes.sum()))
        if found != (num_documents, num_tokens):
            raise RunError(
                f"{bin_path}: PaddleNLP reads back {found[0]} documents of {found[1]} tokens, "
                f"{num_documents} of {num_tokens} were written; prepare the data again"
            )
    return num_documents, num_tokens


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Keep what PaddleNLP says during its import (compilers, frameworks it found) off the user's screen."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(disabled)


class IndexedTokens:
    """An indexed dataset opened for reading: nothing is loaded, nothing is trusted before it is checked.

    The tokens are mapped with numpy: training needs one flat stream, and importing PaddleNLP costs every rank
    seconds at each start.

    Attributes:
        tokens: all token ids of the .bin in order, read-only, uint16 or int32, mapped from disk.
        sizes: tokens in each sequence.
        document_starts: first sequence of each document, and the number of sequences at the end.
        manifest: the content of `<prefix>.json`, or None if there is no such file.
    """

    def __init__(self, prefix: Path, *, vocab_size: int | None = None, tokenizer_sha256: str | None = None) -> None:
        """Open `<prefix>.bin` and `.idx` and check them against what the model expects.

        With `vocab_size` every token is looked at once: 1 s for some 10**9 of them if the disk keeps up.

        Args:
            prefix: path without suffix.
            vocab_size: of the model; no token may reach it.
            tokenizer_sha256: digest of the tokenizer in use; the manifest must name the same.

        Raises:
            UserError: a file is missing or damaged, a token id reaches `vocab_size`, or the tokenizer is
            another.
        """
        self.prefix = Path(prefix)
        self._bin_path, idx_path = _suffixed(self.prefix, ".bin"), _suffixed(self.prefix, ".idx")
        for path in (idx_path, self._bin_path):
            if not (path.is_file() and os.access(path, os.R_OK)):
                raise UserError(f"{path} is no file to read; make it with tools/prepare_data.py or correct its name")
        dtype, self.sizes, self.document_starts = _read_index(idx_path, self._bin_path)
        self.tokens: np.ndarray = np.memmap(self._bin_path, dtype=dtype, mode="r")
        manifest_path = _suffixed(self.prefix, ".json")
        self.manifest = Manifest.read(manifest_path) if manifest_path.is_file() else None
        if self.manifest is not None:
            self._check_manifest(self.manifest, manifest_path)
        if tokenizer_sha256 is not None:
            self._check_tokenizer(tokenizer_sha256)
        if vocab_size is not None:
            self._check_vocabulary(vocab_size)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    @cached_property
    def digest(self) -> str:
        """sha256 of the .bin: the manifest's, or computed from the file (once, about 1 GB/s)."""
        return _sha256(self._bin_path) if self.manifest is None else self.manifest.bin_sha256

    def chunks(self) -> Iterator[np.ndarray]:
        """The token stream in consecutive pieces that fit in memory."""
        for start in range(0, self.num_tokens, _CHUNK):
            yield self.tokens[start : start + _CHUNK]

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

    def _check_vocabulary(self, vocab_size: int) -> None:
        for chunk in self.chunks():
            lowest, highest = int(chunk.min()), int(chunk.max())
            if lowest < 0 or highest >= vocab_size:
                wrong = lowest if lowest < 0 else highest
                raise UserError(
                    f"{self._bin_path} holds token id {wrong}, which is not in [0, vocab_size={vocab_size}); "
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
    require(int(sizes.min()) >= 0, "holds a sequence of negative length")
    dtype = TOKEN_TYPES[code]
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    follow = pointers[0] == 0 and np.array_equal(pointers[1:], ends[:-1])
    require(bool(follow), "has pointers that do not follow its sizes")
    covered = document_starts[0] == 0 and document_starts[-1] == num_sequences
    require(bool(covered and (np.diff(document_starts) >= 0).all()), "has a document index out of order")
    bin_bytes = bin_path.stat().st_size
    require(bin_bytes == ends[-1], f"describes {ends[-1]} bytes and {bin_path.name} has {bin_bytes}")
    require(bin_bytes > 0, "holds no token")
    return dtype, sizes, document_starts


def _suffixed(prefix: Path, suffix: str) -> Path:
    """`prefix` plus `suffix`; a dot inside the prefix is part of the name."""
    return prefix.with_name(prefix.name + suffix)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
