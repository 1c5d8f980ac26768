#!/usr/bin/env python
"""Turn text of any amount into a data folder for training: tokenizer, training tokens, validation tokens."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vha_paddle.data.estimate import estimate
from vha_paddle.data.merge import merge
from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.errors import run_tool

EXAMPLES = """
examples:
  # 2 MB of English that ships with Python, and a tokenizer of 2,048 pieces made from it, for recipes/quickstart.yaml
  python tools/prepare_data.py --builtin --train-tokenizer 2048 --out data/quickstart

  # your own text, same tokenizer: a .txt file is one document, a .jsonl file one on each line, under "text"
  python tools/prepare_data.py books/ web.jsonl --tokenizer data/quickstart --out data/mine

  # FineWeb-Edu's Parquet files, and the tokenizer of a Hugging Face model
  python tools/prepare_data.py 'fineweb-edu/*.parquet' --tokenizer models/Qwen3-0.6B-Base --out data/edu

  # the same from a chat model, whose eos_token ends a turn and not a document
  python tools/prepare_data.py web.jsonl.zst --tokenizer models/Qwen3-0.6B --eod-token '<|endoftext|>' --out data/qwen

  # first: how many tokens, bytes and hours? Reads a few MB, writes nothing
  python tools/prepare_data.py 'fineweb-edu/*.parquet' --tokenizer models/Qwen3-0.6B-Base --out data/edu --dry-run

  # a crawl with broken lines: leave them out, count them, list them in data/crawl/skipped.jsonl
  python tools/prepare_data.py crawl/ --tokenizer models/Qwen3-0.6B-Base --on-error skip --out data/crawl

  # eight machines, one share each (here the third), then one folder of the eight
  python tools/prepare_data.py /shared/web --tokenizer /shared/qwen --shard 3/8 --out /shared/web-3
  python tools/prepare_data.py --merge /shared/web-* --out /shared/web-tokens

  # the number of training tokens, for a script; what is done already is not done again
  python tools/prepare_data.py --builtin --train-tokenizer 2048 --out data/quickstart --json | jq .splits.train.tokens

input: .jsonl, .jsonl.gz, .jsonl.zst (a document on each line), .parquet (one in each row), .txt, .txt.gz, .txt.zst (one
  document). Documents of white space alone are left out; one of more than 64 MiB is an error.
output: DIR holds the tokenizer (tokenizer.model, or tokenizer.json and the files beside it), train.{bin,idx,json} and
  validation.{bin,idx,json}, and manifest.json. .bin and .idx are an indexed dataset that Megatron-LM and PaddleNLP read
  too. The same input gives the same bytes, with any number of workers or shards. In a recipe, data.tokenizer is DIR, or
  the tokenizer's file in it.
end of documents: each ends with the tokenizer's eos_token (tokenizer_config.json), which is printed; with --eod-token
  another one becomes the eos_token of DIR's copy. Text that spells a special token is encoded as text.
interruption: DIR appears whole or not at all. What is done is kept in .DIR.work beside it; the same command continues
  there, and does nothing once DIR is complete. It needs as much space as DIR.
more: docs/data.md
exit status: 0 done, 1 could not write or a worker was killed, 2 wrong input
"""

LINE_SECONDS = 60.0  # between two lines of progress, where stderr is a file
SCREEN_SECONDS = 0.2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="*", metavar="PATH", help="file, folder or glob; see below for the kinds")
    either = parser.add_mutually_exclusive_group(required=True)
    given = "a SentencePiece tokenizer.model, or the tokenizer.json or directory of a Hugging Face tokenizer"
    either.add_argument("--tokenizer", type=Path, metavar="PATH", help=given)
    training = "train a model on the training split: BPE with byte fallback"
    either.add_argument("--train-tokenizer", type=int, metavar="VOCAB_SIZE", help=training)
    merging = "join the folders of all shards, in the order of their numbers; of the other options only --out, \
--overwrite and --json apply"
    either.add_argument("--merge", type=Path, nargs="+", metavar="SHARD", help=merging)

    add = parser.add_argument_group("what to prepare").add_argument
    add("--builtin", action="store_true", help="use the documentation inside this Python instead of PATHs")
    key = "key of the text in JSONL, column of the text in Parquet (default: %(default)s)"
    add("--text-key", default="text", metavar="KEY", help=key)
    add("--eod-token", metavar="TEXT", help="token that ends a document, where it is not the tokenizer's eos_token")
    fraction = "share of documents to hold out, by a hash of their text; 0 for none (default: %(default)s)"
    add("--validation-fraction", type=float, default=0.05, metavar="F", help=fraction)
    policy = "what a broken line, row or file does: end the run, or be counted and listed (default: %(default)s)"
    add("--on-error", choices=("fail", "skip"), default="fail", help=policy)

    add = parser.add_argument_group("where it goes").add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    add("--overwrite", action="store_true", help="replace the data that DIR holds")
    add("--dry-run", action="store_true", help="read a sample, estimate the rest, write nothing")
    add("--json", action="store_true", help="print the summary as JSON")

    add = parser.add_argument_group("who does it").add_argument
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=int, default=cores, metavar="N", help=f"processes (default: the cores here, {cores})")
    add("--shard", default="1/1", metavar="K/N", help="prepare share K of N, counted from 1, for --merge")
    ray = "encode in tasks of a Ray cluster whose nodes share these files, where the package ray is installed"
    add("--ray", action="store_true", help=ray)
    arguments = parser.parse_args()
    check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse options that have no effect together."""
    if arguments.merge is not None:
        kept = ("merge", "out", "overwrite", "json")
        for name, value in vars(arguments).items():
            if name not in kept and value != parser.get_default(name) and value != []:
                parser.error(f"--merge joins what is prepared; {name.replace('_', '-')} has no effect there, drop it")
    elif arguments.builtin == bool(arguments.inputs):
        parser.error("give either PATHs or --builtin")
    if not re.fullmatch(r"\d+/\d+", arguments.shard):
        parser.error(f"--shard {arguments.shard} must be K/N, as in 3/8")


@contextlib.contextmanager
def progress(activity: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Bytes done, rate and time left, on stderr: one line that is rewritten, or in a file a line each minute."""
    from tqdm import tqdm

    on_screen = sys.stderr.isatty()
    start = time.monotonic()
    done = shown_at = 0.0

    def advance(count: int) -> None:
        nonlocal done, shown_at
        done += count
        elapsed = time.monotonic() - start
        if elapsed - shown_at >= (SCREEN_SECONDS if on_screen else LINE_SECONDS):
            shown_at = elapsed
            line = tqdm.format_meter(done, num_bytes, elapsed, ncols=100, prefix=activity, unit="B", unit_scale=True)
            print(f"\r{line}" if on_screen else line, end="" if on_screen else "\n", file=sys.stderr, flush=True)

    yield advance
    if on_screen and shown_at:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def describe(summary: dict[str, Any]) -> str:
    """The summary for a reader."""
    tokenizer, projected = summary["tokenizer"], summary.get("estimate")
    about = "about " if projected and not projected["exact"] else ""
    ending = f", a document ends with {tokenizer['eod_token']}" if tokenizer["eod_token"] is not None else ""
    lines = [f"source      {summary['source']}", f"tokenizer   {tokenizer['vocab_size']:,} ids{ending}"]
    for name, split in summary["splits"].items():
        line = f"{name:<11} {about}{split['documents']:,} documents, {split['bytes']:,} bytes"
        if "tokens" in split:
            line += f", {split['tokens']:,} tokens"
        if "unigram_entropy_nats" in split:
            line += f", unigram entropy {split['unigram_entropy_nats']:.3f} nats"
        lines.append(line)
    if not any(split["documents"] for split in summary["splits"].values()):
        lines.append("empty       no document fell to this share; --merge takes it all the same")
    skipped = summary["skipped"].items()
    lost = [f"{number:,} {kind.replace('_', ' ')}{'s' * (number > 1)}" for kind, number in skipped if number]
    if lost:
        lines.append(f"skipped     {about}{', '.join(lost)}" + ("" if projected else ", listed in skipped.jsonl"))
    if projected:
        files = (
            f"{projected['input_files']:,} files, {projected['input_bytes']:,} bytes in {projected['parts']:,} parts"
        )
        lines.append(f"input       {files}; {projected['sampled_bytes']:,} bytes were read for this")
        took = f"{projected['seconds']:,.0f} s of reading and encoding with {projected['workers']} workers"
        space = f", {projected['output_bytes']:,} bytes, twice while it works" if "output_bytes" in projected else ""
        lines.append(f"would take  about {took}{space}")
    if summary["dry_run"]:
        lines.append(f"would write {summary['out']}")
    elif summary["already_complete"]:
        lines.append(f"{summary['out']} was complete before, and is left as it is; --overwrite would make it anew")
    else:
        lines.append(f"wrote {summary['out']}")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a worker is a process; its library starts no threads
    if arguments.merge is not None:
        summary = merge(arguments.out, arguments.merge, arguments.overwrite, progress)
    else:
        shard, num_shards = map(int, arguments.shard.split("/"))
        plan = Plan(
            out=arguments.out,
            inputs=None if arguments.builtin else tuple(arguments.inputs),
            tokenizer=arguments.tokenizer,
            train_vocab_size=arguments.train_tokenizer,
            validation_fraction=arguments.validation_fraction,
            overwrite=arguments.overwrite,
            eod_token=arguments.eod_token,
            text_key=arguments.text_key,
            skip_bad=arguments.on_error == "skip",
            workers=arguments.workers,
            ray=arguments.ray,
            shard=shard,
            num_shards=num_shards,
        )
        summary = estimate(plan) if arguments.dry_run else prepare(plan, progress)
    text = json.dumps(summary, indent=2) if arguments.json else describe(summary)
    print(text.encode(errors="backslashreplace").decode())  # the name of a file may be no UTF-8


if __name__ == "__main__":
    run_tool(main)
