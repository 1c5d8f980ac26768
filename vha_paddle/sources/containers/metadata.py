"""The `.metadata` file of a flex folder: of every tensor, which piece of it lies in which file.

Source: Paddle 3.3.1, distributed/flex_checkpoint/dcp/metadata.py and save_state_dict.py; older versions have the same
classes with fewer fields under distributed/checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vha_paddle.errors import UserError
from vha_paddle.sources.containers.arrays import BFLOAT16
from vha_paddle.sources.containers.disk import DiskFile
from vha_paddle.sources.containers.records import DamagedPickle, Pairs, Record, checked_size, is_ints
from vha_paddle.sources.containers.stream import read_pickle

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
} | {"bfloat16": BFLOAT16}
"""Paddle's names of the dtypes that can be read."""

_RANK_FILE = re.compile(r"[0-9]{1,9}_[0-9]{1,9}\.distcp")


@dataclass(frozen=True)
class Piece:
    """What one rank's file holds of a tensor: a box of it, or a range of the elements of a box, in C order."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the box."""
    elements: tuple[int, int] | None
    """First and behind the last element; None for the whole box, stored in its shape rather than flat."""
    file: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape) if self.elements is None else self.elements[1] - self.elements[0]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.elements is None else (self.num_elements,)

    @property
    def place(self) -> tuple[Any, ...]:
        """The same for two copies of one piece, and for no others."""
        return self.offset, self.shape, self.elements


@dataclass(frozen=True)
class PiecedTensor:
    """A tensor and its pieces, copies included."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    """Of the values; None where the metadata is of a Paddle that did not write it."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class _Described:
    """What `state_dict_metadata` says of a piece."""

    dtype: np.dtype[Any] | None
    global_shape: tuple[int, ...] | None


_Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, int] | None]


def read_metadata(file: DiskFile) -> dict[str, PiecedTensor]:
    """The tensors of a flex folder, by name, and where their pieces are; that they cover them is not checked.

    Raises:
        UserError: the file is damaged, holds what is not data, or contradicts itself.
    """
    value = read_pickle(file)
    try:
        if not isinstance(value, Record) or value.kind != "Metadata":
            raise DamagedPickle("no Metadata")
        described = _described(value.fields.get("state_dict_metadata"))
        pieces = _pieces(value.fields.get("storage_metadata"), described)
        return {name: _tensor(name, places, pieces[name]) for name, places in described.items()}
    except DamagedPickle as error:
        raise UserError(f"{file.path}: does not describe a checkpoint ({error}); copy the file again") from None


def _described(value: Any) -> dict[str, dict[_Place, _Described]]:
    tensors: dict[str, dict[_Place, _Described]] = {}
    for name, records in _items(value, "state_dict_metadata"):
        if not isinstance(name, str) or name in tensors or not isinstance(records, list) or not records:
            raise DamagedPickle("state_dict_metadata")
        tensors[name] = {}
        for record in records:
            fields = _fields(record, "LocalTensorMetadata")
            shape = fields.get("global_shape")
            facts = _Described(_dtype(name, fields.get("dtype")), None if shape is None else _shape(name, shape))
            place = _place(name, fields)
            if tensors[name].setdefault(place, facts) != facts:
                raise DamagedPickle(f"two descriptions of one piece of {ascii(name)}")
    return tensors


def _pieces(value: Any, described: dict[str, dict[_Place, _Described]]) -> dict[str, list[Piece]]:
    pieces: dict[str, list[Piece]] = {name: [] for name in described}
    held: set[tuple[str, str]] = set()
    for index, file in _items(value, "storage_metadata"):
        fields = _fields(index, "LocalTensorIndex")
        name = fields.get("tensor_key")
        if not isinstance(name, str) or name not in described:
            raise DamagedPickle("storage_metadata of a tensor that is not described")
        if not isinstance(file, str) or not _RANK_FILE.fullmatch(file):
            raise DamagedPickle(f"{ascii(name)} in a file that is not named RANK_ID.distcp")
        if fields.get("local_shape") is None:  # older versions: the piece with this offset
            fields = fields | {"local_shape": _shape_at(name, fields, described[name])}
        offset, shape, elements = place = _place(name, fields)
        if place not in described[name]:
            raise DamagedPickle(f"a piece of {ascii(name)} that is not described")
        if (name, file) in held:
            raise DamagedPickle(f"two pieces of {ascii(name)} in {file}, which holds one array of a name")
        held.add((name, file))
        pieces[name].append(Piece(offset, shape, elements, file))
    return pieces


def _shape_at(name: str, fields: dict[str, Any], places: dict[_Place, _Described]) -> tuple[int, ...]:
    offset = _shape(name, fields.get("global_offset"))
    shapes = {place[1] for place in places if place[0] == offset}
    if len(shapes) != 1:
        raise DamagedPickle(f"a piece of {ascii(name)} that is not described")
    return shapes.pop()


def _tensor(name: str, places: dict[_Place, _Described], pieces: list[Piece]) -> PiecedTensor:
    if {piece.place for piece in pieces} != places.keys():
        raise DamagedPickle(f"a piece of {ascii(name)} that is in no file")
    if len(set(places.values())) != 1:
        raise DamagedPickle(f"pieces of {ascii(name)} that differ in dtype or in the shape of the whole")
    facts = next(iter(places.values()))
    shape = facts.global_shape
    if shape is None:  # older versions: as far as the pieces reach
        if len({len(piece.shape) for piece in pieces}) != 1:
            raise DamagedPickle(f"pieces of {ascii(name)} with different numbers of axes")
        ends = [[a + n for a, n in zip(piece.offset, piece.shape, strict=True)] for piece in pieces]
        shape = tuple(max(axis) for axis in zip(*ends, strict=True))
    checked_size(shape)
    return PiecedTensor(shape, facts.dtype, tuple(pieces))


def _items(value: Any, name: str) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise DamagedPickle(name)
    yield from value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind != kind:
        raise DamagedPickle(f"something else where a {kind} belongs")
    return value.fields


def _shape(name: str, value: Any) -> tuple[int, ...]:
    if not is_ints(value):
        raise DamagedPickle(f"a shape or offset of {ascii(name)}")
    checked_size(value)
    return tuple(value)


def _place(name: str, fields: dict[str, Any]) -> _Place:
    offset, shape = _shape(name, fields.get("global_offset")), _shape(name, fields.get("local_shape"))
    is_flattened, elements = fields.get("is_flattened", False), fields.get("flattened_range")
    if len(offset) != len(shape) or not isinstance(is_flattened, bool) or (elements is not None) != is_flattened:
        raise DamagedPickle(f"a piece of {ascii(name)} that is none")
    if elements is None:
        return offset, shape, None
    if not is_ints(elements) or len(elements) != 2 or not elements[0] <= elements[1] <= math.prod(shape):
        raise DamagedPickle(f"a range of the elements of {ascii(name)}")
    return offset, shape, (elements[0], elements[1])


def _dtype(name: str, value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in DTYPES:
        shown = ascii(value) if isinstance(value, str) else "no text"
        raise DamagedPickle(f"{ascii(name)} has dtype {shown}; {', '.join(DTYPES)} can be read")
    return DTYPES[value]
