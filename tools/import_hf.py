#!/usr/bin/env python
"""Make a checkpoint out of a Hugging Face directory of Qwen3, Qwen3-MoE or Llama."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.errors import run_tool
from vha_paddle.export.output import check_output
from vha_paddle.host import end_on_sigterm, prepare_process
from vha_paddle.import_hf import REPORT_FILE, Import, describe_import, import_hf, plan_import

EXAMPLES = """
examples:
  # what would be imported, tensor by tensor; reads no weights
  python tools/import_hf.py models/Qwen3-0.6B-Base imported/qwen3 --dry-run

  # the checkpoint, in the dtype that the directory has
  python tools/import_hf.py models/Qwen3-0.6B-Base imported/qwen3

  # go on training it: data with its tokenizer, then its own recipe, which starts from it
  python tools/prepare_data.py web.jsonl --tokenizer imported/qwen3 --out data/Qwen3-0.6B-Base
  python tools/train.py imported/qwen3/recipe.yaml optim.lr=5e-5 schedule.total_tokens=200M

  # make virtual heads of it, with a recipe whose model is the same but for model.attention
  python tools/warm_start.py imported/qwen3 my_vha.yaml --out warm/qwen3 --data data/Qwen3-0.6B-Base/train

  # its loss on held-out text; and back to a Hugging Face directory, every tensor bit for bit
  python tools/evaluate.py imported/qwen3 --data data/Qwen3-0.6B-Base/validation
  python tools/fold_export.py imported/qwen3 exported/qwen3 --plain --dtype bfloat16

SOURCE holds config.json, as transformers 4 or 5 writes it, model*.safetensors and a tokenizer. OUT is a checkpoint of
step 0 without optimizer state; its recipe.yaml has SOURCE's model and the other sections of --recipe, or ones to edit:
learning rate, batch and schedule are a start, not advice. OUT appears complete or not at all.
What the decoder here does not compute is refused with its key: scaled RoPE, activations other than silu, biases of the
MLP, layers without experts in a mixture, patterns of sliding layers other than one full after equally many sliding
ones, quantized weights, code of the model's own. docs/import.md has the table.
exit status: 0 done, 1 OUT cannot be written, 2 wrong input.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="Hugging Face model directory")
    parser.add_argument("out", type=Path, help="checkpoint to make")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="recipe whose sections other than model to take")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer file or directory, where SOURCE has none"
    )
    for flag, text in {
        "--overwrite": "replace an earlier import at OUT, at the very end",
        "--dry-run": "check everything, list the tensors, write nothing",
        "--json": "print the report (or the list) as JSON",
    }.items():
        parser.add_argument(flag, action="store_true", help=text)
    return parser.parse_args()


def list_tensors(planned: Import) -> str:
    """What each tensor is made of, and what is not used."""
    weights = planned.source.weights
    rows = [
        (name, " x ".join(map(str, spec.shape)), str(spec.dtype), spec.stored[0] + _more(spec.stored))
        for name, spec in weights.specs.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
    return "\n".join([*lines, *(f"{name}: left out, {reason}" for name, reason in weights.left_out.items())])


def _more(stored: tuple[str, ...]) -> str:
    return f" and {len(stored) - 1} more" if len(stored) > 1 else ""


def describe(report: dict[str, Any], is_written: bool) -> str:
    """The report in a few lines."""
    dtypes = ", ".join(report["dtypes"])
    tokenizer = report["tokenizer"]
    lines = [
        f"{'wrote' if is_written else 'would write'} {report['out']}: {report['parameters']:,} parameters in "
        f"{len(report['tensors'])} tensors of {dtypes}, {report['bytes']:,} bytes",
        f"tokenizer   {tokenizer['vocab_size']:,} ids, a document ends with {tokenizer['eos_token']}",
        *(f"warning: {line}" for line in report["warnings"]),
    ]
    if is_written:
        lines.append(f"copy {report['out']}/recipe.yaml and edit the copy, or name run.start_from={report['out']}")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    prepare_process()
    check_output(arguments.out, arguments.source, arguments.overwrite, REPORT_FILE)
    planned = plan_import(arguments.source, arguments.out, arguments.recipe, arguments.tokenizer)
    end_on_sigterm()  # now, as a mixture has imported Paddle
    if arguments.dry_run:
        report = describe_import(planned, arguments.out)
        if not arguments.json:
            print(list_tensors(planned))
    else:
        with tqdm(desc="writing", unit="B", unit_scale=True, disable=None, leave=False) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            report = import_hf(planned, arguments.out, overwrite=arguments.overwrite, progress=progress)
    print(json.dumps(report, indent=2) if arguments.json else describe(report, not arguments.dry_run))


if __name__ == "__main__":
    run_tool(main)
