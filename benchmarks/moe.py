"""Step time of a mixture of experts over a dense model with the same FLOPs per token, in one process.

Hidden 512, two layers, 4 of 32 experts of width 256 against one MLP of width 1,024; microbatches of 8 sequences of 512
tokens. The mixture has eight times the feed-forward weights, which AdamW has to move whatever the batch: the ratio of
forward and backward alone is told too.
"""

from __future__ import annotations

import argparse

from harness import Worker, interleave, median_ratio, report

TARGET = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    mixture, dense = interleave([Worker("moe.py", ["moe"]), Worker("moe.py", ["dense"])], rounds)
    for what in ("forward_backward", "seconds"):
        ratio = median_ratio([a[what] for a in mixture], [a[what] for a in dense])
        name = "moe_step_over_dense" if what == "seconds" else "moe_forward_backward_over_dense"
        report(name, ratio, TARGET, "ratio", higher_is_better=False)


if __name__ == "__main__":
    main()
