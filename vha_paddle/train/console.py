"""What a run says on the console: a line per logging interval, a progress bar on a terminal, a summary at the end."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vha_paddle.config import Recipe

_LEAST_SHARE = 0.01  # of the time; what takes less is not named


class Console:
    """The lines of one start of a run, of which `first_step` steps were done before."""

    def __init__(self, recipe: Recipe, first_step: int) -> None:
        self.num_steps = recipe.num_steps
        self._bar = tqdm(
            total=recipe.num_steps, initial=first_step, unit="step", disable=not sys.stderr.isatty(), leave=False
        )

    def advance(self) -> None:
        self._bar.update()

    def step_line(self, record: Mapping[str, Any], seconds_left: float) -> None:
        experts = f"expert load {record['moe']['worst_load']:.2f}  " if "moe" in record else ""
        self.line(
            f"step {record['step']:>{len(str(self.num_steps))}}/{self.num_steps}  loss {record['loss']:.4f}  "
            f"lr {record['lr']:.2e}  grad norm {record['grad_norm']:.3f}  {experts}"
            f"{record['tokens_per_second']:,.0f} tokens/s  MFU {record['mfu']:.1%}  ETA {duration(seconds_left)}"
        )

    def line(self, text: str) -> None:
        self._bar.clear()
        print(text, flush=True)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class _Unfailing(io.FileIO):
    """What the other side does not take is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def outlive_console() -> None:
    """From now on stdout and stderr of this process take every line, whether or not it arrives.

    They often are a file on the disk that fills up, or a pipe whose reader gets the same Ctrl-C: neither may cost the
    run its step under way, or its exit code.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the process began
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        raw = io.BufferedWriter(_Unfailing(stream.fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


def summary(
    steps: range, tokens_per_step: int, seconds: Mapping[str, float], skipped: int, checkpoint: Path
) -> list[str]:
    """What a start of a run came to.

    Args:
        steps: that it trained, the skipped ones among them.
        seconds: it spent in each phase.
        checkpoint: the last one.
    """
    tokens, wall = len(steps) * tokens_per_step, sum(seconds.values())
    shares = {phase: spent / wall for phase, spent in seconds.items()}
    named = [phase for phase in sorted(shares, key=lambda phase: -shares[phase]) if shares[phase] >= _LEAST_SHARE]
    lines = [
        f"trained steps {steps.start} to {steps.stop - 1}: {tokens:,} tokens in {duration(wall)}, "
        f"{tokens / wall:,.0f} tokens/s over all",
        "time: " + ", ".join(f"{phase} {shares[phase]:.0%}" for phase in named),
    ]
    if skipped:
        lines.append(f"skipped steps: {skipped}")
    return [*lines, f"last checkpoint: {checkpoint}"]


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
