"""Time steps of several programs in turn: each in its own process, one step at a time, medians of paired ratios.

A shared machine drifts by tens of percent within minutes. Programs that take turns step by step see the same
drift, so the ratio of neighbouring steps is steady where absolute times are not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Worker:
    """A process that answers each line `step` with one JSON line holding `seconds`."""

    def __init__(self, script: str, arguments: Sequence[str], python: str = sys.executable) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENBLAS_")}
        self.process = subprocess.Popen(
            [python, str(ROOT / "benchmarks/workers" / script), *arguments],
            env=environment | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # a library may print of its own
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.process.args} ended with code {self.process.wait()}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def interleave(workers: Sequence[Worker], rounds: int, warmup: int = 2) -> list[list[dict[str, Any]]]:
    """The answers of each worker over `rounds` rounds; in every round each takes one step."""
    try:
        for _ in range(warmup):
            for worker in workers:
                worker.step()
        answers: list[list[dict[str, Any]]] = [[] for _ in workers]
        for number in range(rounds):
            for worker, mine in zip(workers, answers, strict=True):
                mine.append(worker.step())
            print(f"round {number + 1}/{rounds}: {[round(a[-1]['seconds'], 3) for a in answers]}", file=sys.stderr)
        return answers
    finally:
        for worker in workers:
            worker.close()


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of numerator / denominator."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def serve(step: Any) -> None:
    """A worker's loop: run `step()` for each line of stdin, answer with its dictionary."""
    for _ in sys.stdin:
        print(json.dumps(step()), flush=True)


def report(benchmark: str, value: float, target: float, unit: str, higher_is_better: bool) -> None:
    """The line a script reads, after a line for people."""
    met = value >= target if higher_is_better else value <= target
    relation = "at least" if higher_is_better else "at most"
    print(f"{benchmark}: {value:.3f} {unit}, target {relation} {target:.3f}: {'met' if met else 'MISSED'}")
    print(json.dumps({"benchmark": benchmark, "value": round(value, 4), "target": round(target, 4), "unit": unit}))
