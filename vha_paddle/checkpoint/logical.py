"""Logical tensors out of files that hold parts of them.

Each rank writes the parts it answers for. The header of its file says which: for every tensor that is not whole,
the logical shape, the view of it that has the cut axes as axes of their own (see `parallel.placement`), and where on
each of the view's axes the part starts and stops. A header is checked against the others before anything is
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
from vha_paddle.parallel.placement import Placement, Seat
from vha_paddle.tensor_file import MAX_AXES, Entry, TensorFile

CUTS_KEY = "parts"
"""Key of a file's metadata: a JSON object from tensor to `Cut`. A tensor without one is whole."""

_CUT_FIELDS = ("shape", "view", "start", "stop")


@dataclass(frozen=True)
class Cut:
    """Which part of a logical tensor a stored one is: [start, stop) along each axis of a view."""

    shape: tuple[int, ...]
    """Logical shape."""
    view: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, seat: Seat) -> Cut | None:
        """The part that a rank holds; None for the whole."""
        start, stop = zip(*placement.box(seat), strict=True)
        return None if stop == placement.view and not any(start) else cls(placement.shape, placement.view, start, stop)

    @property
    def region_shape(self) -> tuple[int, ...]:
        """Shape of the part as a region of the view."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def place(self) -> tuple[slice, ...]:
        """Where the part lies in the view."""
        return tuple(map(slice, self.start, self.stop))

    def common(self, other: Cut) -> Cut | None:
        """What two parts of one view have in common."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        empty = any(first >= last for first, last in zip(start, stop, strict=True))
        return None if empty else Cut(self.shape, self.view, start, stop)

    def within(self, outer: Cut) -> tuple[slice, ...]:
        """Where this part lies in a larger one."""
        bounds = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(start - origin, stop - origin) for start, stop, origin in bounds)


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

    def read_into(self, whole: np.ndarray[Any, Any]) -> None:
        """Read the part into its place in the logical tensor, shaped as the cut's view."""
        place = whole if self.cut is None else whole[self.cut.place]
        if place.flags.c_contiguous:
            self.file.read_into(self.name, place)
        else:
            place[...] = self.file.read(self.name).reshape(place.shape)


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

    def __contains__(self, name: object) -> bool:
        return name in self.entries

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
        whole = Cut(first.shape, first.view, (0,) * len(first.view), first.view)
        return _assembled(entry, whole).reshape(entry.shape)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The logical tensor `name` in memory of its own: no page of a file stays mapped.

        Raises:
            UserError: there is no such tensor, or a file cannot be read.
        """
        entry = self._entry(name)
        first = entry.pieces[0].cut
        region = np.empty(entry.shape if first is None else first.view, entry.dtype)
        for piece in entry.pieces:
            piece.read_into(region)
        return region.reshape(entry.shape)

    def part(self, name: str, placement: Placement, seat: Seat) -> np.ndarray[Any, Any]:
        """What a rank holds of tensor `name`; only that is read where the stored parts are of the same view.

        Raises:
            UserError: there is no such tensor, or it has another logical shape.
        """
        entry = self._entry(name)
        if entry.shape != placement.shape:
            raise UserError(
                f"{self.path}: {name} has shape {list(entry.shape)}, the model needs {list(placement.shape)}; "
                "the recipe does not match the checkpoint"
            )
        wanted, stored = Cut.of(placement, seat), entry.pieces[0].cut
        if wanted is None or stored is None or wanted.view != stored.view:
            return placement.slice_of(self.array(name), seat)
        return _assembled(entry, wanted).reshape(placement.local_shape(seat))

    def _entry(self, name: str) -> LogicalEntry:
        if name not in self.entries:
            raise UserError(f"{self.path}: tensor {name} is missing; the file belongs to another model")
        return self.entries[name]


def natural_key(name: str) -> list[str | int]:
    """Sorts `layers.10` after `layers.9`."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]{1,9})", name))]


def _assembled(entry: LogicalEntry, wanted: Cut) -> np.ndarray[Any, Any]:
    """A part, out of the stored ones that overlap with it: a view of the disk where it lies in one of them."""
    found = []
    for piece in entry.pieces:
        assert piece.cut is not None
        common = wanted.common(piece.cut)
        if common is not None:
            found.append((common, piece, piece.cut))
    if len(found) == 1:
        common, piece, cut = found[0]
        return piece.region()[common.within(cut)]
    region = np.empty(wanted.region_shape, entry.dtype)
    for common, piece, cut in found:
        region[common.within(wanted)] = piece.region()[common.within(cut)]
    return region


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
        fields = [value[field] for field in _CUT_FIELDS]
        valid = (
            name in file.entries
            and all(type(field) is list for field in fields)
            and all(type(number) is int and number >= 0 for field in fields for number in field)
        )
        cut = Cut(*(tuple(field) for field in fields))
        valid = (
            valid
            and max(len(cut.shape), len(cut.view)) <= MAX_AXES
            and len(cut.view) == len(cut.start) == len(cut.stop)
            and math.prod(cut.shape) == math.prod(cut.view)
            and all(a < b <= size for a, b, size in zip(cut.start, cut.stop, cut.view, strict=True))
            and math.prod(cut.region_shape) == math.prod(file.entries[name].shape)
        )
    except (KeyError, TypeError):
        valid = False
    if not valid:
        raise UserError(
            f"{file.path}: metadata {CUTS_KEY} of tensor {name} is not of the form that this version reads: damaged, "
            "or written by another version of vha_paddle; use that version, or another checkpoint"
        )
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
    shape, view = cuts[0][0].shape, cuts[0][0].view
    if len(cuts) != len(pieces) or any((cut.shape, cut.view) != (shape, view) for cut, _ in cuts):
        raise UserError(f"{where} is cut differently in its files; use another checkpoint")
    if any(piece.entry.dtype != first.entry.dtype for piece in pieces):
        raise UserError(f"{where} has several dtypes; use another checkpoint")
    fault = _fault_of_cover(cuts)
    if fault is not None:
        raise UserError(f"{where}: {fault}; use another checkpoint")
    return LogicalEntry(first.entry.dtype, shape, tuple(piece for _, piece in cuts))


def _fault_of_cover(cuts: list[tuple[Cut, Piece]]) -> str | None:
    """What keeps parts of one view from being the cells of a grid over it, each there once; None where they are."""
    cells: dict[Cut, Piece] = {}
    for cut, piece in cuts:
        if cut in cells:
            return f"parts overlap with the one in {piece.file.path.name}"
        cells[cut] = piece
    view, count = cuts[0][0].view, 1
    for axis, size in enumerate(view):
        spans = {(cut.start[axis], cut.stop[axis]): piece for cut, piece in cuts}
        position, name = 0, ""
        for (start, stop), piece in sorted(spans.items(), key=lambda item: item[0]):
            name = piece.file.path.name
            if start != position:
                fault = "a part is missing before the one" if start > position else "parts overlap with the one"
                return f"{fault} in {name}"
            position = stop
        if position != size:
            return f"a part is missing after the one in {name}"
        count *= len(spans)
    if count != len(cells):
        return f"a part is missing beside the one in {cuts[-1][1].file.path.name}"
    return None
