"""Loss of a checkpoint or of an exported directory on held-out tokens."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.errors import RunError, UserError, run_tool
from vha_paddle.host import prepare_process

EPILOG = """\
examples:
  the newest checkpoint of a run:  python tools/evaluate.py runs/quickstart --data data/quickstart/validation
  what was exported from it:       python tools/evaluate.py runs/quickstart/export --data data/quickstart/validation

The unigram entropy of the same tokens is printed beside the loss: a model that learned only how often each token
occurs would lose that much. With --json "loss" and "unigram_entropy" are in nats per token. Weights are taken in
float32; the data must have been made with the model's tokenizer.
exit codes: 0 done, 1 the loss is not finite, 2 wrong input.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint, run directory or exported directory")
    parser.add_argument("--data", type=Path, required=True, help="prefix of an indexed dataset (.bin, .idx)")
    parser.add_argument(
        "--sequence-length",
        type=int,
        help="tokens per sequence (default: what the model was trained on; for a directory that does not say, "
        "max_position_embeddings, or less where the data are shorter)",
    )
    parser.add_argument("--sequences", type=int, help="sequences to use, from the start (default all)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per forward pass (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    for flag in ("sequence_length", "sequences", "batch_size"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} {value}: must be at least 1; correct the value")

    prepare_process()
    from vha_paddle.data.indexed import IndexedTokens
    from vha_paddle.data.loader import ValidationWindows, unigram_entropy
    from vha_paddle.evaluate import assumptions, load_model, sequence_lengths, tokenizer_digest, validation_loss
    from vha_paddle.host import set_compute_threads
    from vha_paddle.parallel.mesh import Mesh

    set_compute_threads()
    model = load_model(arguments.model)
    for line in assumptions(arguments.model):
        print(f"note: {line}", file=sys.stderr)
    digest = tokenizer_digest(arguments.model)
    indexed = IndexedTokens(arguments.data, vocab_size=model.vocab_size, tokenizer_sha256=digest)
    trained, longest = sequence_lengths(arguments.model)
    length = arguments.sequence_length or trained or min(longest, indexed.num_tokens - 1)
    if length > longest:
        raise UserError(
            f"--sequence-length {length}: must not exceed the model's max_position_embeddings={longest}; use that or "
            "less"
        )
    windows = ValidationWindows(indexed, length)
    count = min(arguments.sequences or windows.num_samples, windows.num_samples)
    loss = validation_loss(model, windows, count, arguments.batch_size, Mesh())
    if not math.isfinite(loss):
        raise RunError(f"{arguments.model}: the loss is {loss}; use an earlier checkpoint")
    figures = {
        "model": str(arguments.model),
        "data": str(arguments.data),
        "sequences": count,
        "sequence_length": length,
        "tokens": count * length,
        "loss": loss,
        "perplexity": math.exp(loss),
        "unigram_entropy": unigram_entropy(indexed),
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(
            f"loss {loss:.4f} nats/token (perplexity {figures['perplexity']:.2f}) on {count:,} sequences of {length:,} "
            f"tokens; unigram entropy {figures['unigram_entropy']:.4f}"
        )


if __name__ == "__main__":
    run_tool(main)
