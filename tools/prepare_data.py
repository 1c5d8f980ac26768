#!/usr/bin/env python
"""Turn text into a data folder for training: tokenizer, training tokens, validation tokens."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.errors import run_tool

EXAMPLES = """
examples:
  # 2 MB of English that ships with Python, and a tokenizer of 4,096 pieces made from it: no download
  python tools/prepare_data.py --builtin --train-tokenizer 4096 --out data/builtin

  # your own text, same tokenizer: a .txt file is one document, a .jsonl file one on each line, under "text"
  python tools/prepare_data.py books/ web.jsonl --tokenizer data/builtin/tokenizer.model --out data/mine

  # check input and split first, write nothing
  python tools/prepare_data.py web.jsonl --train-tokenizer 32000 --out data/web --dry-run

  # the number of training tokens, for a script
  python tools/prepare_data.py --builtin --train-tokenizer 4096 --out data/b --json | jq .splits.train.tokens

DIR then holds tokenizer.model, train.{bin,idx,json} and validation.{bin,idx,json}; .bin and .idx are an
indexed dataset that Megatron-LM and PaddleNLP read too. The same input gives the same bytes.
exit status: 0 done, 1 could not write, 2 wrong input
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="PATH", help=".txt or .jsonl file, or a folder of them")
    add("--builtin", action="store_true", help="use the documentation inside this Python instead of PATHs")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--tokenizer", type=Path, metavar="MODEL", help="SentencePiece model to use")
    training = "train a model on the training split: BPE with byte fallback"
    either.add_argument("--train-tokenizer", type=int, metavar="VOCAB_SIZE", help=training)
    add("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    fraction = "share of documents to hold out, by a hash of their text; 0 for none (default: %(default)s)"
    add("--validation-fraction", type=float, default=0.05, metavar="F", help=fraction)
    add("--overwrite", action="store_true", help="replace the data that DIR holds")
    add("--dry-run", action="store_true", help="check everything, write nothing")
    add("--json", action="store_true", help="print the summary as JSON")
    arguments = parser.parse_args()
    if arguments.builtin == bool(arguments.inputs):
        parser.error("give either PATHs or --builtin")
    return arguments


def progress_bar(documents: Iterable[str], activity: str) -> Iterable[str]:
    """A bar on stderr, if that is a terminal."""
    from tqdm import tqdm

    return tqdm(documents, desc=activity, unit=" documents", file=sys.stderr, disable=None, leave=False)


def describe(summary: dict[str, Any]) -> str:
    """The summary for a reader."""
    tokenizer = summary["tokenizer"]
    lines = [f"source      {summary['source']}", f"tokenizer   {tokenizer['vocab_size']:,} ids"]
    for name, split in summary["splits"].items():
        line = f"{name:<11} {split['documents']:,} documents, {split['bytes']:,} bytes"
        if "tokens" in split:
            line += f", {split['tokens']:,} tokens, unigram entropy {split['unigram_entropy_nats']:.3f} nats"
        lines.append(line)
    lines.append(f"{'would write' if summary['dry_run'] else 'wrote'} {summary['out']}")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    plan = Plan(
        out=arguments.out,
        inputs=None if arguments.builtin else tuple(arguments.inputs),
        tokenizer=arguments.tokenizer,
        train_vocab_size=arguments.train_tokenizer,
        validation_fraction=arguments.validation_fraction,
        overwrite=arguments.overwrite,
    )
    summary = prepare(plan, dry_run=arguments.dry_run, progress=progress_bar)
    print(json.dumps(summary, indent=2) if arguments.json else describe(summary))


if __name__ == "__main__":
    run_tool(main)
