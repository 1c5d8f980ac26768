"""Encoding one part of the input: the function that processes, and machines, run many of.

What a part becomes is a folder: `<split>.tokens` and `<split>.sizes` for each split, `skipped.jsonl`, and `part.json`,
which counts them. The folder takes its name when it is whole, so the names of the folders are the journal of a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from vha_paddle.data.indexed_writer import PieceWriter
from vha_paddle.data.inputs import Part
from vha_paddle.data.readers import Bad, Document, read_documents
from vha_paddle.data.tokenizer import Tokenizer, load_tokenizer
from vha_paddle.errors import RunError, UserError
from vha_paddle.files import fsync_directory, fsync_tree

TRAIN, VALIDATION = "train", "validation"
BAD_KINDS = ("line", "row", "row_group", "file")
SKIPPED_FILE = "skipped.jsonl"
PART_FILE = "part.json"

# Documents that are encoded in one call: enough that the call costs nothing, few enough that memory does not show it.
_BATCH_DOCUMENTS = 256
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Reading:
    """How documents are read and divided.

    Attributes:
        text_key: key or column of the text.
        validation_fraction: share of the documents to hold out, in [0, 1).
        skip_bad: leave out what is no document, instead of stopping at it.
    """

    text_key: str
    validation_fraction: float
    skip_bad: bool

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are written."""
        return (TRAIN, VALIDATION) if self.validation_fraction > 0 else (TRAIN,)


@dataclass(frozen=True)
class Task:
    """One part to encode, as it is sent to a worker.

    Attributes:
        folder: where parts are written.
        number: of the part, from 0, in the order of the input.
        tokenizer: folder of its files.
        tokenizer_sha256: digest that it must have.
    """

    folder: str
    number: int
    part: Part
    tokenizer: str
    tokenizer_sha256: str
    reading: Reading


@dataclass
class SplitCount:
    """Documents, UTF-8 bytes of text and tokens, end tokens included, of one split."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0


@dataclass
class Counts:
    """What was found in some input.

    Attributes:
        splits: by name.
        blank: documents of nothing but white space, or without a token, which are left out.
        skipped: what gave no document, by kind.
    """

    splits: dict[str, SplitCount]
    blank: int = 0
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BAD_KINDS, 0))

    @classmethod
    def none(cls, splits: tuple[str, ...]) -> Counts:
        return cls({name: SplitCount() for name in splits})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Counts:
        splits = {name: SplitCount(**counts) for name, counts in values["splits"].items()}
        return cls(splits, values["blank"], values["skipped"])

    def add(self, other: Counts) -> None:
        for name, counts in other.splits.items():
            mine = self.splits[name]
            mine.documents += counts.documents
            mine.bytes += counts.bytes
            mine.tokens += counts.tokens
        self.blank += other.blank
        for kind, number in other.skipped.items():
            self.skipped[kind] += number


def part_folder(folder: Path, number: int) -> Path:
    """Where part `number` lies when it is done."""
    return folder / f"{number:08d}"


def split_of(text: str, validation_fraction: float) -> str:
    """Name the split of a document from its text alone.

    A document stays in its split when others come and go, and two copies of it are never on both sides.
    """
    return _split_of(text.encode(), validation_fraction)


def _split_of(utf8: bytes, validation_fraction: float) -> str:
    share = int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest(), "big") / 2**64
    return VALIDATION if share < validation_fraction else TRAIN


def labelled_documents(
    part: Part,
    reading: Reading,
    counts: Counts,
    record_bad: Callable[[Bad], None] = lambda _: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[str, Document]]:
    """Each document of a part after the name of its split; what is left out is counted.

    Raises:
        UserError: something is no document, and it is not to be skipped.
    """

    def on_bad(bad: Bad) -> None:
        if not reading.skip_bad:
            raise UserError(f"{bad}; or leave such input out with --on-error skip")
        counts.skipped[bad.kind] += 1
        record_bad(bad)

    for piece in part:
        for document in read_documents(piece, reading.text_key, on_bad, advance):
            if not document.text or document.text.isspace():
                counts.blank += 1
            else:
                yield _split_of(document.utf8, reading.validation_fraction), document


def batches(documents: Iterator[tuple[str, Document]]) -> Iterator[dict[str, list[Document]]]:
    """Documents by split, some at a time."""
    batch: dict[str, list[Document]] = {}
    num_documents = num_bytes = 0
    for split, document in documents:
        batch.setdefault(split, []).append(document)
        num_documents += 1
        num_bytes += len(document.utf8)
        if num_documents == _BATCH_DOCUMENTS or num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_documents, num_bytes = {}, 0, 0
    if batch:
        yield batch


def encoded(documents: Sequence[Document], tokenizer: Tokenizer, counts: Counts) -> list[tuple[Document, list[int]]]:
    """Documents and their ids. What the tokenizer makes nothing of, as some do of control characters, is blank too."""
    ids = tokenizer.encode_batch([document.text for document in documents])
    kept = [(document, each) for document, each in zip(documents, ids, strict=True) if each]
    counts.blank += len(documents) - len(kept)
    return kept


@lru_cache(maxsize=1)
def _tokenizer(folder: str, sha256: str) -> Tokenizer:
    """The tokenizer of this process: a worker loads it once."""
    tokenizer = load_tokenizer(Path(folder))
    if tokenizer.digest != sha256:
        raise RunError(f"tokenizer {folder} was changed while it was in use; delete the working folder, start again")
    return tokenizer


def encode_part(task: Task, advance: Callable[[int], None] = lambda _: None) -> Counts:
    """Make the folder of one part, unless another process has made it meanwhile: it would hold the same.

    Args:
        advance: told the input bytes that were encoded since the last call.

    Raises:
        UserError: something is no document, and it is not to be skipped.
        OSError: the folder cannot be written.
    """
    tokenizer = _tokenizer(task.tokenizer, task.tokenizer_sha256)
    folder = Path(task.folder)
    target = part_folder(folder, task.number)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=folder))
    try:
        counts = _encode(task, tokenizer, temporary, advance)
        (temporary / PART_FILE).write_text(json.dumps(asdict(counts)), "utf-8")
        fsync_tree(temporary)
        try:
            os.rename(temporary, target)
        except OSError:
            if not (target / PART_FILE).is_file():
                raise
        fsync_directory(folder)
        return counts
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _encode(task: Task, tokenizer: Tokenizer, folder: Path, advance: Callable[[int], None]) -> Counts:
    counts = Counts.none(task.reading.splits)
    with contextlib.ExitStack() as stack:

        def opened(name: str) -> Any:
            return stack.enter_context(open(folder / name, "wb"))

        writers = {
            split: PieceWriter(
                opened(f"{split}.tokens"), opened(f"{split}.sizes"), tokenizer.vocab_size, tokenizer.eos_id
            )
            for split in counts.splits
        }
        # The name of a file may be no UTF-8; it then stands there as in JSON's own escapes.
        skipped = stack.enter_context(open(folder / SKIPPED_FILE, "w", encoding="utf-8", errors="backslashreplace"))
        documents = labelled_documents(task.part, task.reading, counts, lambda bad: _record(bad, skipped), advance)
        for batch in batches(documents):
            for split, some in batch.items():
                ids = encoded(some, tokenizer, counts)
                writers[split].add([each for _, each in ids])
                counts.splits[split].bytes += sum(len(document.utf8) for document, _ in ids)
        for split, writer in writers.items():
            counts.splits[split].documents = writer.documents
            counts.splits[split].tokens = writer.tokens
    return counts


def _record(bad: Bad, file: TextIO) -> None:
    """One line of `skipped.jsonl`."""
    line = {"file": bad.file, **bad.where, "lost": bad.kind, "reason": bad.reason}
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
