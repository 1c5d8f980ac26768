"""Strong scaling: a training step on two ranks against one process, one core each, for each way to split the work."""

from __future__ import annotations

import argparse

from harness import Worker, interleave, median_ratio, report

# What two ranks could reach at most: 2, and with 8 microbatches through 2 pipeline stages 2 * 8 / (8 + 1).
LIMITS = {"tensor=2": 2.0, "pipeline=2": 2 * 8 / 9, "context=2": 2.0, "data=2": 2.0}
TARGET_OF_LIMIT = 0.85


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layouts", nargs="*", default=list(LIMITS), choices=list(LIMITS))
    arguments = parser.parse_args()
    workers = [Worker("scaling.py", [layout]) for layout in ("tensor=1", *arguments.layouts)]
    one, *many = interleave(workers, arguments.rounds)
    for layout, answers in zip(arguments.layouts, many, strict=True):
        speedup = median_ratio([a["seconds"] for a in one], [a["seconds"] for a in answers])
        name = layout.replace("=", "_")
        report(f"speedup_{name}", speedup, TARGET_OF_LIMIT * LIMITS[layout], "times one process", True)


if __name__ == "__main__":
    main()
