"""A dry run: what a plan would give, projected from the first documents of several places in its input."""

from __future__ import annotations

import time
from typing import Any

from vha_paddle.data.folder import check_out, check_splits, tokenizer_figures
from vha_paddle.data.indexed_format import token_type
from vha_paddle.data.inputs import Part, part_bytes
from vha_paddle.data.parts import Counts, SplitCount, batches, encoded, labelled_documents
from vha_paddle.data.prepare import Input, Plan, check_plan
from vha_paddle.data.tokenizer import Tokenizer, load_tokenizer

SAMPLED_PLACES = 8
SAMPLED_BYTES = 1 << 20  # of text, at each place

_IDX_BYTES = 20  # of .idx for each document


def estimate(plan: Plan) -> dict[str, Any]:
    """Check everything that can be checked without reading all, and project the rest. Writes nothing.

    Returns:
        A summary that JSON can hold, like that of `prepare`; `estimate` in it says how it was found. If the sample is
        all of the input, the numbers are exact.

    Raises:
        UserError: the plan or its input is wrong.
    """
    check_plan(plan)
    check_out(plan.out, plan.overwrite)
    source = Input(plan)
    tokenizer = None if plan.tokenizer is None else load_tokenizer(plan.tokenizer, plan.eod_token)
    places = min(SAMPLED_PLACES, len(source.parts))
    sampled = [source.parts[len(source.parts) * place // places] for place in range(places)]

    counts = Counts.none(plan.reading.splits)
    exact = len(sampled) == len(source.parts)
    unseen = 1.0 if exact else source.bytes / max(sum(map(part_bytes, sampled)), 1)
    read_bytes, seconds = 0, 0.0
    for part in sampled:
        start = time.perf_counter()
        here = Counts.none(plan.reading.splits)
        read, ended = _sample(part, plan, tokenizer, here)
        # Each place stands for its own part, of which more bytes may have been read for as much text.
        scale = unseen * (1.0 if ended else part_bytes(part) / max(read, 1))
        counts.add(_scaled(here, scale))
        seconds += (time.perf_counter() - start) * scale
        read_bytes += read
        exact = exact and ended

    if exact and plan.num_shards == 1:
        check_splits(counts, plan.validation_fraction)
    found = {
        "exact": exact,
        "input_files": len(source.files),
        "input_bytes": source.bytes,
        "parts": len(source.parts),
        "sampled_bytes": read_bytes,
        "seconds": seconds / min(plan.workers, max(len(source.parts), 1)),
        "workers": plan.workers,
    }
    if tokenizer is None:
        figures: dict[str, Any] = {"vocab_size": plan.train_vocab_size, "sha256": None, "eod_token": None}
    else:
        figures = tokenizer_figures(tokenizer)
        width = token_type(tokenizer.vocab_size).itemsize
        found["output_bytes"] = sum(
            width * split.tokens + _IDX_BYTES * split.documents for split in counts.splits.values()
        )
    return {
        "out": str(plan.out),
        "dry_run": True,
        "source": source.source,
        "tokenizer": figures,
        "splits": {name: _as_json(split, tokenizer) for name, split in counts.splits.items()},
        "blank": counts.blank,
        "skipped": counts.skipped,
        "estimate": found,
    }


def _sample(part: Part, plan: Plan, tokenizer: Tokenizer | None, counts: Counts) -> tuple[int, bool]:
    """Count the first documents of a part; returns the input bytes they took, and whether the part ended.

    The built-in corpus, which has no bytes to be measured by, is read to its end.
    """
    read = text_bytes = 0

    def advance(count: int) -> None:
        nonlocal read
        read += count

    for batch in batches(labelled_documents(part, plan.reading, counts, advance=advance)):
        for name, documents in batch.items():
            text_bytes += sum(len(document.utf8) for document in documents)
            split = counts.splits[name]
            if tokenizer is not None:
                kept = encoded(documents, tokenizer, counts)
                split.tokens += sum(len(ids) + 1 for _, ids in kept)
                documents = [document for document, _ in kept]
            split.documents += len(documents)
            split.bytes += sum(len(document.utf8) for document in documents)
        if text_bytes >= SAMPLED_BYTES and part_bytes(part):
            return read, False
    return read, True


def _scaled(counts: Counts, scale: float) -> Counts:
    splits = {
        name: SplitCount(round(split.documents * scale), round(split.bytes * scale), round(split.tokens * scale))
        for name, split in counts.splits.items()
    }
    skipped = {kind: round(number * scale) for kind, number in counts.skipped.items()}
    return Counts(splits, round(counts.blank * scale), skipped)


def _as_json(split: SplitCount, tokenizer: Tokenizer | None) -> dict[str, int]:
    counts = {"documents": split.documents, "bytes": split.bytes}
    return counts if tokenizer is None else counts | {"tokens": split.tokens}
