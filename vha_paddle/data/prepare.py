"""From text to a data folder: read, split, train or load the tokenizer, encode, write."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vha_paddle.data import corpus
from vha_paddle.data.indexed import IndexedTokens, write_indexed
from vha_paddle.data.loader import unigram_entropy
from vha_paddle.data.tokenizer import NUM_RESERVED, Tokenizer, train_sentencepiece
from vha_paddle.errors import RunError, UserError
from vha_paddle.files import atomic_directory

SPLITS = ("train", "validation")
TOKENIZER_FILE = "tokenizer.model"

Progress = Callable[[Iterable[str], str], Iterable[str]]


@dataclass(frozen=True)
class Plan:
    """What to prepare.

    Attributes:
        out: folder to make.
        inputs: .txt and .jsonl files and directories of them; None for the built-in corpus.
        tokenizer: `tokenizer.model` to use; None to train one.
        train_vocab_size: vocabulary of the tokenizer to train; None to use `tokenizer`.
        validation_fraction: share of the documents to hold out, in [0, 1); 0 writes no validation files.
        overwrite: whether `out` may hold data from an earlier run, which is then replaced.
    """

    out: Path
    inputs: tuple[Path, ...] | None
    tokenizer: Path | None
    train_vocab_size: int | None
    validation_fraction: float
    overwrite: bool


class _Corpus:
    """The documents of a plan, which can be read several times, and their two splits."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._fraction = plan.validation_fraction
        self._progress = progress
        self._files = corpus.text_files(plan.inputs) if plan.inputs is not None else []
        self._builtin = list(corpus.builtin_documents()) if plan.inputs is None else []
        self.source = ", ".join(map(str, plan.inputs)) if plan.inputs is not None else corpus.builtin_source()

    def labelled(self, activity: str) -> Iterator[tuple[str, str]]:
        """Each document after the name of its split, behind a progress bar labelled `activity`."""
        documents = self._builtin or (text for file in self._files for text in corpus.read_documents(file))
        for text in self._progress(documents, activity):
            yield split_of(text, self._fraction), text

    def split(self, name: str, activity: str) -> Iterator[str]:
        """The documents of one split."""
        return (text for split, text in self.labelled(activity) if split == name)


def split_of(text: str, validation_fraction: float) -> str:
    """Name the split of a document from its text alone.

    A document stays in its split when others come and go, and two copies of it are never on both sides.
    """
    share = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
    return "validation" if share < validation_fraction else "train"


def prepare(plan: Plan, *, dry_run: bool, progress: Progress) -> dict[str, Any]:
    """Make the data folder of `plan`: `tokenizer.model`, and `.bin`, `.idx`, `.json` for each split.

    The folder appears whole or not at all, and the same input gives the same bytes. The tokenizer is trained
    on the training split only.

    Args:
        dry_run: check everything, count documents and bytes, and write nothing.
        progress: wraps each pass over the documents, called with them and a label.

    Returns:
        A summary that JSON can hold.

    Raises:
        UserError: the plan or its input is wrong.
        RunError: the folder could not be written.
    """
    _check_plan(plan)
    tokenizer = None if plan.tokenizer is None else Tokenizer.load(plan.tokenizer)
    documents = _Corpus(plan, progress)
    summary: dict[str, Any] = {"out": str(plan.out), "source": documents.source, "dry_run": dry_run}
    summary["splits"] = _count(documents, plan.validation_fraction)
    if not dry_run:
        try:
            with _replaced_directory(plan) as folder:
                _write(folder, plan, tokenizer, documents, summary)
        except OSError as error:
            raise RunError(f"cannot write {plan.out}: {error}") from None
    elif tokenizer is not None:
        summary["tokenizer"] = {"vocab_size": tokenizer.vocab_size, "sha256": tokenizer.digest}
    else:
        summary["tokenizer"] = {"vocab_size": plan.train_vocab_size, "sha256": None}
    return summary


def _check_plan(plan: Plan) -> None:
    """Refuse a plan that cannot work, before any text is read."""
    if (plan.tokenizer is None) == (plan.train_vocab_size is None):
        raise UserError("give either a tokenizer to use or the vocabulary size of one to train")
    if plan.train_vocab_size is not None and plan.train_vocab_size <= NUM_RESERVED:
        size = plan.train_vocab_size
        raise UserError(f"vocabulary size {size} must be above {NUM_RESERVED} (special tokens and bytes)")
    if not 0 <= plan.validation_fraction < 1:
        raise UserError(f"validation_fraction {plan.validation_fraction} must be in [0, 1)")
    if plan.out.exists() and not plan.out.is_dir():
        raise UserError(f"out {plan.out} is a file; name a folder")
    present = set(os.listdir(plan.out)) if plan.out.is_dir() else set()
    if present and not plan.overwrite:
        raise UserError(f"out {plan.out} is not empty; name another folder or replace its data with --overwrite")
    foreign = sorted(present - _file_names())
    if foreign:
        raise UserError(f"out {plan.out} holds {foreign[0]}, which is not prepared data; name another folder")


def _file_names() -> set[str]:
    return {TOKENIZER_FILE} | {f"{name}.{suffix}" for name in SPLITS for suffix in ("bin", "idx", "json")}


@contextlib.contextmanager
def _replaced_directory(plan: Plan) -> Iterator[Path]:
    """A temporary folder that takes the place of `plan.out` on success, after `plan.out` is checked again."""
    with atomic_directory(plan.out) as folder:
        yield folder
        _check_plan(plan)
        if plan.out.is_dir():
            shutil.rmtree(plan.out)


def _count(documents: _Corpus, validation_fraction: float) -> dict[str, dict[str, Any]]:
    """Documents and UTF-8 bytes of each split that will be written."""
    names = SPLITS if validation_fraction > 0 else SPLITS[:1]
    splits: dict[str, dict[str, Any]] = {name: {"documents": 0, "bytes": 0} for name in names}
    for name, text in documents.labelled("reading"):
        splits[name]["documents"] += 1
        splits[name]["bytes"] += len(text.encode())
    for name, counts in splits.items():
        if counts["documents"] == 0:
            raise UserError(
                f"no document falls into the {name} split with validation_fraction {validation_fraction}; "
                "give more documents (JSONL has one on each line) or change the fraction"
            )
    return splits


def _write(folder: Path, plan: Plan, tokenizer: Tokenizer | None, documents: _Corpus, summary: dict[str, Any]) -> None:
    """Fill `folder`, and `summary` with what went into it."""
    if tokenizer is None:
        assert plan.train_vocab_size is not None
        text = documents.split("train", "training the tokenizer")
        tokenizer = train_sentencepiece(text, plan.train_vocab_size, folder / TOKENIZER_FILE)
    else:
        tokenizer.save(folder / TOKENIZER_FILE)
    summary["tokenizer"] = {"vocab_size": tokenizer.vocab_size, "sha256": tokenizer.digest}
    for name, counts in summary["splits"].items():
        manifest = write_indexed(
            folder / name,
            map(tokenizer.encode, documents.split(name, f"encoding {name}")),
            tokenizer.vocab_size,
            eod_id=tokenizer.eos_id,
            tokenizer_sha256=tokenizer.digest,
            source=documents.source,
        )
        entropy = unigram_entropy(IndexedTokens(folder / name, vocab_size=tokenizer.vocab_size))
        counts |= asdict(manifest) | {"unigram_entropy_nats": entropy}
