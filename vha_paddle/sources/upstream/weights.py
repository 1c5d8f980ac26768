"""The tensors of a model out of those of a foreign checkpoint, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vha_paddle.config import Model
from vha_paddle.names import account
from vha_paddle.sources.base import WeightSpec
from vha_paddle.sources.upstream.heads import Parts
from vha_paddle.sources.upstream.stored import Part
from vha_paddle.tensors import model_tensors


class UpstreamWeights:
    """See `Weights`. A tensor that several of ours lie in is read once for each, so that one is in memory at a time."""

    def __init__(self, parts: Parts, model: Model, left_out: Mapping[str, str], source: str) -> None:
        """
        Args:
            parts: what each tensor of the model is made of, by canonical name.

        Raises:
            UserError: they are not exactly the model's.
        """
        self.left_out = left_out
        self._parts = parts
        shapes = {spec.name: spec.shape for spec in model_tensors(model)}
        account(parts, shapes, source)
        self.specs = {name: _spec(shape, parts[name]) for name, shape in shapes.items()}

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """See `Weights.read`."""
        spec, parts = self.specs[name], self._parts[name]
        if len(parts) == 1:
            return parts[0].read().reshape(spec.shape)
        values = np.zeros(spec.shape, spec.dtype)
        for index, part in enumerate(parts):
            values[index] = part.read()
        return values


def _spec(shape: tuple[int, ...], parts: tuple[Part, ...]) -> WeightSpec:
    dtype = np.result_type(*(part.dtype for part in parts)) if parts else np.dtype(np.float32)
    return WeightSpec(shape, dtype, tuple(part.entry.name for part in parts))
