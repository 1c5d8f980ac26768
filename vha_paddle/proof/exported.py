"""A finished export, read back: its model, its tensors under our names, and the numbers that each may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vha_paddle.config import Model
from vha_paddle.errors import UserError
from vha_paddle.export import fp8
from vha_paddle.export.config import EXPORT_DTYPES, ExportDtype
from vha_paddle.export.output import REPORT_FILE
from vha_paddle.export.stock import stock_target
from vha_paddle.names import UNFOLDED, Naming, account, check_shape, expected_tensors, from_hf, hf_tensors
from vha_paddle.proof.deepseek import MODEL_TYPES, deepseek_model
from vha_paddle.proof.rounding import Array, Format
from vha_paddle.sources.base import LazyTensors
from vha_paddle.sources.containers import StoredTensors, open_safetensors
from vha_paddle.sources.hf_config import CONFIG_FILE, hf_model, read_json
from vha_paddle.sources.unfolded import is_unfolded, open_unfolded

_QUANTISED = "quantization_config"


@dataclass(frozen=True)
class Exported:
    """An exported directory; nothing of its tensors has been read."""

    path: Path
    model: Model
    naming: Naming
    dtype: ExportDtype
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's tensors, by canonical name."""
    stored: Mapping[str, Array]
    """The files' tensors, by their names there, each read when it is asked for; of FP8 as float32."""
    quantised: frozenset[str]
    """Those of them that are FP8."""

    def read(self, name: str) -> Array:
        """A tensor by canonical name, in our orientation."""
        return from_hf(name, self.shapes[name], self.stored, self.naming)

    def format_of(self, name: str) -> Format:
        """What the values of a tensor of the model, or of the checkpoint's, are rounded to."""
        if self.dtype != "fp8":
            return self.dtype
        shape = self.shapes.get(name)
        if shape is None:  # a map that is folded away
            return "bfloat16"
        return "fp8" if hf_tensors(name, shape, self.naming).keys() <= self.quantised else "bfloat16"

    def in_stored_order(self, name: str, values: Array) -> Array:
        """Values with their output channels in the order that they have in the files, in which blocks are counted."""
        rows = self.naming.rows(name, values.shape[-1])
        return values if rows is None else values[..., rows]


def _dequantised(stored: StoredTensors) -> LazyTensors:
    """Stored tensors, FP8 ones with their scales taken in."""

    def read(name: str) -> Array:
        array = stored.read(name)
        return fp8.dequantise(array, stored.read(fp8.scale_name(name))) if array.dtype == fp8.E4M3 else array

    return LazyTensors(stored.entries, read)


def is_export(directory: Path) -> bool:
    """Whether `tools/fold_export.py` wrote a directory."""
    return (directory / REPORT_FILE).is_file()


def open_exported(directory: Path) -> Exported:
    """Open what `tools/fold_export.py` wrote, of a stock class or of our own.

    Raises:
        UserError: it is no such directory, a file is missing or damaged, or the tensors are not exactly the model's.
    """
    path = directory / CONFIG_FILE
    values = read_json(path)
    model, naming = _model(directory, values)
    dtype = _dtype(values, path)
    stored = open_safetensors(directory)
    shapes, expected = expected_tensors(model), dict[str, tuple[int, ...]]()
    for name, shape in shapes.items():
        expected |= hf_tensors(name, shape, naming)
    quantised = fp8.quantised_tensors(expected) if dtype == "fp8" else frozenset[str]()
    if dtype == "fp8":
        scaled = {name: fp8.stored_tensors(name, shape, quantised) for name, shape in expected.items()}
        expected = {name: shape for parts in scaled.values() for name, (_, shape) in parts.items()}
    account(stored.entries, expected, str(directory))
    for name, size in expected.items():
        check_shape(name, stored.entries[name].shape, size, str(directory))
    return Exported(directory, model, naming, dtype, shapes, _dequantised(stored), quantised)


def _model(directory: Path, values: Mapping[str, Any]) -> tuple[Model, Naming]:
    if is_unfolded(directory):
        return open_unfolded(directory).model, UNFOLDED
    path = directory / CONFIG_FILE
    if values.get("model_type") in MODEL_TYPES:
        model = deepseek_model(values, path)
    else:
        model = hf_model({key: value for key, value in values.items() if key != _QUANTISED}, path)
    return model, stock_target(model, str(path)).naming


def _dtype(values: Mapping[str, Any], path: Path) -> ExportDtype:
    if _QUANTISED in values:
        return "fp8"
    for dtype in EXPORT_DTYPES:
        if values.get("dtype") == dtype:
            return dtype
    raise UserError(
        f"{path}: dtype={values.get('dtype')}: must be one of {', '.join(EXPORT_DTYPES)}; export the model again"
    )
