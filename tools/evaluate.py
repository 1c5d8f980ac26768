"""Loss of a checkpoint or of an exported directory on held-out tokens."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.errors import UserError, run_tool
from vha_paddle.host import prepare_process

EPILOG = """\
examples:
  the newest checkpoint of a run:  python tools/evaluate.py runs/quickstart --data data/quickstart/validation
  what was exported from it:       python tools/evaluate.py runs/quickstart/export --data data/quickstart/validation

The unigram entropy of the same tokens is printed beside the loss: a model that learned only how often each token
occurs would lose that much.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint, run directory or exported directory")
    parser.add_argument("--data", type=Path, required=True, help="prefix of an indexed dataset (.bin, .idx)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens per sequence (default 256)")
    parser.add_argument("--sequences", type=int, help="sequences to use, from the start (default all)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per forward pass (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    for flag in ("sequence_length", "sequences", "batch_size"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} {value}: must be at least 1; correct the value")

    prepare_process()
    from vha_paddle.data.indexed import IndexedTokens
    from vha_paddle.data.loader import ValidationWindows, unigram_entropy
    from vha_paddle.evaluate import load_model, validation_loss
    from vha_paddle.host import set_compute_threads
    from vha_paddle.parallel.mesh import Mesh

    set_compute_threads()
    model = load_model(arguments.model)
    indexed = IndexedTokens(arguments.data, vocab_size=model.vocab_size)
    windows = ValidationWindows(indexed, arguments.sequence_length)
    count = min(arguments.sequences or windows.num_samples, windows.num_samples)
    loss = validation_loss(model, windows, count, arguments.batch_size, Mesh())
    figures = {
        "model": str(arguments.model),
        "data": str(arguments.data),
        "tokens": count * arguments.sequence_length,
        "loss": loss,
        "perplexity": math.exp(loss),
        "unigram_entropy": unigram_entropy(indexed),
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(
            f"loss {loss:.4f} nats/token (perplexity {figures['perplexity']:.2f}) on {figures['tokens']:,} tokens; "
            f"unigram entropy {figures['unigram_entropy']:.4f}"
        )


if __name__ == "__main__":
    run_tool(main)
