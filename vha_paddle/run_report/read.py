"""A run as its directory records it: the recipe as it ran, and a record of every optimizer step."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.checkpoint.layout import METRICS_FILE, RECIPE_FILE
from vha_paddle.config import Recipe, load_recipe
from vha_paddle.counts import FlopRule, training_flops
from vha_paddle.errors import UserError
from vha_paddle.maps import means_of

Curve = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Tokens seen, ascending, and the value then."""


@dataclass(frozen=True)
class Run:
    """One run."""

    path: Path
    recipe: Recipe
    curves: dict[str, Curve]
    """By the key of the records, those of a part as `moe.worst_load`; a key has the steps that recorded it."""

    @property
    def name(self) -> str:
        return self.recipe.run.name

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs, of scores only those that the mask keeps."""
        rule = FlopRule(sequence_length=self.recipe.data.sequence_length, causal=True)
        return training_flops(self.recipe.model, rule)

    def time_shares(self) -> dict[str, float]:
        """What share of the recorded time each phase took; empty where none is recorded."""
        seconds = self._seconds()
        whole = sum(seconds.values())
        return {phase: spent / whole for phase, spent in seconds.items()} if whole else {}

    def communication_share(self) -> float | None:
        """Of the recorded time, what the main rank spent in communication; None where it is not measured."""
        whole = sum(self._seconds().values())
        if "communication_seconds" not in self.curves or not whole:
            return None
        return float(self.curves["communication_seconds"][1].sum()) / whole

    def _seconds(self) -> dict[str, float]:
        """Of each phase, over all records."""
        prefix = "seconds."
        return {
            key.removeprefix(prefix): float(values.sum())
            for key, (_, values) in self.curves.items()
            if key.startswith(prefix)
        }

    @property
    def tokens(self) -> int:
        """Tokens trained."""
        return int(self.curves["loss"][0][-1])


def read_run(path: Path) -> Run:
    """Read a run directory, of a run that has ended or still goes on.

    Raises:
        UserError: it is none, no loss is recorded, a line is no record, or its tokens are not more than those before.
    """
    metrics = path / METRICS_FILE
    if not metrics.is_file() or not (path / RECIPE_FILE).is_file():
        raise UserError(
            f"{path}: no run, which has a {METRICS_FILE} and a {RECIPE_FILE}; give a run's output directory"
        )
    recipe = load_recipe(path / RECIPE_FILE)
    points: dict[str, tuple[array[float], array[float]]] = {}
    before = 0
    for number, line in enumerate(_whole_lines(metrics), 1):
        tokens, values = _numbers(metrics, number, line)
        if tokens <= before:
            raise UserError(
                f"{metrics}: line {number} has {tokens} tokens, and a record before it {before}; each step is there "
                "once, in their order: remove what is another run's"
            )
        before = tokens
        for key, value in values.items():
            of_tokens, of_values = points.setdefault(key, (array("d"), array("d")))
            of_tokens.append(tokens)
            of_values.append(value)
    if "loss" not in points:
        what = "has no step with a finite loss" if before else "records no step yet; give it a minute"
        raise UserError(f"{metrics}: {what}")
    return Run(path, recipe, {key: (np.array(tokens), np.array(values)) for key, (tokens, values) in points.items()})


def _whole_lines(path: Path) -> Iterator[bytes]:
    """A line that a running or killed process has not finished is left out."""
    try:
        with open(path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a run's output directory") from None


def _numbers(path: Path, number: int, line: bytes) -> tuple[int, dict[str, float]]:
    """Tokens seen, and every finite number of a record; of the maps the means, the rest is left to
    tools/analyze_maps.py."""
    try:
        record = json.loads(line)
        tokens = record["tokens"]
        parts = {key: value for key, value in record.items() if isinstance(value, dict)}
        if "maps" in parts:
            parts["maps"] = means_of(parts["maps"])
        flat = record | {f"{key}.{name}": value for key, part in parts.items() for name, value in part.items()}
        values = {key: float(value) for key, value in flat.items() if type(value) in (int, float)}
        values = {key: value for key, value in values.items() if math.isfinite(value)}
        if type(tokens) is int and tokens > 0 and ("loss" in values or "skipped" in record):
            return tokens, values
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        pass
    raise UserError(f"{path}: line {number} is no record of a step; remove the line")
