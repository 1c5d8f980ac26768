"""Step time of every attention kind at the 1.7B layer shape over GQA-8's, beside the ratio of their FLOPs."""

from __future__ import annotations

import argparse
import json
import statistics

import shape
from harness import Worker, interleave, median_ratio

from vha_paddle.counts import FlopRule, training_flops

BASELINE = "gqa8"


def flops(name: str) -> int:
    """Training FLOPs per token, scores below the diagonal, without the LM head."""
    rule = FlopRule(sequence_length=shape.SEQUENCE, lm_head=False, causal=True)
    return training_flops(shape.model_config(name), rule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    kinds = [name for name in shape.ATTENTION if name != BASELINE]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    arguments = parser.parse_args()
    print(f"{'kind':<20}{'step time':>12}{'FLOPs':>12}{'time / FLOPs':>14}   (over {BASELINE})")
    for name in arguments.kinds:
        # two at a time: all together would not fit into memory
        mine, theirs = interleave([Worker("ours.py", [name]), Worker("ours.py", [BASELINE])], arguments.rounds)
        ratio = median_ratio([a["seconds"] for a in mine], [a["seconds"] for a in theirs])
        analytic = flops(name) / flops(BASELINE)
        print(f"{name:<20}{ratio:>12.3f}{analytic:>12.3f}{ratio / analytic:>14.3f}", flush=True)
        seconds = statistics.median(a["seconds"] for a in mine)
        figures = {"value": round(ratio, 4), "flops_ratio": round(analytic, 4), "seconds": round(seconds, 3)}
        print(json.dumps({"benchmark": f"{name}_step_time_over_{BASELINE}", "unit": "ratio"} | figures), flush=True)


if __name__ == "__main__":
    main()
