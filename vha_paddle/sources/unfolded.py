"""Model directories of our own class: a model as it was trained, or folded in part, in Hugging Face's file layout.

`tools/fold_export.py --no-fold` and `--allow-partial` write them. config.json names a class that no other program has,
so that none loads the weights as what they are not, and holds the `model` section of the recipe; weights have Hugging
Face's names and orientation where it has some, Premix and Postmix ours (`names.UNFOLDED`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from vha_paddle.config import Model
from vha_paddle.config.check_model import check_model
from vha_paddle.data.tokenizer_files import IDENTIFYING_FILES
from vha_paddle.errors import UserError
from vha_paddle.names import UNFOLDED, from_hf
from vha_paddle.sources.base import LazyTensors, Source
from vha_paddle.sources.containers import StoredTensors, open_safetensors
from vha_paddle.sources.hf_config import CONFIG_FILE, read_json
from vha_paddle.sources.hf_specs import hf_specs

KIND = "unfolded vha_paddle directory"
MODEL_TYPE, ARCHITECTURE = "vha_qwen3", "VHAQwen3ForCausalLM"
MODEL_KEY, FOLD_KEY = "model", "fold"
REPORT_FILE = "fold_report.json"
FOLD_STATES = ("none", "partial")
"""What the `fold` key of config.json says: as it was trained, or as far as it folds."""

_FLOATING = ("float64", "float32", "float16", "bfloat16")


class UnfoldedWeights:
    """The tensors of such a directory; see `sources.base.Weights`."""

    def __init__(self, model: Model, stored: StoredTensors) -> None:
        """Check names, shapes and dtypes; reads no tensor.

        Raises:
            UserError: the tensors are not exactly the model's.
        """
        self.stored = stored
        self.left_out: dict[str, str] = {}
        rule = "the tensors must be floating point, of one dtype each"
        self.specs = hf_specs(model, stored, UNFOLDED, self.left_out, _FLOATING, rule)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return from_hf(name, self.specs[name].shape, LazyTensors(self.stored.entries, self.stored.read), UNFOLDED)


def is_unfolded(path: Path) -> bool:
    """Whether a directory says that it is one of our own class."""
    return (path / CONFIG_FILE).is_file() and read_json(path / CONFIG_FILE).get("model_type") == MODEL_TYPE


def open_unfolded(path: Path) -> Source:
    """A directory that `--no-fold` or `--allow-partial` wrote.

    Raises:
        UserError: it is none, or is incomplete or damaged.
    """
    file = path / CONFIG_FILE
    values = read_json(file)
    if values.get("model_type") != MODEL_TYPE:
        raise UserError(f"{file}: model_type={values.get('model_type')}: must be {MODEL_TYPE}; give an unfolded export")
    state = values.get(FOLD_KEY)
    if state not in FOLD_STATES:
        raise UserError(f"{file}: {FOLD_KEY}={state}: must be one of {', '.join(FOLD_STATES)}; export the model again")
    model = _model(values.get(MODEL_KEY), file)
    weights = UnfoldedWeights(model, open_safetensors(path))
    return Source(
        path=path,
        kind=KIND,
        model=model,
        weights=weights,
        tokenizer=path if any((path / name).is_file() for name in IDENTIFYING_FILES) else None,
        provenance=_provenance(path, state),
        files=_files(path, weights.stored),
    )


def _model(section: Any, file: Path) -> Model:
    try:
        model = Model.model_validate(section)
        check_model(model)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join([MODEL_KEY, *(str(part) for part in fault["loc"])])
        raise UserError(f"{file}: {key}: {fault['msg']}; export the model again") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return model


def _provenance(path: Path, state: str) -> dict[str, Any]:
    """What the report of the export says of the checkpoint, and the digest of that report, which holds the files'."""
    found: dict[str, Any] = {"directory": path.resolve().name, "fold": state}
    report = path / REPORT_FILE
    if report.is_file():
        found["report_sha256"] = hashlib.sha256(report.read_bytes()).hexdigest()
        origin = read_json(report).get("source")
        if isinstance(origin, dict):
            found |= {key: value for key, value in origin.items() if key not in found}
    return found


def _files(path: Path, stored: StoredTensors) -> dict[str, str | None]:
    """What was read, with the digests that the report of the export states."""
    report = path / REPORT_FILE
    recorded = read_json(report).get("files") if report.is_file() else None
    found: dict[str, str | None] = {}
    for file in (path / CONFIG_FILE, *stored.files):
        record = recorded.get(file.name) if isinstance(recorded, dict) else None
        digest = record.get("sha256") if isinstance(record, dict) else None
        found[file.name] = digest if isinstance(digest, str) else None
    return found
