"""Checkpoints, their exports, and exports gone wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.checkpoints import small_recipe, small_tokenizer, trained_weights, write_checkpoint
from vha_paddle.config import Recipe
from vha_paddle.export import fp8
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.fold_export import write_export
from vha_paddle.export.prepare import Fold, prepare_export
from vha_paddle.sources.base import Source
from vha_paddle.sources.own import open_own
from vha_paddle.tensor_file import DTYPES, read_tensors, write_tensors

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Made:
    """A checkpoint and what was exported from it."""

    recipe: Recipe
    weights: dict[str, np.ndarray]
    source: Source
    directory: Path


def make(
    folder: Path,
    attention: Mapping[str, Any],
    dtype: ExportDtype = "float32",
    fold: Fold = "all",
    change: Callable[[Tensors], Any] = lambda weights: None,
    **model: Any,
) -> Made:
    """Export a checkpoint of trained-size weights; `change` edits them first."""
    recipe = small_recipe(attention, **model)
    weights = trained_weights(recipe)
    change(weights)
    source = open_own(write_checkpoint(folder / "checkpoint", recipe, weights, small_tokenizer()))
    plain = fold == "all" and not recipe.model.has_maps
    write_export(prepare_export(source, dtype, fold=fold, plain=plain), folder / "out")
    return Made(recipe, weights, source, folder / "out")


def edit(directory: Path, change: Callable[[Tensors], Any]) -> None:
    """Change tensors of a file in place: `change` sees values in float64, and what it puts there is rounded as the
    file's dtype asks, FP8 with new scales."""
    path = directory / "model.safetensors"
    file = read_tensors(path)
    stored = {name: file.read(name) for name in file}
    values = {}
    for name, array in stored.items():
        if name.endswith("_scale_inv"):
            continue
        exact = fp8.dequantise(array, stored[f"{name}_scale_inv"]) if array.dtype == fp8.E4M3 else array
        values[name] = exact.astype(np.float64)
    before = {name: array.copy() for name, array in values.items()}
    change(values)
    for name, array in values.items():
        if np.array_equal(array, before[name]):
            continue
        if stored[name].dtype == fp8.E4M3:
            stored[name], stored[f"{name}_scale_inv"] = fp8.quantise(array)
        else:
            stored[name] = array.astype(stored[name].dtype)
    _write(path, stored, file.metadata)


def edit_stored(directory: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the stored numbers of a file in place."""
    path = directory / "model.safetensors"
    file = read_tensors(path)
    stored = {name: file.read(name) for name in file}
    change(stored)
    _write(path, stored, file.metadata)


def _write(path: Path, stored: Tensors, metadata: Mapping[str, str]) -> None:
    assert {array.dtype for array in stored.values()} <= set(DTYPES.values())
    write_tensors(path, {n: (a.dtype, a.shape) for n, a in stored.items()}, list(stored.values()), metadata)


def next_number(values: np.ndarray, place: tuple[int, ...]) -> None:
    """Make one stored number its neighbour away from zero."""
    bits = values.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[values.dtype.itemsize])
    largest = {np.dtype(ml_dtypes.float8_e4m3fn): 448.0}.get(values.dtype)
    bits[place] += -1 if largest is not None and abs(float(values[place])) == largest else 1
