"""Float32 master weights, each compared with the weight that training rounded from it.

The folders of a training checkpoint are written one after the other and copied by hand; the ids of their saves agree
although one of them is of another step. Nothing on disk tells, and a model made of old masters runs and is worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from vha_paddle.errors import UserError
from vha_paddle.sources.containers import StoredTensor, StoredTensors

_CHUNK = 1 << 20
"""Values that are compared at a time."""


class CheckedMasters:
    """Master weights as `StoredTensors`; the first time that one is read, so is its weight."""

    def __init__(self, masters: StoredTensors, weights: StoredTensors, weight_of: Mapping[str, str]) -> None:
        """
        Args:
            weight_of: of each master, the name of the weight in `weights`; the two have one shape.
        """
        self._masters, self._weights, self._weight_of = masters, weights, weight_of
        self._compared: set[str] = set()

    @property
    def path(self) -> Path:
        return self._masters.path

    @property
    def files(self) -> tuple[Path, ...]:
        return self._masters.files

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        return self._masters.entries

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """See `StoredTensors.read`.

        Raises:
            UserError: also, where the weight is not its rounding.
        """
        values = self._masters.read(name)
        if name not in self._compared:
            self._compare(name, values)
            self._compared.add(name)
        return values

    def _compare(self, name: str, master: np.ndarray[Any, Any]) -> None:
        """Require that the weight lies within a step of its dtype: some programs cut off instead of rounding."""
        weight = self._weights.read(self._weight_of[name])
        step = ml_dtypes.finfo(weight.dtype)
        wrong, largest = 0, 0.0
        pairs = (each.reshape(-1) for each in (master, weight))
        exact, stored = (np.array_split(each, -(-each.size // _CHUNK) or 1) for each in pairs)
        for x, y in zip(exact, stored, strict=True):
            x = x.astype(np.float32)
            off = np.abs(y.astype(np.float32) - x)
            far = off > float(step.eps) * np.abs(x) + float(step.smallest_subnormal)
            wrong += int(far.sum())
            largest = max(largest, float(off[far].max(initial=0.0)))
        if wrong:
            raise UserError(
                f"{self.path}: {name} is not what {self._weights.path.name}/ has of it: {wrong:,} of {master.size:,} "
                f"values differ by more than rounding, by up to {largest:.2g}; the two are of different saves: copy "
                f"both again, or take {self.path.name}/ away to read the rounded weights"
            )
