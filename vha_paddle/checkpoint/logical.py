"""Logical tensors out of files that hold parts of them.

Each rank writes the parts it answers for. The header of its file says which: for every tensor that is not whole,
the logical shape, the view of it that has the split axis as an axis of its own (see `parallel.placement`), that
axis, and where on it the part starts and stops. A header is checked against the others before anything is
allocated from it: the parts of a tensor cover it exactly once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.errors import UserError
from vha_paddle.parallel.placement import Placement
from vha_paddle.tensor_file import MAX_AXES, Entry, TensorFile

CUTS_KEY = "parts"
"""Key of a file's metadata: a JSON object from tensor to `Cut`. A tensor without one is whole."""

_CUT_FIELDS = ("shape", "view", "axis", "start", "stop")


@dataclass(frozen=True)
class Cut:
    """Which part of a logical tensor a stored one is: [start, stop) along an axis of a view."""

    shape: tuple[int, ...]
    """Logical shape."""
    view: tuple[int, ...]
    axis: int
    start: int
    stop: int

    @classmethod
    def of(cls, placement: Placement, rank: int, degree: int) -> Cut | None:
        """The part that `rank` of `degree` holds; None for the whole."""
        if placement.axis is None or degree == 1:
            return None
        width = placement.view[placement.axis] // degree
        return cls(placement.shape, placement.view, placement.axis, rank * width, (rank + 1) * width)

    @property
    def region_shape(self) -> tuple[int, ...]:
        """Shape of the part as a region of the view."""
        return (*self.view[: self.axis], self.stop - self.start, *self.view[self.axis + 1 :])


def cuts_metadata(cuts: Mapping[str, Cut | None]) -> dict[str, str]:
    """The metadata that records the cuts of a file's tensors; empty where all are whole."""
    parts = {name: asdict(cut) for name, cut in cuts.items() if cut is not None}
    return {CUTS_KEY: json.dumps(parts)} if parts else {}


@dataclass(frozen=True)
class Piece:
    """One stored tensor: the whole of a logical one, or a part."""

    file: TensorFile
    name: str
    entry: Entry
    cut: Cut | None

    def region(self) -> np.ndarray[Any, Any]:
        """A view of the disk, shaped as the region of the cut's view that the part is."""
        array = self.file.array(self.name)
        return array if self.cut is None else array.reshape(self.cut.region_shape)


@dataclass(frozen=True)
class LogicalEntry:
    """One logical tensor, and the stored ones that make it up, in the order of their cuts."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class LogicalTensors:
    """The logical tensors of several files, assembled when asked for.

    Iterating gives their names, layers in the order of their numbers. `path` stands for the files in errors.
    """

    def __init__(self, path: Path, files: Sequence[TensorFile]) -> None:
        """Group the stored tensors by name; reads no tensor.

        Raises:
            UserError: a header is invalid, or the parts of a tensor leave a gap or overlap.
        """
        self.path = path
        self.metadata: dict[str, str] = {}
        pieces: dict[str, list[Piece]] = {}
        for file in files:
            self.metadata |= {key: value for key, value in file.metadata.items() if key != CUTS_KEY}
            cuts = _read_cuts(file)
            for name, entry in file.entries.items():
                pieces.setdefault(name, []).append(Piece(file, name, entry, cuts.get(name)))
        self.entries = {name: _joined(path, pieces[name]) for name in sorted(pieces, key=natural_key)}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The logical tensor `name`: a view of the disk where it lies in one piece, else a new array.

        Raises:
            UserError: there is no such tensor.
        """
        entry = self._entry(name)
        if len(entry.pieces) == 1:
            return entry.pieces[0].region().reshape(entry.shape)
        first = entry.pieces[0].cut
        assert first is not None
        logical = np.empty(first.view, entry.dtype)
        for piece in entry.pieces:
            assert piece.cut is not None
            logical[_along(first.axis, piece.cut.start, piece.cut.stop)] = piece.region()
        return logical.reshape(entry.shape)

    def part(self, name: str, placement: Placement, rank: int, degree: int) -> np.ndarray[Any, Any]:
        """What `rank` of `degree` holds of tensor `name`; only that is read where the stored cut is the same.

        Raises:
            UserError: there is no such tensor, or it has another logical shape.
        """
        entry = self._entry(name)
        if entry.shape != placement.shape:
            raise UserError(
                f"{self.path}: {name} has shape {list(entry.shape)}, the model needs {list(placement.shape)}; "
                "the recipe does not match the checkpoint"
            )
        wanted, stored = Cut.of(placement, rank, degree), entry.pieces[0].cut
        if wanted is None or stored is None or (wanted.view, wanted.axis) != (stored.view, stored.axis):
            return placement.slice_of(self.array(name), rank, degree)
        regions = []
        for piece in entry.pieces:
            assert piece.cut is not None
            start, stop = max(wanted.start, piece.cut.start), min(wanted.stop, piece.cut.stop)
            if start < stop:
                index = _along(wanted.axis, start - piece.cut.start, stop - piece.cut.start)
                regions.append(piece.region()[index])
        region = regions[0] if len(regions) == 1 else np.concatenate(regions, axis=wanted.axis)
        return region.reshape(placement.local_shape(degree))

    def _entry(self, name: str) -> LogicalEntry:
        if name not in self.entries:
            raise UserError(f"{self.path}: tensor {name} is missing; the file belongs to another model")
        return self.entries[name]


def natural_key(name: str) -> list[str | int]:
    """Sorts `layers.10` after `layers.9`."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]{1,9})", name))]


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


def _read_cuts(file: TensorFile) -> dict[str, Cut]:
    """The cuts that a file's metadata states, each checked against the tensor it belongs to."""
    try:
        parts = json.loads(file.metadata.get(CUTS_KEY, "{}"))
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, dict):
        raise UserError(f"{file.path}: metadata {CUTS_KEY} is not a JSON object; the file is damaged")
    return {name: _cut(file, name, value) for name, value in parts.items()}


def _cut(file: TensorFile, name: str, value: Any) -> Cut:
    try:
        shape, view, axis, start, stop = (value[field] for field in _CUT_FIELDS)
        numbers = [*shape, *view, axis, start, stop]
        valid = (
            name in file.entries
            and all(type(number) is int and number >= 0 for number in numbers)
            and max(len(shape), len(view)) <= MAX_AXES
            and math.prod(shape) == math.prod(view)
            and start < stop <= view[axis]
        )
        cut = Cut(tuple(shape), tuple(view), axis, start, stop)
        valid = valid and math.prod(cut.region_shape) == math.prod(file.entries[name].shape)
    except (KeyError, IndexError, TypeError, ValueError):
        valid = False
    if not valid:
        raise UserError(f"{file.path}: metadata {CUTS_KEY} of tensor {name} is invalid; the file is damaged")
    return cut


def _joined(path: Path, pieces: list[Piece]) -> LogicalEntry:
    """Require that the pieces of one tensor cover it exactly once."""
    first = pieces[0]
    where = f"{path}: tensor {first.name}"
    cuts = [(piece.cut, piece) for piece in pieces if piece.cut is not None]
    if not cuts:
        if len(pieces) > 1:
            files = f"{first.file.path.name} and {pieces[1].file.path.name}"
            raise UserError(f"{where} is in {files}; use another checkpoint")
        return LogicalEntry(first.entry.dtype, first.entry.shape, (first,))
    cuts.sort(key=lambda pair: pair[0].start)
    shape, view, axis = cuts[0][0].shape, cuts[0][0].view, cuts[0][0].axis
    if len(cuts) != len(pieces) or any((cut.shape, cut.view, cut.axis) != (shape, view, axis) for cut, _ in cuts):
        raise UserError(f"{where} is cut differently in its files; use another checkpoint")
    if any(piece.entry.dtype != first.entry.dtype for piece in pieces):
        raise UserError(f"{where} has several dtypes; use another checkpoint")
    position = 0
    for cut, piece in cuts:
        if cut.start != position:
            fault = "a part is missing before the one" if cut.start > position else "parts overlap with the one"
            raise UserError(f"{where}: {fault} in {piece.file.path.name}; use another checkpoint")
        position = cut.stop
    if position != view[axis]:
        last = cuts[-1][1].file.path.name
        raise UserError(f"{where}: a part is missing after the one in {last}; use another checkpoint")
    return LogicalEntry(first.entry.dtype, shape, tuple(piece for _, piece in cuts))
