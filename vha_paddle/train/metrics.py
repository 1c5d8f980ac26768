"""Where a run's numbers go: metrics.jsonl (the record), the console, trackers when asked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vha_paddle import maps
from vha_paddle.checkpoint.layout import METRICS_FILE
from vha_paddle.config import Recipe, recipe_to_yaml
from vha_paddle.errors import UserError
from vha_paddle.files import atomic_write
from vha_paddle.train.console import Console, summary
from vha_paddle.train.trackers import trackers_of
from vha_paddle.train.usage import Peaks


class MetricsLog:
    """One JSON object per optimizer step, appended to `metrics.jsonl`.

    On resume, lines of steps that will be trained again are dropped, so the file holds each step once.
    """

    def __init__(self, output: Path, resume_step: int) -> None:
        self.path = output / METRICS_FILE
        steps = {self._step(number, line): line for number, line in enumerate(self._existing(), 1)}
        kept = [line for step, line in steps.items() if step <= resume_step]
        self.dropped = len(steps) - len(kept)
        self.missing = resume_step - len(kept)
        """Steps before this start that have no record."""
        self.recorded = max(steps, default=0)
        """The last step that an earlier start has recorded."""
        with atomic_write(self.path) as file:
            file.writelines(line.encode() + b"\n" for line in kept)
        self._file: BinaryIO = open(self.path, "ab", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        self._unwritten = b""

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        self._unwritten += json.dumps(_as_json(record), allow_nan=False).encode() + b"\n"
        self._write()

    def flush(self) -> None:
        """Make what is written durable."""
        self._write()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._warn(str(error.strerror))

    def close(self) -> None:
        self._write()
        self._file.close()

    def _write(self) -> None:
        """Write what is due. On a full disk nothing is: it is due again with the next record."""
        due = self._unwritten
        try:
            if self._file.write(due) == len(due):
                self._unwritten, self._end = b"", self._end + len(due)
                return
            reason = "No space left on device"
        except OSError as error:
            reason = str(error.strerror)
        with contextlib.suppress(OSError):
            self._file.truncate(self._end)  # no part of a line stays
        self._warn(f"{reason}; records kept in memory: {len(due.splitlines())}")

    def _warn(self, text: str) -> None:
        print(f"warning: {self.path}: {text}", file=sys.stderr)

    def _step(self, number: int, line: str) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise UserError(f"{self.path}: line {number} is no record of a step; remove the line") from None

    def _existing(self) -> list[str]:
        """Whole lines of an earlier run; a line cut by a crash has no newline and is left out."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")  # what is no text is no record either
        return text[: text.rfind("\n") + 1].splitlines()


class RunLog:
    """All places where a run's numbers go.

    Args:
        output: the run's directory.
        first_step: steps done before this start.
        peaks: what MFU is relative to.
        unigram_entropies: of the validation sets by name (nats per token), shown beside their losses.
    """

    def __init__(
        self,
        recipe: Recipe,
        output: Path,
        first_step: int,
        peaks: Peaks,
        unigram_entropies: Mapping[str, float],
    ) -> None:
        self.recipe, self.first_step = recipe, first_step
        self.unigram_entropies = unigram_entropies
        self._metrics = MetricsLog(output, first_step)
        self._console = Console(recipe, first_step)
        self._trackers = trackers_of(recipe, output, first_step, self._metrics.recorded)
        self._peaks = peaks
        self._step, self._skipped = first_step, 0
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def step(self, record: dict[str, Any]) -> None:
        """Record one optimizer step."""
        record = record | self._peaks.shares(record["tokens_per_second"])
        self._metrics.write(record)
        for tracker in self._trackers:
            tracker.log(record)
        self._console.advance()
        self._step, num_steps = record["step"], self.recipe.num_steps
        step = self._step
        self._add(record["seconds"])
        if "skipped" in record:
            self._skipped += 1
            self.warn(
                f"step {step} skipped: {record['skipped']} ({record['skipped_steps']} of "
                f"{self.recipe.failure.max_skipped_steps} that may be)"
            )
        if step % self.recipe.logging.interval and step != num_steps:
            return
        seconds_left = (time.perf_counter() - self._started) / (step - self.first_step) * (num_steps - step)
        self._console.step_line(record, seconds_left)
        if "val_loss" in record:
            losses = record.get("val_losses", dict.fromkeys(self.unigram_entropies, record["val_loss"]))
            for name, loss in losses.items():
                label = f"validation loss of {name}" if len(losses) > 1 else "validation loss"
                self.line(f"{label} {loss:.4f} nats/token (unigram entropy {self.unigram_entropies[name]:.4f})")
        if "maps" in record:
            self.line(maps.summary(record["maps"]))

    def line(self, text: str) -> None:
        """Say something on the console."""
        self._console.line(text)

    @property
    def dropped(self) -> int:
        """Records of an earlier start, of steps that this one trains again."""
        return self._metrics.dropped

    @property
    def missing(self) -> int:
        """Steps of earlier starts that have no record."""
        return self._metrics.missing

    def warn(self, text: str) -> None:
        """Say what went wrong and does not end the run."""
        self._console.line(f"warning: {text}")

    def flush(self) -> None:
        """Make the record of the steps so far durable."""
        self._metrics.flush()
        for tracker in self._trackers:
            tracker.flush()

    def summarize(self, seconds: dict[str, float], checkpoint: Path) -> None:
        """Say what this start came to. `seconds`: of the phases since the last record; `checkpoint`: the last one."""
        self._add(seconds)
        steps = range(self.first_step + 1, self._step + 1)
        for line in summary(steps, self.recipe.tokens_per_step, self._seconds, self._skipped, checkpoint):
            self.line(line)

    def _add(self, seconds: Mapping[str, float]) -> None:
        for phase, spent in seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

    def close(self) -> None:
        """Of a run that fails too, which is not to wait for trackers: what they are handed here they have."""
        self._metrics.close()
        self._console.close()
        for tracker in self._trackers:
            tracker.flush()

    def finish_trackers(self) -> None:
        """After `close`, and where the run did not fail: it may take minutes, for what is still to upload."""
        for tracker in self._trackers:
            tracker.close()


def write_resolved_recipe(recipe: Recipe, output: Path) -> None:
    """The recipe as it ran, defaults and overrides included, beside the metrics."""
    with atomic_write(output / "recipe.yaml") as file:
        file.write(recipe_to_yaml(recipe).encode())


def _as_json(value: Any) -> Any:
    """Numbers that are not finite become null, as JSON has no word for them."""
    if isinstance(value, dict):
        return {key: _as_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
