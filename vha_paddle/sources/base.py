"""What a checkpoint is to those who read it: a model, its tensors, a tokenizer, and where it all came from.

Each kind of checkpoint has a reader that gives a `Source`. The export, its verification and the tools know nothing of
files: they see canonical names (`tensors.py`), our orientation, and values that are read when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vha_paddle.config import Model, Recipe

ROUNDED_FROM = "rounded from"
"""How the reason begins for which a rounded weight beside its master is left out; the master's name follows."""


@dataclass(frozen=True)
class WeightSpec:
    """One tensor of the model, before it is read."""

    shape: tuple[int, ...]
    """Logical shape, a linear weight `[in, out]`."""
    dtype: np.dtype[Any]
    """Floating point; bfloat16 is ml_dtypes'."""
    stored: tuple[str, ...]
    """The tensors of the files that it is made of, as the files call them; none where the model needs zeros (the bias
    of an output projection) that the checkpoint does not state."""


class Weights(Protocol):
    """The tensors of a model, by canonical name; one is in memory at a time."""

    @property
    def specs(self) -> Mapping[str, WeightSpec]:
        """Exactly the model's tensors, in the order of `tensors.model_tensors`."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Tensors of the files that nothing is made of, as the files call them, each with the reason: a copy of the
        embedding as output projection, rounded weights beside their masters."""

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The values of one, in an array that may be changed and that keeps no file mapped.

        Raises:
            UserError: the file is damaged.
        """


class LazyTensors(Mapping[str, np.ndarray]):
    """Tensors by name, each read when it is asked for."""

    def __init__(self, names: Collection[str], read: Callable[[str], np.ndarray[Any, Any]]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Source:
    """A checkpoint that has been opened and understood: nothing of its tensors has been read."""

    path: Path
    kind: str
    """The form it has, in words: `vha_paddle checkpoint`, `PaddleFleet core, flex folder`, …"""
    model: Model
    """As it was trained."""
    weights: Weights
    tokenizer: Path | None
    """A file or directory for `data.tokenizer`; None where the checkpoint has none."""
    provenance: Mapping[str, Any]
    """What the report and the model card say of it: JSON values, by name."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """The files that all of this is read from, by their paths below `path`, each with the SHA-256 that the checkpoint
    states for it; None where it states none. Whoever reads the tensors compares them (`sources.digests`)."""
    recipe: Recipe | None = None
    """Of checkpoints that a run of this package wrote."""
    warnings: tuple[str, ...] = field(default=())
    """What the reader had to assume, a line each."""
