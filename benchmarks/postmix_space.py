"""Step time of VHA with Postmix in weight space over that with Postmix in activation space, in one process each."""

from __future__ import annotations

import argparse
import statistics

from harness import Worker, interleave, median_ratio, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    workers = [Worker("ours.py", [name]) for name in ("vha_weight_space", "vha")]
    weight, activation = interleave(workers, parser.parse_args().rounds)
    for name, answers in (("weight space", weight), ("activation space", activation)):
        whole = statistics.median(a["seconds"] for a in answers)
        passes = statistics.median(a["forward_backward"] for a in answers)
        print(f"{name}: step {whole:.3f} s, of which forward and backward {passes:.3f} s")
    ratio = median_ratio([a["seconds"] for a in weight], [a["seconds"] for a in activation])
    report("postmix_weight_space_step_time_over_activation_space", ratio, 1.0, "ratio", higher_is_better=False)


if __name__ == "__main__":
    main()
