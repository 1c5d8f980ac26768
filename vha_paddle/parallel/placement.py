"""Which slice of a logical tensor a rank holds, and what its gradient needs.

Every parameter has one logical shape, the same at every degree; `Placement` says how tensor parallelism cuts it.
The split axis is an axis of a *view* of the logical tensor: `o_proj` of VHA is `[N*H, D]`, seen as `[K, P, H, D]`
and cut on P, so a rank's rows are not contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Decay = Literal["matrix", "gain", "premix", "postmix"]


@dataclass(frozen=True)
class Placement:
    """How one logical tensor lies on the tensor-parallel ranks."""

    shape: tuple[int, ...]
    """Logical shape."""
    view: tuple[int, ...]
    """A factorisation of `shape` that has the split axis as an axis of its own."""
    axis: int | None
    """Axis of `view` that is cut into equal parts; None when every rank holds the whole tensor."""
    partial_gradient: bool = False
    """Whole on every rank, used on part of the work by each: the gradient is the sum over the ranks."""

    @classmethod
    def replicated(cls, shape: tuple[int, ...], partial_gradient: bool) -> Placement:
        return cls(shape, shape, None, partial_gradient)

    @classmethod
    def split(cls, shape: tuple[int, ...], axis: int, view: tuple[int, ...] | None = None) -> Placement:
        view = shape if view is None else view
        assert math.prod(view) == math.prod(shape), f"{view} is not a view of {shape}"
        return cls(shape, view, axis)

    def local_shape(self, degree: int) -> tuple[int, ...]:
        """Shape of one rank's parameter: that of the logical tensor with the split axis divided."""
        if self.axis is None:
            return self.shape
        divided = [axis for axis in range(len(self.shape)) if self._starts(axis)]
        shape = list(self.shape)
        shape[divided[-1]] //= degree
        return tuple(shape)

    def _starts(self, axis: int) -> bool:
        """Whether logical `axis` begins at or before the split axis of the view."""
        assert self.axis is not None
        return math.prod(self.shape[:axis]) <= math.prod(self.view[: self.axis])

    def slice_of(self, logical: np.ndarray[Any, Any], rank: int, degree: int) -> np.ndarray[Any, Any]:
        """The part of a logical tensor that `rank` of `degree` holds (a copy when the rows are not contiguous)."""
        if self.axis is None:
            return logical
        return self._region(logical, rank, degree).reshape(self.local_shape(degree))

    def write_slice(self, logical: np.ndarray[Any, Any], local: np.ndarray[Any, Any], rank: int, degree: int) -> None:
        """Put a rank's part into the logical tensor, in place."""
        if self.axis is None:
            logical[...] = local
            return
        region = self._region(logical, rank, degree)
        region[...] = local.reshape(region.shape)

    def _region(self, logical: np.ndarray[Any, Any], rank: int, degree: int) -> np.ndarray[Any, Any]:
        assert self.axis is not None and logical.shape == self.shape
        viewed = logical.reshape(self.view)
        width = self.view[self.axis] // degree
        index = [slice(None)] * len(self.view)
        index[self.axis] = slice(rank * width, (rank + 1) * width)
        return viewed[tuple(index)]


@dataclass(frozen=True)
class ParameterInfo:
    """What the trainer and the checkpoint know of a parameter; stands on the parameter as `.info`."""

    name: str
    """Canonical full name, the same in every layout."""
    placement: Placement
    decay: Decay
    """Which weight decay applies: matrices decay to zero, gains never, VHA's maps as the recipe says."""
    is_tied_copy: bool = False
    """The tied embedding as the last pipeline stage holds it: the first stage's is the one that counts."""
    is_expert: bool = False
    """Part of one expert: other ranks of the expert axis hold other experts."""


def info_of(parameter: Any) -> ParameterInfo:
    """The `ParameterInfo` a parameter was created with."""
    info: ParameterInfo = parameter.info
    return info
