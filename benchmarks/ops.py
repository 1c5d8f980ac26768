"""Forward and backward of each operation of a decoder layer: ours, plain Paddle's and torch's, in turn.

The value compares the sum over one layer (two norms, norm and rope of queries and keys, attention with 8 KV
heads, swiglu) with torch's; the loss and the attention with 2 KV heads are shown beside it.
"""

from __future__ import annotations

import argparse
import statistics

from harness import Worker, interleave, report

KINDS = ("ours", "paddle", "torch")
# How often a layer does each; keys have half as many heads as queries.
LAYER = {"rms_norm": 2, "rms_norm of heads": 1.5, "rope": 1.5, "attention, 8 KV heads": 1, "swiglu": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    answers = interleave([Worker("ops.py", [kind]) for kind in KINDS], arguments.rounds)

    print(f"{'median milliseconds':24}" + "".join(f"{kind:>10}" for kind in KINDS))
    for name in answers[0][0]:
        if name != "seconds":
            medians = [1e3 * statistics.median(answer[name] for answer in mine) for mine in answers]
            print(f"{name:24}" + "".join(f"{median:10.2f}" for median in medians))
    ours, paddle, torch = (
        [sum(answer[name] * count for name, count in LAYER.items()) for answer in mine] for mine in answers
    )
    print(f"{'one layer':24}" + "".join(f"{1e3 * statistics.median(x):10.2f}" for x in (ours, paddle, torch)))
    over_paddle = statistics.median(p / o for p, o in zip(paddle, ours, strict=True))
    print(f"speed over plain Paddle: {over_paddle:.2f}")
    value = statistics.median(t / o for t, o in zip(torch, ours, strict=True))
    report("layer_operations_speed_over_torch", value, 1.0, "ratio", True)


if __name__ == "__main__":
    main()
