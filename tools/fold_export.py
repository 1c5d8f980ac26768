#!/usr/bin/env python
"""Fold a checkpoint into a plain Qwen3 or Qwen3-MoE directory that transformers, vLLM and llama.cpp load."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vha_paddle.errors import run_tool
from vha_paddle.export.config import EXPORT_DTYPES
from vha_paddle.export.fold_export import describe_report, export_checkpoint, open_source
from vha_paddle.export.plan import describe_plan, plan_export
from vha_paddle.export.verify import Verification
from vha_paddle.export.writer import check_output
from vha_paddle.host import prepare_process

EXAMPLES = """
examples:
  # the newest checkpoint of a run, in float32, compared with the checkpoint before it is kept
  python tools/fold_export.py runs/quickstart exported/quickstart --verify

  # half the bytes for serving
  python tools/fold_export.py runs/quickstart exported/quickstart-bf16 --dtype bfloat16

  # what would be written: every tensor, what is folded into it, its shape and bytes
  python tools/fold_export.py runs/quickstart/checkpoints/step-00000300 exported/q --dry-run

  # a grouped-query baseline holds nothing to fold; it is exported as it is
  python tools/fold_export.py runs/gqa exported/gqa --plain

Experts in every layer become Qwen3-MoE, sliding windows the layer_types of Qwen3 (the model card says which readers
obey them). What no stock class computes is refused with its key: output gates, shared experts, a router's bias,
capacity, windows together with experts, layers of different head counts, and the attention kinds mla, mfa, gva, dcmha.
OUT appears complete or not at all, with a model card (README.md) and fold_report.json; a killed run leaves
only a hidden .OUT.*.tmp. Then, with nothing but transformers: AutoModelForCausalLM.from_pretrained(OUT).
exit status: 0 done, 1 verification failed or could not write, 2 wrong input.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="its directory, or a run's (the newest is taken)")
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--dtype", choices=EXPORT_DTYPES, default="float32", help="default: %(default)s")
    for flag, text in {
        "--verify": "compare logits with the checkpoint's before OUT is kept",
        "--overwrite": "replace an earlier export at OUT, at the very end",
        "--plain": "export a model without Premix and Postmix as it is",
        "--dry-run": "check everything, list the tensors, write nothing",
        "--json": "print the report (or the list) as JSON",
    }.items():
        parser.add_argument(flag, action="store_true", help=text)
    return parser.parse_args()


def verify(checkpoint: Path, exported: Path) -> Verification:
    """Only this needs Paddle."""
    prepare_process()
    from vha_paddle.evaluate import verify_export

    return verify_export(checkpoint, exported)


def main() -> None:
    arguments = parse_arguments()
    if arguments.dry_run:
        check_output(arguments.out, arguments.overwrite)
        planned = plan_export(open_source(arguments.checkpoint, arguments.plain).model, arguments.dtype)
        rows = [asdict(tensor) | {"bytes": tensor.num_bytes} for tensor in planned]
        print(json.dumps(rows, indent=2) if arguments.json else describe_plan(planned))
        return
    with tqdm(desc="writing", unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        report = export_checkpoint(
            arguments.checkpoint,
            arguments.out,
            arguments.dtype,
            overwrite=arguments.overwrite,
            plain=arguments.plain,
            verify=verify if arguments.verify else None,
            progress=progress,
        )
    print(json.dumps(report, indent=2) if arguments.json else describe_report(report, arguments.out))


if __name__ == "__main__":
    run_tool(main)
