"""Runs against each other: groups of seeds, smoothed losses, losses at equal tokens and at equal FLOPs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vha_paddle.config.differences import differences
from vha_paddle.counts import active_parameters, kv_cache_values, parameters
from vha_paddle.run_report.read import Curve, Run

MEMORY = ("memory.reserved", "memory.resident")


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but name, seed and directory."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Statistic:
    """A figure over the seeds of a group."""

    mean: float
    deviation: float | None
    """Standard deviation of a sample; None of one seed."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistic:
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), deviation, len(values))


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Runs grouped by what they trained, in the order in which each group's first one is given. Groups of one name are
    told apart by the directory of their first run."""
    found: list[list[Run]] = []
    for run in runs:
        for group in found:
            if all(key.startswith("run.") for key, _, _ in differences(group[0].recipe, run.recipe)):
                group.append(run)
                break
        else:
            found.append([run])
    names = [_common_name(group) for group in found]
    return [
        Group(name if names.count(name) == 1 else f"{name} ({group[0].path})", tuple(group))
        for name, group in zip(names, found, strict=True)
    ]


def _common_name(runs: Sequence[Run]) -> str:
    """What the names begin with in common, without a dangling `-seed` or `_s`."""
    names = [run.name for run in runs]
    if len(names) == 1:
        return names[0]
    return re.sub(r"[-_.](seed|s)?[0-9]*$", "", os.path.commonprefix(names)) or names[0]


def smoothed(curve: Curve, window: float) -> Curve:
    """An exponential mean over tokens: a value counts 1/e as much when it is `window` tokens old.

    Runs of different batch sizes are smoothed alike; the first values are not pulled towards zero.
    """
    tokens, values = curve
    if window <= 0 or len(tokens) < 2:
        return curve
    decays = np.exp(-np.diff(tokens, prepend=tokens[:1]) / window)
    result, total, weight = np.empty(len(values)), 0.0, 0.0
    for i, (decay, value) in enumerate(zip(decays, values, strict=True)):
        total, weight = total * decay + value, weight * decay + 1.0
        result[i] = total / weight
    return tokens, result


def value_at(curve: Curve, tokens: float) -> float | None:
    """The value at a number of tokens, on the line between the two records around it; None outside of the records."""
    if not curve[0][0] <= tokens <= curve[0][-1]:
        return None
    return float(np.interp(tokens, *curve))


def comparison(groups: Sequence[Group], window: float) -> dict[str, Any]:
    """Everything that the table shows, as JSON can hold it.

    `loss` is the smoothed training loss and `val_loss` the validation loss, in nats per token: where each run ends
    (its last evaluation), at the tokens that the shortest run has, and at the FLOPs that the cheapest has. None where
    a run has no record on both sides of that point.
    """
    runs = [run for group in groups for run in group.runs]
    equal_tokens = min(run.tokens for run in runs)
    equal_flops = min(run.tokens * run.flops_per_token for run in runs)
    points: dict[str, Callable[[Run], float]] = {  # tokens of a run
        "end": lambda run: run.tokens,
        "equal_tokens": lambda run: equal_tokens,
        "equal_flops": lambda run: min(run.tokens, equal_flops / run.flops_per_token),  # round-off
    }
    rows = [
        {
            "name": group.name,
            "runs": [str(run.path) for run in group.runs],
            "seeds": [run.recipe.run.seed for run in group.runs],
            **_sizes(group.runs[0]),
            "tokens": [run.tokens for run in group.runs],
            **{
                f"{key}_{place}": _statistic([_loss_at(run, key, point(run), window) for run in group.runs])
                for place, point in points.items()
                for key in ("loss", "val_loss")
            },
            "val_loss_end": _statistic([_last(run, "val_loss") for run in group.runs]),
            "tokens_per_second": _statistic([_median(run, "tokens_per_second") for run in group.runs]),
            "mfu": _statistic([_median(run, "mfu") for run in group.runs]),
            "peak_memory": _statistic([_peak_memory(run) for run in group.runs]),
            "communication_share": _statistic([run.communication_share() for run in group.runs]),
        }
        for group in groups
    ]
    return {"equal_tokens": equal_tokens, "equal_flops": equal_flops, "smoothing_tokens": window, "groups": rows}


def _sizes(run: Run) -> dict[str, Any]:
    model = run.recipe.model
    return {
        "attention": " and ".join(dict.fromkeys(attention.kind for attention in model.attentions)),
        "parameters": parameters(model).total,
        "active_parameters": active_parameters(model),
        "kv_cache_values_per_token": sum(
            kv_cache_values(model.attention_of(layer)) for layer in range(model.num_hidden_layers)
        ),
        "flops_per_token": run.flops_per_token,
    }


def _loss_at(run: Run, key: str, tokens: float, window: float) -> float | None:
    """Evaluations are few and over the same sequences, so they are not smoothed."""
    if key not in run.curves:
        return None
    if key == "loss":
        return value_at(smoothed(run.curves[key], window), tokens)
    return value_at(run.curves[key], tokens)


def _last(run: Run, key: str) -> float | None:
    return float(run.curves[key][1][-1]) if key in run.curves else None


def _median(run: Run, key: str) -> float | None:
    return float(np.median(run.curves[key][1])) if key in run.curves else None


def _peak_memory(run: Run) -> float | None:
    """Bytes of the rank that held most: taken from a GPU, or resident on a CPU."""
    return next((float(run.curves[key][1].max()) for key in MEMORY if key in run.curves), None)


def _statistic(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Over the runs that have a value; None where one has none: a mean over fewer seeds would look like the others'."""
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return None
    statistic = Statistic.of(found)
    return {"mean": statistic.mean, "standard_deviation": statistic.deviation, "seeds": statistic.count}
