"""Step time of VHA over GQA-8, and the share of the GEMM rate that the GQA-8 step reaches."""

from __future__ import annotations

import argparse
import statistics

import shape
from harness import Worker, interleave, median_ratio, report

from vha_paddle.counts import FlopRule, training_flops


def flops(name: str, causal: bool) -> int:
    """Training FLOPs of a step, without the LM head."""
    rule = FlopRule(sequence_length=shape.SEQUENCE, lm_head=False, causal=causal)
    return training_flops(shape.model_config(name), rule) * shape.SEQUENCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    vha, gqa = interleave([Worker("ours.py", ["vha", "--gemm"]), Worker("ours.py", ["gqa8", "--gemm"])], rounds)
    ratio = median_ratio([a["seconds"] for a in vha], [a["seconds"] for a in gqa])
    analytic = flops("vha", causal=True) / flops("gqa8", causal=True)
    print(f"analytic FLOPs ratio {analytic:.3f} (full scores: {flops('vha', False) / flops('gqa8', False):.3f})")
    for name, answers in (("vha", vha), ("gqa8", gqa)):
        whole = statistics.median(a["seconds"] for a in answers)
        passes = statistics.median(a["forward_backward"] for a in answers)
        print(f"{name}: step {whole:.3f} s, of which forward and backward {passes:.3f} s")
    report("vha_step_time_over_gqa8", ratio, analytic + 0.02, "ratio", higher_is_better=False)
    for what in ("forward_backward", "seconds"):
        below, square = ([flops("gqa8", causal) / a[what] / a["gemm_rate"] for a in gqa] for causal in (True, False))
        print(
            f"share of the GEMM rate by {what}: {statistics.median(below):.3f}, "
            f"counting the whole square of scores {statistics.median(square):.3f}"
        )
    report("gqa8_gemm_fraction", statistics.median(below), 0.80, "fraction of the measured GEMM rate", True)


if __name__ == "__main__":
    main()
