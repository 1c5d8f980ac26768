"""VHA's maps out of a checkpoint, and their records out of metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.checkpoint.layout import MANIFEST_FILE, METRICS_FILE, list_steps
from vha_paddle.errors import UserError
from vha_paddle.maps import MEASURES, MEASURES_OF_GROUPS, layer_figures, map_of, record_of
from vha_paddle.sources.base import Source
from vha_paddle.sources.own import open_own
from vha_paddle.sources.unfolded import is_unfolded, open_unfolded

Maps = dict[int, dict[str, np.ndarray]]
"""Layer to its maps by short name, float64."""


@dataclass(frozen=True)
class MapReport:
    """What is known of a run's maps."""

    source: str
    step: int
    record: dict[str, list[Any]]
    """Every measure of every layer (see `vha_paddle.maps`): of the checkpoint, or else the last one in the metrics."""
    maps: Maps = field(default_factory=dict)
    """The maps of the checkpoint; empty where only metrics were given."""
    history: list[tuple[int, dict[str, list[Any]]]] = field(default_factory=list)
    """Step and record of each line of metrics that has one."""


def read_report(path: Path) -> MapReport:
    """Read a checkpoint, a run directory (its newest checkpoint and its metrics), an unfolded directory, or a
    metrics.jsonl.

    Raises:
        UserError: it is none of these, is damaged, or knows of no maps.
    """
    if path.is_file():
        return _of_history(path, read_history(path))
    metrics = path / METRICS_FILE
    is_run = not (path / MANIFEST_FILE).is_file()
    history = read_history(metrics) if is_run and metrics.is_file() else []
    if is_run and metrics.is_file() and not list_steps(path):
        return _of_history(metrics, history)
    source = open_unfolded(path) if is_unfolded(path) else open_own(path)
    maps = _maps_of(source)
    record = record_of({layer: layer_figures(of_layer) for layer, of_layer in maps.items()})
    return MapReport(str(source.path), source.provenance.get("step", 0), record, maps, history)


def _maps_of(source: Source) -> Maps:
    maps: Maps = {}
    for name in source.weights.specs:
        found = map_of(name)
        if found is not None:
            layer, short = found
            maps.setdefault(layer, {})[short] = source.weights.read(name).astype(np.float64)
    if not maps:
        kind = source.model.attention.kind
        raise UserError(f"{source.path}: model.attention.kind={kind} has no Premix and no Postmix; give a VHA model")
    return maps


def read_history(path: Path) -> list[tuple[int, dict[str, list[Any]]]]:
    """The records of maps in a metrics.jsonl, in its order; a last line without its end is left out.

    Raises:
        UserError: a line is no record.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a metrics.jsonl, a run or a checkpoint") from None
    history = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            values = json.loads(line)
            step, record = values["step"], values.get("maps")
            valid = type(step) is int and (record is None or _is_record(record))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            valid = False
        if not valid:
            raise UserError(f"{path}: line {number} is no record of a step; remove the line")
        if record is not None:
            history.append((step, record))
    return history


def _of_history(path: Path, history: list[tuple[int, dict[str, list[Any]]]]) -> MapReport:
    if not history:
        raise UserError(f"{path}: has no record of maps; train with logging.maps_interval, or give a checkpoint")
    step, record = history[-1]
    return MapReport(str(path), step, record, history=history)


def _is_record(record: dict[str, Any]) -> bool:
    """Whether all lists are of one length and hold what the measures are."""
    measures = dict(record)
    layers = measures.pop("layer")
    return (
        set(measures) <= set(MEASURES)
        and bool(layers)
        and all(type(layer) is int for layer in layers)
        and all(_are_values(name, values, len(layers)) for name, values in measures.items())
    )


def _are_values(measure: str, values: list[Any], count: int) -> bool:
    """Whether a measure has a value in some layer, and the right kind of value in each that has one."""
    found = [value for value in values if value is not None]
    if measure in MEASURES_OF_GROUPS:
        numbers = [number for value in found for number in value]
        valid = all(isinstance(value, list) and value for value in found)
    else:
        numbers, valid = found, True
    return len(values) == count and bool(found) and valid and all(type(number) in (int, float) for number in numbers)


def table(report: MapReport) -> Iterator[str]:
    """A line per layer; of the groups of a layer, the values beside each other."""
    yield f"{report.source}, step {report.step:,}"
    titles = {
        "layer": "layer",
        "premix_distance": "|W-I|",
        "premix_norm": "|W|",
        "premix_rank": "rank of W-I",
        "premix_divergence": "divergence",
        "postmix_distance": "|M-I|",
        "postmix_sigma_max": "sigma",
        "postmix_rank": "rank of M-I",
        "postmix_off_diagonal": "off-diagonal",
    }
    columns = [key for key in titles if key in report.record]
    rows = [[titles[key] for key in columns]]
    for index in range(len(report.record["layer"])):
        rows.append([_shown(report.record[key][index]) for key in columns])
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(_shown(item) for item in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
