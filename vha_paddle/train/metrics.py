"""Where a run's numbers go: metrics.jsonl (the record), the console, wandb when asked."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import paddle
from tqdm import tqdm

from vha_paddle.checkpoint.layout import METRICS_FILE
from vha_paddle.config import Recipe, recipe_to_yaml
from vha_paddle.errors import UserError
from vha_paddle.files import atomic_write
from vha_paddle.maps import means_of, summary


class MetricsLog:
    """One JSON object per optimizer step, appended to `metrics.jsonl`.

    On resume, lines of steps that will be trained again are dropped, so the file holds each step once.
    """

    def __init__(self, output: Path, resume_step: int) -> None:
        self.path = output / METRICS_FILE
        kept = [line for number, line in enumerate(self._existing(), 1) if self._step(number, line) <= resume_step]
        with atomic_write(self.path) as file:
            file.writelines(line.encode() + b"\n" for line in kept)
        self._file: TextIO = open(self.path, "a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _step(self, number: int, line: str) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.path}: line {number} is no record of a step; remove the line") from None

    def _existing(self) -> list[str]:
        """Whole lines of an earlier run; a line cut by a crash has no newline and is left out."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return text[: text.rfind("\n") + 1].splitlines()


class Wandb:
    """The recipe's wandb run, or nothing. A tracker that fails is reported once and then left alone."""

    def __init__(self, recipe: Recipe, output: Path) -> None:
        self._run: Any = None
        if recipe.logging.wandb == "off":
            return
        try:
            import wandb

            self._run = wandb.init(
                project=recipe.logging.wandb_project,
                name=recipe.run.name,
                mode=recipe.logging.wandb,
                dir=os.fspath(output),
                config=recipe.model_dump(mode="json"),
                resume="allow",
            )
        except Exception as error:  # whatever a tracker raises, training goes on
            self._give_up(error)

    def log(self, record: dict[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(self._curves(record), step=record["step"])
        except Exception as error:
            self._give_up(error)

    @staticmethod
    def _curves(record: dict[str, Any]) -> dict[str, float]:
        """The numbers of a record; of the maps their means."""
        numbers = {key: value for key, value in record.items() if key not in ("step", "maps")}
        means = means_of(record["maps"]) if "maps" in record else {}
        return numbers | {f"maps/{measure}": mean for measure, mean in means.items()}

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        print(f"warning: wandb failed ({error}); training goes on, {METRICS_FILE} has every step", file=sys.stderr)
        self._run = None


class Console:
    """A line per logging interval, and a progress bar where stderr is a terminal."""

    def __init__(self, recipe: Recipe, first_step: int) -> None:
        self.num_steps = recipe.num_steps
        self._bar = tqdm(
            total=recipe.num_steps, initial=first_step, unit="step", disable=not sys.stderr.isatty(), leave=False
        )

    def advance(self) -> None:
        self._bar.update()

    def step_line(self, record: dict[str, Any], mfu: float, seconds_left: float) -> None:
        experts = f"expert load {record['moe']['worst_load']:.2f}  " if "moe" in record else ""
        self.line(
            f"step {record['step']:>{len(str(self.num_steps))}}/{self.num_steps}  loss {record['loss']:.4f}  "
            f"lr {record['lr']:.2e}  grad norm {record['grad_norm']:.3f}  {experts}"
            f"{record['tokens_per_second']:,.0f} tokens/s  MFU {mfu:.1%}  ETA {_duration(seconds_left)}"
        )

    def line(self, text: str) -> None:
        self._bar.clear()
        print(text, flush=True)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class RunLog:
    """All places where a run's numbers go.

    Args:
        output: the run's directory.
        first_step: steps done before this start.
        peak_tokens_per_second: what the measured GEMM rate of all ranks would allow; MFU is relative to it.
        unigram_entropy: of the validation data (nats per token), shown beside the validation loss.
    """

    def __init__(
        self, recipe: Recipe, output: Path, first_step: int, peak_tokens_per_second: float, unigram_entropy: float
    ) -> None:
        self.recipe, self.first_step, self.peak = recipe, first_step, peak_tokens_per_second
        self.unigram_entropy = unigram_entropy
        self._metrics = MetricsLog(output, first_step)
        self._console = Console(recipe, first_step)
        self._wandb = Wandb(recipe, output)
        self._started = time.perf_counter()

    def step(self, record: dict[str, Any]) -> None:
        """Record one optimizer step."""
        self._metrics.write(record)
        self._wandb.log(record)
        self._console.advance()
        step, num_steps = record["step"], self.recipe.num_steps
        if step % self.recipe.logging.interval and step != num_steps:
            return
        seconds_left = (time.perf_counter() - self._started) / (step - self.first_step) * (num_steps - step)
        self._console.step_line(record, record["tokens_per_second"] / self.peak, seconds_left)
        if "val_loss" in record:
            self.line(
                f"validation loss {record['val_loss']:.4f} nats/token (unigram entropy {self.unigram_entropy:.4f})"
            )
        if "maps" in record:
            self.line(summary(record["maps"]))

    def line(self, text: str) -> None:
        """Say something on the console."""
        self._console.line(text)

    def close(self) -> None:
        self._metrics.close()
        self._console.close()
        self._wandb.close()


def measured_gemm_rate(dtype: str, size: int = 1024, seconds: float = 0.3) -> float:
    """FLOP/s of a GEMM on this process's device and threads, the fastest of many: the ceiling that MFU is measured
    against, and on a shared machine not the average of its neighbours' work."""
    left, right = paddle.rand([size, size]).astype(dtype), paddle.rand([size, size]).astype(dtype)

    def wait_for(product: paddle.Tensor) -> None:
        product[0, 0].item()

    wait_for(paddle.matmul(left, right))
    fastest, end = math.inf, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        wait_for(paddle.matmul(left, right))
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def write_resolved_recipe(recipe: Recipe, output: Path) -> None:
    """The recipe as it ran, defaults and overrides included, beside the metrics."""
    with atomic_write(output / "recipe.yaml") as file:
        file.write(recipe_to_yaml(recipe).encode())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
