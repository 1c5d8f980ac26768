"""Checkpoints that runs of this package wrote, under whatever layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.checkpoint.layout import (
    MANIFEST_FILE,
    Checkpoint,
    open_checkpoint,
    open_without_digests,
    other_files,
    sha256_of,
)
from vha_paddle.checkpoint.logical import LogicalTensors
from vha_paddle.counts import parameters
from vha_paddle.errors import UserError
from vha_paddle.names import account, check_shape, expected_tensors
from vha_paddle.sources.base import ROUNDED_FROM, Source, WeightSpec
from vha_paddle.sources.digests import digest_of_list
from vha_paddle.sources.hf_config import ARCHITECTURES, read_json
from vha_paddle.tensor_file import DTYPE_NAMES

KIND = "vha_paddle checkpoint"
IMPORT_REPORT_FILE, WARM_START_REPORT_FILE = "import_report.json", "warm_start_report.json"
"""In a checkpoint that no run has trained: where its weights came from."""
_FLOATING = ("F64", "F32", "F16", "BF16")
_MASTER = ".master"


class OwnWeights:
    """The parameters of a checkpoint: of a bfloat16 run its float32 master weights, which training updates and of
    which the parameters are roundings."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Check names, shapes and dtypes; reads no tensor.

        Raises:
            UserError: the tensors are not exactly the recipe's.
        """
        model, optimizer = checkpoint.model_tensors(), checkpoint.optimizer_tensors()
        expected = expected_tensors(checkpoint.recipe.model)
        account(model, expected, str(model.path))
        self.specs: dict[str, WeightSpec] = {}
        self.left_out: dict[str, str] = {}
        self._found: dict[str, LogicalTensors] = {}
        for name, shape in expected.items():
            tensors, stored = model, name
            if name + _MASTER in optimizer:
                tensors, stored = optimizer, name + _MASTER
                self.left_out[name] = f"{ROUNDED_FROM} {stored}"
            entry = tensors.entries[stored]
            check_shape(stored, entry.shape, shape, str(tensors.path))
            if DTYPE_NAMES[entry.dtype] not in _FLOATING:
                raise UserError(f"{tensors.path}: {stored} holds {entry.dtype}; the tensors must be floating point")
            self.specs[name] = WeightSpec(shape, entry.dtype, (stored,))
            self._found[name] = tensors

    @property
    def files(self) -> set[str]:
        """Names of the files that anything is read from: none of an optimizer's where it has no masters."""
        found = self._found.items()
        pieces = (tensors.entries[self.specs[name].stored[0]].pieces for name, tensors in found)
        return {piece.file.path.name for each in pieces for piece in each}

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return self._found[name].read(self.specs[name].stored[0])


def open_own(path: Path, with_digests: bool = True) -> Source:
    """A checkpoint of this package, or the newest of a run directory.

    Args:
        with_digests: whether all files are compared with the manifest's digests before anything else, which reads
            them. An export compares what it reads while it reads (`Source.files`).

    Raises:
        UserError: there is none, it is incomplete or damaged, or its tensors are not its recipe's.
    """
    checkpoint = open_checkpoint(path) if with_digests else open_without_digests(path)
    weights = OwnWeights(checkpoint)
    read = weights.files | set(other_files(checkpoint.files))
    return Source(
        path=checkpoint.path,
        kind=KIND,
        model=checkpoint.recipe.model,
        weights=weights,
        tokenizer=checkpoint.tokenizer_path,
        provenance=_provenance(checkpoint),
        files={name: checkpoint.files[name].sha256 for name in sorted(read)},
        recipe=checkpoint.recipe,
    )


def _provenance(checkpoint: Checkpoint) -> Mapping[str, Any]:
    recipe, state = checkpoint.recipe, checkpoint.state
    return {
        "run": recipe.run.name,
        "checkpoint": checkpoint.path.resolve().name,
        "step": state.step,
        "tokens": state.tokens,
        "samples": state.samples,
        "seed": state.seed,
        "sequence_length": recipe.data.sequence_length,
        "vha_paddle": state.version,
        "manifest_sha256": sha256_of(checkpoint.path / MANIFEST_FILE),
        "parameters": parameters(recipe.model).total,
        **_origin(checkpoint),
    }


def _origin(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Where the weights came from that training, if there was any, began with."""
    path, recipe = checkpoint.path, checkpoint.recipe
    for name in (IMPORT_REPORT_FILE, WARM_START_REPORT_FILE):
        if not (path / name).is_file():
            continue
        report = read_json(path / name)
        try:
            if name == WARM_START_REPORT_FILE:
                return {"started_from": str(report["started_from"])}
            architecture = ARCHITECTURES[report["model_type"]]
            imported = {"directory": report["directory"], "architecture": architecture}
            return {"imported_from": imported | {"files_sha256": digest_of_list(report["files"])}}
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{path / name}: does not say where the checkpoint came from; make it again") from None
    return {} if recipe.run.start_from is None else {"started_from": recipe.run.start_from}
