"""Saving and loading about 1 GB of state over `cp` of the same files; how long an asynchronous save holds training up.

Both sides flush what they write to disk. The files that are read lie in the page cache ("warm") or were dropped
from it ("cold"). A load computes the digest of every byte, which `cp` does not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from harness import Worker, interleave, median_ratio, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; 4 GB are needed (default: a temporary)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        worker = Worker("checkpoint.py", [directory])
        (answers,) = interleave([worker], arguments.rounds, warmup=0)
    first, rest = answers[0], answers[1:]  # the first asynchronous save also takes the memory it copies to
    of = {name: [answer[name] for answer in rest] for name in first}
    for name in ("save", "cp", "load", "cp_cold", "load_cold", "stall", "slowdown", "asynchronous"):
        print(f"{name:14}{statistics.median(of[name]):8.3f} s median, {min(of[name]):.3f} to {max(of[name]):.3f}")
    print(f"{first['bytes']:,} bytes; the first stall was {first['stall']:.3f} s")
    report("checkpoint_save_over_cp", median_ratio(of["save"], of["cp"]), 1.5, "ratio", False)
    report("checkpoint_load_over_cp", median_ratio(of["load"], of["cp"]), 1.5, "ratio", False)
    report("checkpoint_load_over_cp_cold", median_ratio(of["load_cold"], of["cp_cold"]), 1.5, "ratio", False)
    report("asynchronous_stall_over_save", median_ratio(of["stall"], of["save"]), 0.1, "ratio", False)


if __name__ == "__main__":
    main()
