"""Which part of a logical tensor a rank holds, and what its gradient needs.

Every parameter has one logical shape, the same at every degree; `Placement` says how tensor and expert parallelism
cut it. The split axis is an axis of a *view* of the logical tensor: `o_proj` of VHA is `[N*H, D]`, seen as
`[K, P, H, D]` and cut on P, so a rank's rows are not contiguous. Experts are stacked along the first axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Decay = Literal["matrix", "gain", "bias", "premix", "postmix"]


@dataclass(frozen=True)
class Seat:
    """A rank's place on the axes of the mesh that cut parameters."""

    tensor_rank: int = 0
    tensor_degree: int = 1
    expert_rank: int = 0
    expert_degree: int = 1


@dataclass(frozen=True)
class Placement:
    """How one logical tensor lies on the tensor and expert ranks."""

    shape: tuple[int, ...]
    """Logical shape."""
    view: tuple[int, ...]
    """A factorisation of `shape` that has the split axis as an axis of its own."""
    axis: int | None
    """Axis of `view` that the tensor ranks cut into equal parts; None when every one holds the whole of it."""
    partial_gradient: bool = False
    """Whole on every tensor rank, used on part of the work by each: the gradient is the sum over the ranks."""
    by_expert: bool = False
    """The first axis counts experts, which the expert ranks divide equally."""

    @classmethod
    def replicated(cls, shape: tuple[int, ...], partial_gradient: bool) -> Placement:
        return cls(shape, shape, None, partial_gradient)

    @classmethod
    def split(cls, shape: tuple[int, ...], axis: int, view: tuple[int, ...] | None = None) -> Placement:
        view = shape if view is None else view
        assert math.prod(view) == math.prod(shape), f"{view} is not a view of {shape}"
        return cls(shape, view, axis)

    @classmethod
    def experts(cls, shape: tuple[int, ...], axis: int) -> Placement:
        """Matrices `[E, in, out]` of which an expert rank holds some, and of those a tensor rank its part of `axis`."""
        assert axis != 0, "the first axis is the expert ranks' to divide"
        return cls(shape, shape, axis, by_expert=True)

    def of_one_expert(self) -> Placement:
        """How the tensor ranks hold one of the matrices of `experts`."""
        assert self.by_expert and self.axis is not None
        return Placement.split(self.shape[1:], self.axis - 1)

    def of_columns(self) -> Placement:
        """How the tensor ranks hold one value for each column of a weight `[in, out]`: the bias of a projection."""
        if self.axis is None:
            return Placement.replicated(self.shape[1:], self.partial_gradient)
        assert self.axis > 0 and self.view[0] == self.shape[0], "the ranks divide the columns"
        return Placement.split(self.shape[1:], self.axis - 1, self.view[1:])

    def box(self, seat: Seat) -> tuple[tuple[int, int], ...]:
        """[start, stop) of what a rank holds, on each axis of the view."""
        held = [(0, size) for size in self.view]
        if self.axis is not None:
            held[self.axis] = _share(self.view[self.axis], seat.tensor_rank, seat.tensor_degree)
        if self.by_expert:
            held[0] = _share(self.view[0], seat.expert_rank, seat.expert_degree)
        return tuple(held)

    def local_shape(self, seat: Seat) -> tuple[int, ...]:
        """Shape of one rank's parameter: that of the logical tensor with the cut axes divided."""
        shape = list(self.shape)
        if self.axis is not None:
            divided = [axis for axis in range(len(self.shape)) if self._starts(axis)]
            shape[divided[-1]] //= seat.tensor_degree
        if self.by_expert:
            shape[0] //= seat.expert_degree
        return tuple(shape)

    def _starts(self, axis: int) -> bool:
        """Whether logical `axis` begins at or before the split axis of the view."""
        assert self.axis is not None
        return math.prod(self.shape[:axis]) <= math.prod(self.view[: self.axis])

    def slice_of(self, logical: np.ndarray[Any, Any], seat: Seat) -> np.ndarray[Any, Any]:
        """The part of a logical tensor that a rank holds (a copy when the rows are not contiguous)."""
        return self._region(logical, seat).reshape(self.local_shape(seat))

    def write_slice(self, logical: np.ndarray[Any, Any], local: np.ndarray[Any, Any], seat: Seat) -> None:
        """Put a rank's part into the logical tensor, in place."""
        region = self._region(logical, seat)
        region[...] = local.reshape(region.shape)

    def _region(self, logical: np.ndarray[Any, Any], seat: Seat) -> np.ndarray[Any, Any]:
        assert logical.shape == self.shape
        return logical.reshape(self.view)[tuple(slice(start, stop) for start, stop in self.box(seat))]


def _share(size: int, rank: int, degree: int) -> tuple[int, int]:
    width = size // degree
    return rank * width, (rank + 1) * width


@dataclass(frozen=True)
class ParameterInfo:
    """What the trainer and the checkpoint know of a parameter; stands on the parameter as `.info`."""

    name: str
    """Canonical full name, the same in every layout."""
    placement: Placement
    decay: Decay
    """Which weight decay applies: matrices decay to zero, gains and biases never, VHA's maps as the recipe says."""
    is_tied_copy: bool = False
    """The tied embedding as the last pipeline stage holds it: the first stage's is the one that counts."""

    @property
    def is_expert(self) -> bool:
        """Whether other ranks of the expert axis hold other experts."""
        return self.placement.by_expert


def info_of(parameter: Any) -> ParameterInfo:
    """The `ParameterInfo` a parameter was created with."""
    info: ParameterInfo = parameter.info
    return info
