"""Joining the shards that several machines prepared into the folder that one machine would have made, byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vha_paddle.data.folder import MANIFEST_FILE, Origin, Progress, check_splits, finished, write_folder
from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.indexed_format import HEADER, suffixed
from vha_paddle.data.indexed_writer import Piece
from vha_paddle.data.parts import BAD_KINDS, SKIPPED_FILE, TRAIN, VALIDATION, Counts, SplitCount
from vha_paddle.data.prepare import silent
from vha_paddle.data.tokenizer import load_tokenizer
from vha_paddle.data.workspace import make_once
from vha_paddle.errors import RunError, UserError


@dataclass(frozen=True)
class _Shard:
    """One prepared shard: its folder, its manifest, and which of how many it is."""

    folder: Path
    manifest: dict[str, Any]
    number: int
    num_shards: int


def merge(out: Path, folders: Sequence[Path], overwrite: bool, progress: Progress = silent) -> dict[str, Any]:
    """Join prepared shards, in the order of their numbers, whatever that of `folders`.

    Shards are consecutive shares of the input, so the result has the bytes of a run without shards.

    Returns:
        A summary like that of `prepare`.

    Raises:
        UserError: a folder is no shard, one is missing or there twice, or they were not made alike.
        RunError: a file is damaged, or the folder could not be written.
    """
    if os.path.realpath(out) in map(os.path.realpath, folders):
        raise UserError(f"out {out} is one of the shards that are merged; name another folder")
    shards = sorted((_read(folder) for folder in folders), key=lambda shard: shard.number)
    _check(shards)
    job = {"version": shards[0].manifest["version"], "merge": [[str(s.folder), s.manifest] for s in shards]}
    expected = asdict(_origin(shards[0])) | {"tokenizer": shards[0].manifest["tokenizer"]}
    times = [(f"shard {s.folder}", os.stat(s.folder / MANIFEST_FILE).st_mtime_ns) for s in shards]
    return make_once(
        out,
        overwrite,
        job,
        lambda: finished(out, expected, times),
        lambda workspace: _merge(shards, workspace.whole, progress),
    )


def _read(folder: Path) -> _Shard:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text("utf-8"))
        shard = _Shard(folder, manifest, *map(int, manifest["shard"].split("/")))
        if not _is_sound(manifest):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is not the manifest of a prepared folder; name folders made with --shard") from None
    return shard


def _is_sound(manifest: dict[str, Any]) -> bool:
    """Whether what is used of a manifest is of its kind; the names of splits become those of files."""
    counts = _counts(manifest)
    numbers = [number for split in counts.splits.values() for number in asdict(split).values()]
    numbers += [counts.blank, *counts.skipped.values()]
    strings = [manifest[key] for key in ("version", "source")] + [manifest["tokenizer"]["sha256"]]
    strings += [manifest["splits"][name]["bin_sha256"] for name, split in counts.splits.items() if split.documents]
    return (
        set(counts.splits) <= {TRAIN, VALIDATION}
        and set(counts.skipped) == set(BAD_KINDS)
        and all(type(number) is int and number >= 0 for number in numbers)
        and all(isinstance(string, str) for string in strings)
        and all(isinstance(file["path"], str) and type(file["bytes"]) is int for file in manifest["inputs"])
        and type(manifest["options"]["validation_fraction"]) is float
    )


def _counts(manifest: dict[str, Any]) -> Counts:
    names = [field.name for field in fields(SplitCount)]
    splits = {split: SplitCount(**{name: found[name] for name in names}) for split, found in manifest["splits"].items()}
    return Counts(splits, manifest["blank"], dict(manifest["skipped"]))


def _check(shards: Sequence[_Shard]) -> None:
    first = shards[0]
    for shard in shards[1:]:
        for key, mine in _must_agree(first).items():
            other = _must_agree(shard)[key]
            if mine != other:
                spelled = "" if key == "inputs" else f" ({json.dumps(mine)} and {json.dumps(other)})"
                raise UserError(
                    f"{first.folder} and {shard.folder} differ in {key}{spelled}; merge shards of one command"
                )
    numbers = [shard.number for shard in shards]
    for number in range(1, first.num_shards + 1):
        if numbers.count(number) != 1:
            found = "is missing" if number not in numbers else "is there more than once"
            raise UserError(f"shard {number}/{first.num_shards} {found}; give every shard once")


def _must_agree(shard: _Shard) -> dict[str, Any]:
    agreed = ("version", "source", "options", "tokenizer", "inputs")
    return {"number of shards": shard.num_shards} | {key: shard.manifest.get(key) for key in agreed}


def _merge(shards: Sequence[_Shard], whole: Path, progress: Progress) -> dict[str, Any]:
    manifest = shards[0].manifest
    counts = Counts.none(tuple(manifest["splits"]))
    for shard in shards:
        counts.add(_counts(shard.manifest))
    check_splits(counts, manifest["options"]["validation_fraction"])
    tokenizer = load_tokenizer(shards[0].folder)
    if tokenizer.digest != manifest["tokenizer"]["sha256"]:
        raise RunError(f"{shards[0].folder}: the tokenizer is not the one of {MANIFEST_FILE}; make the shard again")
    pieces = {name: [_piece(shard, name) for shard in shards if _documents(shard, name)] for name in counts.splits}
    skipped = [shard.folder / SKIPPED_FILE for shard in shards]
    return write_folder(whole, tokenizer, pieces, skipped, counts, _origin(shards[0]), progress)


def _origin(shard: _Shard) -> Origin:
    """What the manifest of the whole says of where it came from."""
    return Origin(**{key: shard.manifest[key] for key in ("version", "source", "inputs", "options")}, shard="1/1")


def _documents(shard: _Shard, split: str) -> int:
    count: int = shard.manifest["splits"][split]["documents"]
    return count


def _piece(shard: _Shard, split: str) -> Piece:
    prefix = shard.folder / split
    IndexedTokens(prefix)  # checks what the digest does not cover
    digest = shard.manifest["splits"][split]["bin_sha256"]
    return Piece(suffixed(prefix, ".bin"), suffixed(prefix, ".idx"), HEADER.size, _documents(shard, split), digest)
