"""Exporting a bfloat16 VHA checkpoint over `cp` of its files and of the exported ones; memory over what is promised.

The shape is the paper's 1.7B model, and 30B-A3B with 2 of its 48 layers: what takes time and memory there, matrices of
experts and an output projection of its own, is there in full size. "masters" has float32 master weights beside the
bfloat16 ones, "plain" has not; neither has moments, which no export uses. Both sides flush what they write. An export
also digests every byte that it reads and writes, folds, casts and turns every matrix around.

Needs three times the bytes of source and target: 38 GB for `1p7b masters`, the largest case.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import ROOT, median_ratio, report
from random_checkpoint import recipe_of

from vha_paddle.config import Recipe
from vha_paddle.names import expected_tensors

# Recipe and number of layers; whether with masters.
CASES: dict[str, tuple[str, int | None, bool]] = {
    "1p7b_plain": ("table1_1p7b_vha", None, False),
    "1p7b_masters": ("table1_1p7b_vha", None, True),
    "30b_a3b_plain": ("30b_a3b_vha_fp8", 2, False),
    "30b_a3b_masters": ("30b_a3b_vha_fp8", 2, True),
}
FIXED_BYTES = 1_000_000_000
LIMIT = 2.0


def promised_bytes(recipe: Recipe, with_masters: bool) -> int:
    """1 GB and twice the largest tensor, as it is stored in the checkpoint."""
    largest = max(math.prod(shape) for shape in expected_tensors(recipe.model).values())
    return FIXED_BYTES + 2 * largest * (4 if with_masters else 2)


def seconds(action: Callable[[], None]) -> float:
    os.sync()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def export(source: Path, out: Path) -> int:
    """Peak memory of the process in bytes."""
    command = [
        sys.executable,
        str(ROOT / "tools/fold_export.py"),
        str(source),
        str(out),
        "--dtype",
        "bfloat16",
        "--quiet",
    ]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with code {process.returncode}")
    return usage.ru_maxrss * 1024


def copy(paths: list[Path], target: Path) -> None:
    target.mkdir()
    subprocess.run(["cp", "-r", *map(str, paths), str(target)], check=True)
    written = [path for path in target.rglob("*") if path.is_file()]
    subprocess.run(["sync", *map(str, written)], check=True)


def measure(case: str, directory: Path, rounds: int) -> None:
    name, layers, with_masters = CASES[case]
    recipe = recipe_of(name, layers)
    source, out, copied = directory / "source", directory / "out", directory / "copy"
    # by a process of its own: a child's peak counts what its parent had when it was started
    maker = [sys.executable, str(ROOT / "benchmarks/random_checkpoint.py"), str(source), name]
    maker += [f"--layers={layers}"] * (layers is not None) + ["--masters"] * with_masters
    subprocess.run(maker, check=True, stderr=subprocess.DEVNULL)
    exports, copies, peaks = [], [], []
    try:
        for number in range(rounds):
            exports.append(seconds(lambda: peaks.append(export(source, out))))
            copies.append(seconds(lambda: copy([source, out], copied)))
            line = f"export {exports[-1]:.2f} s, cp {copies[-1]:.2f} s, peak {peaks[-1]:,} bytes"
            print(f"{case} round {number + 1}/{rounds}: {line}", file=sys.stderr)
            moved = sum(path.stat().st_size for path in copied.rglob("*") if path.is_file())
            shutil.rmtree(out)
            shutil.rmtree(copied)
    finally:
        for path in (source, out, copied):
            shutil.rmtree(path, ignore_errors=True)
    medians = f"export {statistics.median(exports):.2f} s, cp {statistics.median(copies):.2f} s"
    print(f"{case}: {moved:,} bytes read and written; medians {medians}; peak {max(peaks):,} bytes")
    report(f"fold_export_{case}_over_cp", median_ratio(exports, copies), LIMIT, "ratio", False)
    promised = promised_bytes(recipe, with_masters)
    report(f"fold_export_{case}_memory_over_promised", max(peaks) / promised, 1.0, "ratio", False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="may be repeated; default: all")
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: a temporary)")
    arguments = parser.parse_args()
    for case in arguments.case or CASES:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            measure(case, Path(directory), arguments.rounds)


if __name__ == "__main__":
    main()
