#!/usr/bin/env python
"""Fold a VHA checkpoint into a plain directory that transformers, vLLM and llama.cpp load."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vha_paddle.errors import RunError, UserError, run_tool
from vha_paddle.export.config import EXPORT_DTYPES, ExportDtype
from vha_paddle.export.fold_export import Outcome, Verify, write_export
from vha_paddle.export.output import REPORT_FILE, check_output
from vha_paddle.export.plan import describe_plan
from vha_paddle.export.prepare import Export, Fold, open_for_export, prepare_export
from vha_paddle.export.writer import shard_bytes
from vha_paddle.host import end_on_sigterm, prepare_process
from vha_paddle.sources.base import Source
from vha_paddle.sources.digests import Digests

EXAMPLES = """
SOURCE is a checkpoint of this package under any layout, or a run directory (the newest is taken); a checkpoint of the
upstream core or of the research fork (flex folders of .distcp files, .pdparams, safetensors), recognised by its tensors
and checked against its config.json; or a directory that --no-fold or --allow-partial wrote. Weights are taken from
float32 masters where there are some, folded in float64 and rounded once.

examples:
  # what would be done: the fate of every tensor, and the bytes
  python tools/fold_export.py runs/quickstart exported/quickstart --dry-run

  # fold, run both models, keep the result only if they agree
  python tools/fold_export.py runs/quickstart exported/quickstart --verify

  # the same for an export that is there already
  python tools/fold_export.py runs/quickstart exported/quickstart --verify-only

  # half the bytes for serving; a quarter, where sizes are multiples of 128 (those of the quickstart are not)
  python tools/fold_export.py runs/quickstart exported/quickstart-bf16 --dtype bfloat16
  python tools/fold_export.py runs/table1_0p6b_vha exported/0p6b-fp8 --dtype fp8

  # a checkpoint of the fork, whose folder has no configuration and does not say where QK-norm was
  python tools/fold_export.py output/checkpoint-9000 exported/fork --config config/qwen3/MODEL/config.json \\
      --norm-order premix-norm --tokenizer Qwen3-tokenizer/

  # a grouped-query or MLA baseline holds nothing to fold; it is exported as it is
  python tools/fold_export.py runs/gqa exported/gqa --plain

  # what no stock class computes, for analysis: as trained, or folded as far as it folds
  python tools/fold_export.py runs/gated exported/gated-unfolded --no-fold
  python tools/fold_export.py runs/gated exported/gated-partial --allow-partial

OUT appears complete or not at all, with a model card (README.md) and fold_report.json: what it was made of, digests of
all files read and written, the figures of --verify. A killed run leaves only a hidden .OUT.*.tmp, which the next one
removes. Memory stays below 1 GB and twice the largest tensor, whatever the model's size. See docs/export.md.
exit status: 0 done, 1 verification failed or could not write, 2 wrong input.
"""


DTYPE: ExportDtype = "float32"
SHARD_SIZE = "5GB"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="checkpoint or run directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
    given = parser.add_argument_group("what the checkpoint does not say")
    given.add_argument("--config", type=Path, metavar="PATH", help="its config.json, or that file's folder")
    given.add_argument(
        "--norm-order",
        choices=("premix-norm", "norm-premix"),
        help="whether QK-norm came after Premix (folds) or before it",
    )
    given.add_argument(
        "--gate-order",
        choices=("postmix-gate", "gate-postmix"),
        help="whether the output gate came after Postmix or before it (folds)",
    )
    given.add_argument("--tokenizer", type=Path, metavar="PATH", help="a tokenizer's file or folder; default: SOURCE's")
    written = parser.add_argument_group("what is written")
    written.add_argument("--dtype", choices=EXPORT_DTYPES, help=f"of the weights; default: {DTYPE}")
    written.add_argument("--max-shard-size", metavar="SIZE", help=f"of a file, such as 500MB; default: {SHARD_SIZE}")
    fold = written.add_mutually_exclusive_group()
    for flag, text in {
        "--plain": "export a model without Premix and Postmix as it is",
        "--no-fold": "write the unfolded model, under our own class",
        "--allow-partial": "fold what folds and leave the rest, under our own class",
    }.items():
        fold.add_argument(flag, action="store_true", help=text)
    written.add_argument("--overwrite", action="store_true", help="replace an earlier export at OUT, at the very end")
    proof = parser.add_argument_group("proof")
    proof.add_argument("--verify", action="store_true", help="run both models and keep OUT only if they agree")
    proof.add_argument(
        "--verify-only", action="store_true", help="run SOURCE and the export that is at OUT; write nothing"
    )
    proof.add_argument("--text", type=Path, metavar="FILE", help="to compare on; default: random ids and built-in text")
    proof.add_argument("--verify-tokens", type=int, metavar="N", help="positions to compare; default: 256")
    for flag, text in {
        "--dry-run": "check everything, list the fate of every tensor, write nothing",
        "--json": "print the report (or the list) as JSON",
        "--quiet": "no progress and no notes",
    }.items():
        parser.add_argument(flag, action="store_true", help=text)
    return parser.parse_args()


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse a flag that would have no effect."""
    if not arguments.verify and not arguments.verify_only:
        for flag, value in {"--text": arguments.text, "--verify-tokens": arguments.verify_tokens}.items():
            if value is not None:
                raise UserError(f"{flag} {value}: has no effect without --verify; add it or drop {flag}")
    if arguments.verify and arguments.dry_run:
        raise UserError("--verify: there is nothing to run with --dry-run; drop one of them")
    if arguments.quiet and arguments.dry_run:
        raise UserError("--quiet: a --dry-run is there to be read; drop one of them")
    if arguments.verify_only:
        for flag in _WRITING:
            if getattr(arguments, flag):
                raise UserError(f"--{flag.replace('_', '-')}: has no effect with --verify-only; drop one of them")


_WRITING = ("dtype", "max_shard_size", "verify", "dry_run", "overwrite", "plain", "no_fold", "allow_partial")
"""Flags about what is written."""


def bar_of(what: str, unit: str, quiet: bool) -> tuple[Any, Callable[[int, int], None]]:
    """A progress bar with the time that is left, and what to tell it."""
    bar = tqdm(desc=what, unit=unit, unit_scale=unit == "B", disable=quiet or None, leave=False, file=sys.stderr)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return bar, progress


def verification(arguments: argparse.Namespace) -> Verify:
    """Only this needs Paddle."""

    def verify(source: Source, exported: Path) -> Outcome:
        prepare_process()
        from vha_paddle.proof.prove import prove_export
        from vha_paddle.proof.tokens import NUM_TOKENS

        end_on_sigterm()  # again: Paddle has been imported
        bar, progress = bar_of("verifying", " layers", arguments.quiet)
        with bar:
            num_tokens = NUM_TOKENS if arguments.verify_tokens is None else arguments.verify_tokens
            return prove_export(source, exported, text=arguments.text, num_tokens=num_tokens, progress=progress)

    return verify


def verify_only(source: Source, arguments: argparse.Namespace) -> None:
    """Compare an export that is there with the checkpoint it was made from."""
    source = replace(source, tokenizer=arguments.tokenizer or source.tokenizer)
    with Digests(source) as digests:
        outcome = verification(arguments)(source, arguments.out)
        digests.result()
    if arguments.json:
        print(json.dumps(outcome.figures(), indent=2))
    elif not arguments.quiet:
        print(outcome.describe())
    if outcome.fault is not None:
        raise RunError(f"{arguments.out}: {outcome.fault}")


def run_export(export: Export, arguments: argparse.Namespace) -> None:
    def say(line: str) -> None:
        if not arguments.quiet:
            print(f"note: {line}", file=sys.stderr)

    outcomes: list[Outcome] = []
    verify = verification(arguments) if arguments.verify else None

    def remember(source: Source, exported: Path) -> Outcome:
        assert verify is not None
        outcomes.append(verify(source, exported))
        return outcomes[0]

    bar, progress = bar_of("writing", "B", arguments.quiet)
    with bar:
        report = write_export(
            export,
            arguments.out,
            overwrite=arguments.overwrite,
            verify=remember if verify is not None else None,
            max_shard_bytes=shard_bytes(arguments.max_shard_size or SHARD_SIZE),
            progress=progress,
            say=say,
        )
    for line in report["warnings"]:
        say(line)
    if arguments.json:
        print(json.dumps(report, indent=2))
    elif not arguments.quiet:
        print(f"wrote {arguments.out}: {report['tensors']} tensors, {report['bytes']:,} bytes in {report['dtype']}")
        print(outcomes[0].describe() if outcomes else "logits not compared (--verify)")


def main() -> None:
    end_on_sigterm()
    arguments = parse_arguments()
    check_flags(arguments)
    if arguments.max_shard_size is not None:
        shard_bytes(arguments.max_shard_size)
    if arguments.verify_only and not (arguments.out / REPORT_FILE).is_file():
        raise UserError(f"{arguments.out}: holds no {REPORT_FILE}, so there is no export to verify; make one first")
    source = open_for_export(arguments.source, arguments.config, arguments.norm_order, arguments.gate_order)
    if arguments.verify_only:
        verify_only(source, arguments)
        return
    check_output(arguments.out, source.path, arguments.overwrite)  # of a run, what was taken: its folder may hold both
    fold: Fold = "none" if arguments.no_fold else "partial" if arguments.allow_partial else "all"
    export = prepare_export(
        source, arguments.dtype or DTYPE, fold=fold, plain=arguments.plain, tokenizer=arguments.tokenizer
    )
    if not arguments.dry_run:
        run_export(export, arguments)
    elif arguments.json:
        print(json.dumps(export.plan.as_json() | {"warnings": export.warnings}, indent=2))
    else:
        print("\n".join([describe_plan(export.plan), *(f"note: {line}" for line in export.warnings)]))


if __name__ == "__main__":
    run_tool(main)
