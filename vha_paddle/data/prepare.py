"""From text to a data folder: find the input, train or load the tokenizer, encode the parts, join them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vha_paddle import __version__
from vha_paddle.data.corpus import builtin_source
from vha_paddle.data.engines import Advance, Encoded, run_here, run_processes, run_ray
from vha_paddle.data.folder import Origin, Progress, check_splits, finished, tokenizer_figures, write_folder
from vha_paddle.data.indexed_writer import Piece
from vha_paddle.data.inputs import (
    BUILTIN_PART,
    InputFile,
    Part,
    default_part_bytes,
    find_inputs,
    make_parts,
    part_bytes,
    shard_of,
)
from vha_paddle.data.parts import (
    SKIPPED_FILE,
    TRAIN,
    Counts,
    Reading,
    Task,
    labelled_documents,
    part_folder,
)
from vha_paddle.data.sentencepiece_tokenizer import NUM_RESERVED, train_sentencepiece
from vha_paddle.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from vha_paddle.data.tokenizer_files import SENTENCEPIECE_FILE
from vha_paddle.data.workspace import Workspace, make_once
from vha_paddle.errors import UserError

TOKENIZER_SAMPLE_BYTES = 2 << 30
"""Input bytes that a tokenizer is trained on at most; of more, parts that lie evenly in it are taken."""

_NAMED_INPUTS = 8


@dataclass(frozen=True)
class Plan:
    """What to prepare.

    Attributes:
        out: folder to make.
        inputs: files, globs and folders; None for the built-in corpus.
        tokenizer: `tokenizer.model`, `tokenizer.json` or a directory with one, to use; None to train one.
        train_vocab_size: vocabulary of the tokenizer to train; None to use `tokenizer`.
        validation_fraction: share of the documents to hold out, in [0, 1); 0 writes no validation files.
        eod_token: text of the token that ends a document, where `tokenizer` is to have another than its files say.
        overwrite: whether `out` may hold data from an earlier run, which is then replaced.
        text_key: key of the text in JSONL, column of the text in Parquet.
        skip_bad: whether what is no document is counted, listed and left out; else the first ends the run.
        workers: processes that encode.
        ray: whether the tasks of a Ray cluster encode instead.
        shard, num_shards: which share of the input to prepare, from 1, and how many there are.
        part_bytes: input bytes that a worker encodes at a time; None to choose by the size of the input.
    """

    out: Path
    inputs: tuple[Path | str, ...] | None
    tokenizer: Path | None
    train_vocab_size: int | None
    validation_fraction: float
    overwrite: bool
    eod_token: str | None = None
    text_key: str = "text"
    skip_bad: bool = False
    workers: int = 1
    ray: bool = False
    shard: int = 1
    num_shards: int = 1
    part_bytes: int | None = None

    @property
    def reading(self) -> Reading:
        return Reading(self.text_key, self.validation_fraction, self.skip_bad)


@contextlib.contextmanager
def silent(activity: str, num_bytes: int) -> Iterator[Advance]:
    """Progress that is not shown."""
    yield lambda _: None


class Input:
    """The files of a plan, and the parts that this machine is to encode.

    Attributes:
        files: all of them.
        part_bytes: of a part, more or less.
        parts: those of the plan's shard.
        source: the input as the user named it.
    """

    def __init__(self, plan: Plan) -> None:
        self.files: list[InputFile] = [] if plan.inputs is None else find_inputs([str(name) for name in plan.inputs])
        self.part_bytes = plan.part_bytes or default_part_bytes(self.files)
        parts = [BUILTIN_PART] if plan.inputs is None else make_parts(self.files, self.part_bytes)
        self.parts: list[Part] = shard_of(parts, plan.shard, plan.num_shards)
        self.source = builtin_source() if plan.inputs is None else _named(plan.inputs)

    @property
    def bytes(self) -> int:
        return sum(part_bytes(part) for part in self.parts)


def _named(inputs: Sequence[Path | str]) -> str:
    """The input as one line: a shell may have made ten thousand names of one glob."""
    more = len(inputs) - _NAMED_INPUTS
    return ", ".join(map(str, inputs[:_NAMED_INPUTS])) + (f" and {more} more" if more > 0 else "")


def prepare(plan: Plan, progress: Progress = silent) -> dict[str, Any]:
    """Make the data folder of `plan`: the tokenizer's files, and `.bin`, `.idx`, `.json` for each split.

    The folder appears whole or not at all, and the same input gives the same bytes, with any number of workers and
    after any number of kills: a run that does not end leaves what it has done in a hidden folder beside `plan.out`, and
    the same call continues there. The tokenizer is trained on the training split only.

    Returns:
        A summary that JSON can hold.

    Raises:
        UserError: the plan or its input is wrong.
        RunError: the folder could not be written, or a worker was killed.
    """
    check_plan(plan)
    source = Input(plan)
    given = None if plan.tokenizer is None else load_tokenizer(plan.tokenizer, plan.eod_token)
    expected = asdict(_origin(plan, source)) | ({} if given is None else {"tokenizer": tokenizer_figures(given)})
    times = [(f"its input {file.path}", file.mtime_ns) for file in source.files]
    return make_once(
        plan.out,
        plan.overwrite,
        _job(plan, source, given),
        lambda: finished(plan.out, expected, times),
        lambda workspace: _prepare(plan, source, given, workspace, progress),
    )


def check_plan(plan: Plan) -> None:
    """Refuse a plan that cannot work, before any text is read.

    Raises:
        UserError: a value is out of range, or two exclude each other.
    """
    if (plan.tokenizer is None) == (plan.train_vocab_size is None):
        raise UserError("give either a tokenizer to use or the vocabulary size of one to train")
    if plan.eod_token is not None and plan.tokenizer is None:
        raise UserError(f"eod_token {plan.eod_token!r} has no effect on a tokenizer that is trained; drop it")
    if plan.train_vocab_size is not None and plan.train_vocab_size <= NUM_RESERVED:
        size = plan.train_vocab_size
        raise UserError(f"vocabulary size {size} must be above {NUM_RESERVED} (special tokens and bytes)")
    if not 0 <= plan.validation_fraction < 1:
        raise UserError(f"validation_fraction {plan.validation_fraction} must be in [0, 1)")
    if plan.workers < 1:
        raise UserError(f"workers {plan.workers} must be at least 1")
    if not 1 <= plan.shard <= plan.num_shards:
        raise UserError(f"shard {plan.shard}/{plan.num_shards}: K of K/N must be from 1 to N, and N at least 1")
    if plan.num_shards > 1 and plan.tokenizer is None:
        raise UserError(
            "shards must share one tokenizer, and each would train its own; "
            "train it once, on a few files, and give its tokenizer.model to every shard"
        )


def _job(plan: Plan, source: Input, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """All that decides what the parts hold. Not the number of workers, and not what happens to bad input: a part that
    is done had none, or its bad input was skipped."""
    return {
        "version": __version__,
        "tokenizer": plan.train_vocab_size if tokenizer is None else tokenizer_figures(tokenizer),
        "text_key": plan.text_key,
        "validation_fraction": plan.validation_fraction,
        "shard": [plan.shard, plan.num_shards],
        "part_bytes": source.part_bytes,
        "source": source.source,
        "inputs": [[file.path, file.bytes, file.mtime_ns] for file in source.files],
    }


def _origin(plan: Plan, source: Input) -> Origin:
    return Origin(
        version=__version__,
        source=source.source,
        inputs=[{"path": file.path, "bytes": file.bytes} for file in source.files],
        options={
            "text_key": plan.text_key,
            "validation_fraction": plan.validation_fraction,
            "train_tokenizer": plan.train_vocab_size,
            "on_error": "skip" if plan.skip_bad else "fail",
            "part_bytes": source.part_bytes,
        },
        shard=f"{plan.shard}/{plan.num_shards}",
    )


def _prepare(
    plan: Plan, source: Input, given: Tokenizer | None, workspace: Workspace, progress: Progress
) -> dict[str, Any]:
    """Fill `workspace.whole`; returns the content of its manifest."""
    tokenizer = given or _trained(plan, source, workspace.tokenizer, progress)
    save_tokenizer(tokenizer, workspace.tokenizer)
    tasks = [
        Task(str(workspace.parts), number, part, str(workspace.tokenizer), tokenizer.digest, plan.reading)
        for number, part in enumerate(source.parts)
    ]
    done = workspace.done(len(tasks))
    _check_policy(plan, done)
    with progress("encoding", source.bytes) as advance:
        advance(sum(part_bytes(source.parts[number]) for number in done))
        missing = [task for task in tasks if task.number not in done]
        with contextlib.closing(_engine(plan, missing, advance)) as encoded:
            for number, counts in encoded:
                done[number] = counts
    counts = Counts.none(plan.reading.splits)
    for number in range(len(tasks)):
        counts.add(done[number])
    if plan.num_shards == 1:
        try:
            check_splits(counts, plan.validation_fraction)
        except UserError:
            workspace.delete()  # no other plan can use it
            raise
    folders = [part_folder(workspace.parts, number) for number in range(len(tasks))]
    pieces = {
        name: [
            Piece(
                folders[number] / f"{name}.tokens",
                folders[number] / f"{name}.sizes",
                0,
                done[number].splits[name].documents,
            )
            for number in range(len(tasks))
        ]
        for name in counts.splits
    }
    skipped = [folder / SKIPPED_FILE for folder in folders]
    return write_folder(workspace.whole, tokenizer, pieces, skipped, counts, _origin(plan, source), progress)


def _check_policy(plan: Plan, done: dict[int, Counts]) -> None:
    if not plan.skip_bad and any(sum(counts.skipped.values()) for counts in done.values()):
        raise UserError(
            f"out {plan.out}: input was skipped before this run was continued with --on-error fail; "
            "continue with skip, or delete the working folder beside it to start anew"
        )


def _engine(plan: Plan, tasks: Sequence[Task], advance: Advance) -> Encoded:
    """The parts, encoded as the plan says."""
    if plan.ray:
        return run_ray(tasks, advance)
    if min(plan.workers, len(tasks)) > 1:
        return run_processes(tasks, plan.workers, advance)
    return run_here(tasks, advance)


def _trained(plan: Plan, source: Input, folder: Path, progress: Progress) -> Tokenizer:
    """The tokenizer that the plan asks for; one that was trained before the run was killed is as good."""
    assert plan.train_vocab_size is not None
    if (folder / SENTENCEPIECE_FILE).is_file():
        return load_tokenizer(folder)
    parts = source.parts[:: max(1, -(-source.bytes // TOKENIZER_SAMPLE_BYTES))]
    with progress("reading for the tokenizer", sum(map(part_bytes, parts))) as advance:
        counts = Counts.none(plan.reading.splits)
        texts = (
            document.text
            for part in parts
            for split, document in labelled_documents(part, plan.reading, counts, advance=advance)
            if split == TRAIN
        )
        return train_sentencepiece(texts, plan.train_vocab_size, folder / SENTENCEPIECE_FILE)
