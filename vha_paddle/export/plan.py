"""What an export will do, known before anything is computed: every tensor that is written, and the fate of every one
that the checkpoint holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from vha_paddle.config import Model
from vha_paddle.errors import RunError
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.stock import Target
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX, expected_tensors, hf_tensors
from vha_paddle.sources.base import ROUNDED_FROM, Weights

NUMPY_DTYPES: dict[ExportDtype, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

_FOLDED_INTO = {"q_proj.weight": (PREMIX,), "q_proj.bias": (PREMIX,), "o_proj.weight": (POSTMIX_A, POSTMIX_B)}
_NAMES_SHOWN = 2  # of the tensors that one becomes: the first and the last


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the exported model."""

    name: str
    """As the target's class calls it."""
    sources: tuple[str, ...]
    """The checkpoint's tensors that it is made of, by canonical name; more than one where something is folded into it.
    An expert's is the one that holds all experts of the layer."""
    shape: tuple[int, ...]
    """On disk there: linear weights are [out, in]."""
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Fate:
    """What becomes of one tensor of the model."""

    name: str
    """Canonical."""
    stored: tuple[str, ...]
    """The tensors of the files that it is made of; none where it is zeros that the checkpoint does not state."""
    shape: tuple[int, ...]
    dtype: str
    becomes: tuple[str, ...]
    """Tensors of the export that it is written as; none where it is only folded into others."""
    folded_into: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All that an export reads and writes."""

    targets: tuple[PlannedTensor, ...]
    """In the order in which they are written."""
    fates: tuple[Fate, ...]
    """In the order in which they are read."""
    left_out: dict[str, str]
    """Tensors of the files that nothing is made of, each with the reason."""

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(tensor.num_bytes for tensor in self.targets)

    def as_json(self) -> dict[str, Any]:
        """Values that `json` writes."""
        targets = [asdict(tensor) | {"dtype": tensor.dtype.name, "bytes": tensor.num_bytes} for tensor in self.targets]
        return {
            "sources": [asdict(fate) for fate in self.fates],
            "left_out": self.left_out,
            "targets": targets,
            "bytes": self.num_bytes,
        }


def planned_tensors(model: Model, target: Target, dtype: np.dtype[Any]) -> list[PlannedTensor]:
    """Every tensor of the exported model, in the order in which it is written.

    Args:
        model: the checkpoint's, as it was trained.
        target: what is written; `target.model` lacks the maps that are folded.
    """
    trained, written = expected_tensors(model), expected_tensors(target.model)
    planned = []
    for name, shape in written.items():
        layer, _, short_name = name.rpartition(".self_attn.")
        maps = (f"{layer}.self_attn.{each}" for each in _FOLDED_INTO.get(short_name, ()))
        sources = (name, *(each for each in maps if each in trained and each not in written))
        there = hf_tensors(name, shape, target.naming)
        planned += [PlannedTensor(hf_name, sources, hf_shape, dtype) for hf_name, hf_shape in there.items()]
    return planned


def make_plan(weights: Weights, targets: Sequence[PlannedTensor]) -> Plan:
    """The fate of each tensor of a checkpoint under an export to `targets`.

    Raises:
        RunError: a tensor would be written twice, or one would be made of what is not there, or one that is there would
            not be used: a fault of this program.
    """
    for name, count in Counter(tensor.name for tensor in targets).items():
        if count > 1:
            raise RunError(f"{name} would be written {count} times; nothing was written")
    becomes: dict[str, list[str]] = {name: [] for name in weights.specs}
    folded_into: dict[str, list[str]] = {name: [] for name in weights.specs}
    for tensor in targets:
        for index, name in enumerate(tensor.sources):
            if name not in becomes:
                raise RunError(f"{tensor.name} would be made of {name}, which is not there; nothing was written")
            (folded_into if index else becomes)[name].append(tensor.name)
    if unused := [name for name in becomes if not becomes[name] and not folded_into[name]]:
        raise RunError(f"{unused[0]} would not be used; nothing was written")
    fates = (
        Fate(name, spec.stored, spec.shape, spec.dtype.name, tuple(becomes[name]), tuple(folded_into[name]))
        for name, spec in weights.specs.items()
    )
    return Plan(tuple(targets), tuple(fates), dict(weights.left_out))


def describe_plan(plan: Plan) -> str:
    """The plan to read: a line for each tensor of the checkpoint, one for all that their masters replace, the sums."""
    sizes = {tensor.name: tensor for tensor in plan.targets}
    lines = [_line(fate, sizes) for fate in plan.fates]
    others = {name: reason for name, reason in plan.left_out.items() if not reason.startswith(ROUNDED_FROM)}
    lines += [f"{name} -> left out: {reason}" for name, reason in others.items()]
    if rounded := [name for name in plan.left_out if name not in others]:
        lines.append(f"{_listed(rounded)} -> left out: {ROUNDED_FROM} the masters, which are read")
    dtypes = " and ".join(dict.fromkeys(tensor.dtype.name for tensor in plan.targets))
    stored = sum(len(fate.stored) for fate in plan.fates)
    lines.append(
        f"{stored:,} tensors read, {len(plan.left_out):,} left out; {len(plan.targets):,} tensors to write, each once, "
        f"{plan.num_bytes:,} bytes in {dtypes}"
    )
    return "\n".join(lines)


def _line(fate: Fate, targets: dict[str, PlannedTensor]) -> str:
    what = f"{_listed(fate.stored) or 'zeros'} {list(fate.shape)} {fate.dtype}"
    if not fate.becomes:
        return f"{what} -> folded into {_listed(fate.folded_into)}"
    first = targets[fate.becomes[0]]
    num_bytes = sum(targets[name].num_bytes for name in fate.becomes)
    also = f"; also folded into {_listed(fate.folded_into)}" if fate.folded_into else ""
    return f"{what} -> {_listed(fate.becomes)} {list(first.shape)} {first.dtype.name}, {num_bytes:,} bytes{also}"


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _NAMES_SHOWN:
        return " and ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)} tensors)"
