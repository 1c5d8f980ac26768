"""Tokens per second of our GQA-8 decoder over its peers': transformers on torch, PaddleFormers on Paddle."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import ROOT, Worker, interleave, median_ratio, report

PADDLEFORMERS_PYTHON = ROOT / ".venv-paddleformers/bin/python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--paddleformers-python",
        type=Path,
        default=PADDLEFORMERS_PYTHON,
        help="interpreter of an environment with paddleformers (default: the one `make benchmark` builds)",
    )
    arguments = parser.parse_args()
    workers = [
        Worker("ours.py", ["gqa8"]),
        Worker("transformers_torch.py", []),
        Worker("paddleformers_paddle.py", [], python=str(arguments.paddleformers_python)),
    ]
    ours, torch, paddleformers = ([a["seconds"] for a in answers] for answers in interleave(workers, arguments.rounds))
    report("tokens_per_second_over_paddleformers", median_ratio(paddleformers, ours), 1.5, "ratio", True)
    report("tokens_per_second_over_transformers_torch", median_ratio(torch, ours), 0.9, "ratio", True)


if __name__ == "__main__":
    main()
