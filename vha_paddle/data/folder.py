"""A data folder: the tokenizer's files, an indexed dataset for each split, and `manifest.json`, which says how it came.

`manifest.json` holds nothing that depends on when, by whom and in how many pieces the folder was made: the same input,
tokenizer and options give the same bytes. Input files stand in it by name and size; what they said is vouched for by
the digests of the `.bin` files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.indexed_writer import Piece, join_pieces
from vha_paddle.data.parts import SKIPPED_FILE, TRAIN, VALIDATION, Counts
from vha_paddle.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from vha_paddle.data.tokenizer_files import HF_FILE, TOKENIZER_FILES
from vha_paddle.errors import UserError

MANIFEST_FILE = "manifest.json"

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Opened with a label and a number of bytes; gives a function that is told how many bytes more are done."""


@dataclass(frozen=True)
class Origin:
    """What `manifest.json` says of the input and of how it was read.

    Attributes:
        version: of this project.
        source: the input as the user named it, or the built-in corpus.
        inputs: name and bytes of each file.
        options: those that decide what becomes of the input.
        shard: which share of the input, as `k/n`.
    """

    version: str
    source: str
    inputs: list[dict[str, Any]]
    options: dict[str, Any]
    shard: str


def file_names() -> set[str]:
    """Every name that a file of a data folder can have."""
    indexed = {f"{split}.{suffix}" for split in (TRAIN, VALIDATION) for suffix in ("bin", "idx", "json")}
    return indexed | set(TOKENIZER_FILES) | {MANIFEST_FILE, SKIPPED_FILE}


def check_name(out: Path) -> None:
    """Refuse an output folder that cannot take its name when it is whole.

    Raises:
        UserError: it is `.`, `..` or `/`.
    """
    if out.name in ("", ".."):
        raise UserError(f"out {out} is no name of a folder to make; give one, such as data/web")


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that holds anything that must not be replaced.

    Raises:
        UserError: it has no name, it is a file, or it holds data and `overwrite` is false, or something else.
    """
    check_name(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out {out} is a file; name a folder")
    present = set(os.listdir(out)) if out.is_dir() else set()
    if present and not overwrite:
        raise UserError(f"out {out} is not empty; name another folder or replace its data with --overwrite")
    foreign = sorted(present - file_names())
    if foreign:
        raise UserError(f"out {out} holds {foreign[0]}, which is not prepared data; name another folder")


def finished(out: Path, expected: dict[str, Any], sources: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
    """What `manifest.json` says, if `out` holds the data already that were going to be made.

    Args:
        expected: what of a manifest is known beforehand.
        sources: name and time of change, in nanoseconds, of what the data are made from.

    Returns:
        The manifest, or None where there is none.

    Raises:
        UserError: `out` holds other data, or they are damaged.
    """
    path = out / MANIFEST_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        found, changed = _flat(content), os.stat(path).st_mtime_ns
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    wanted = _flat(expected)
    remedy = "name another folder or replace its data with --overwrite"
    other = difference({key: found.get(key) for key in wanted}, wanted)
    if other is None:
        other = next((f"{name} was changed after they were made" for name, time in sources if time > changed), None)
    if other is not None:
        raise UserError(f"out {out} holds the data of another command: {other}; {remedy}")
    try:
        for name, split in content["splits"].items():
            if split["documents"]:
                IndexedTokens(out / name)
        whole = load_tokenizer(out).digest == content["tokenizer"]["sha256"]
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"out {out} holds these data, and is damaged ({error}); {remedy}") from None
    if not whole:
        raise UserError(f"out {out} holds these data, and another tokenizer; {remedy}")
    return content


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    inputs = [[file["path"], file["bytes"]] for file in content["inputs"]]
    return {**content, **content["options"], "options": None, "inputs": inputs}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first thing in which two descriptions of a job differ, or None. Each of their inputs begins with its name."""
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if key == "inputs" and isinstance(old, list) and isinstance(new, list):
            for one, other in zip(old, new, strict=False):
                if one != other:
                    return f"its input {one[0]} has another name, size or time of change than {other[0]} now"
            return f"it has {len(old)} input files, this command {len(new)}"
        return f"its {key} is {json.dumps(old)}, that of this command {json.dumps(new)}"
    return None


def check_splits(counts: Counts, validation_fraction: float) -> None:
    """Refuse data of which a split is empty.

    Raises:
        UserError: so it is.
    """
    if not any(split.documents for split in counts.splits.values()):
        blank = f" but {counts.blank:,} of white space" if counts.blank else ""
        lost = sum(counts.skipped.values())
        skipped = f", and {lost:,} lines, rows or files were skipped" if lost else ""
        raise UserError(f"the input holds no document{blank}{skipped}; give text")
    for name, split in counts.splits.items():
        if split.documents == 0:
            raise UserError(
                f"no document falls into the {name} split with validation_fraction {validation_fraction}; "
                "give more documents (JSONL has one on each line) or change the fraction"
            )


def tokenizer_figures(tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the ids of a text, and what a reader of the data needs."""
    library = "tokenizers" if HF_FILE in tokenizer.files else "sentencepiece"
    return {
        "vocab_size": tokenizer.vocab_size,
        "sha256": tokenizer.digest,
        "eod_token": tokenizer.eos_token,
        "library": f"{library} {importlib.metadata.version(library)}",
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(tokenizer.files.items())},
    }


def write_folder(
    folder: Path,
    tokenizer: Tokenizer,
    pieces: Mapping[str, Sequence[Piece]],
    skipped: Sequence[Path],
    counts: Counts,
    origin: Origin,
    progress: Progress,
) -> dict[str, Any]:
    """Fill `folder`; a split without documents gets no files.

    Args:
        pieces: of each split, in the order of the input.
        skipped: files of what gave no document, in that order; they may be missing.

    Returns:
        The content of `manifest.json`.

    Raises:
        RunError: a piece is not what it should be.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_tokenizer(tokenizer, folder)
    splits: dict[str, dict[str, Any]] = {name: asdict(split) for name, split in counts.splits.items()}
    num_bytes = sum(piece.tokens.stat().st_size for some in pieces.values() for piece in some)
    with progress("joining", num_bytes) as advance:
        for name, some in pieces.items():
            if splits[name]["documents"] == 0:
                continue
            id_counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
            manifest = join_pieces(
                folder / name,
                some,
                tokenizer.vocab_size,
                eod_id=tokenizer.eos_id,
                tokenizer_sha256=tokenizer.digest,
                source=origin.source,
                id_counts=id_counts,
                advance=advance,
            )
            figures = {key: value for key, value in asdict(manifest).items() if key != "source"}
            splits[name] |= figures | {"unigram_entropy_nats": _entropy(id_counts)}
    if sum(counts.skipped.values()):
        with open(folder / SKIPPED_FILE, "wb") as target:
            for path in skipped:
                if path.is_file():
                    target.write(path.read_bytes())
    content = asdict(origin) | {
        "tokenizer": tokenizer_figures(tokenizer),
        "splits": splits,
        "blank": counts.blank,
        "skipped": counts.skipped,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    return content


def _entropy(id_counts: np.ndarray) -> float:
    """Entropy of token frequencies, in nats per token: the loss of a model that knows nothing but them."""
    shares = id_counts[id_counts > 0] / id_counts.sum()
    return float(-(shares * np.log(shares)).sum())
