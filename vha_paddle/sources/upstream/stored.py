"""The tensors of a foreign checkpoint by name: the best copy of each, and which of them are spoken for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vha_paddle.contiguous import transposed
from vha_paddle.errors import UserError
from vha_paddle.sources.base import ROUNDED_FROM
from vha_paddle.sources.containers import Container, StoredTensor, StoredTensors
from vha_paddle.sources.upstream.masters import CheckedMasters

PREFIX = "model."  # in training checkpoints; gone after a merge
MASTER = ".w_0"


@dataclass(frozen=True)
class Entry:
    """One tensor, in the copy that it is read from."""

    name: str
    """As the files call it."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source: StoredTensors
    rounded: str | None = None
    """The copy that was rounded from this one and is not read."""


@dataclass(frozen=True)
class Part:
    """What a tensor of ours, or one expert of it, is in a stored tensor."""

    entry: Entry
    view: tuple[int, ...] | None = None
    """Shape that the stored tensor is seen in; None is its own."""
    take: tuple[int | slice, ...] = ()
    """Index into the view."""
    is_transposed: bool = False
    """Whether the last two axes of what is taken are `[out, in]`."""
    scale: float = 1.0
    """Multiplied in float64."""

    def read(self) -> np.ndarray[Any, Any]:
        """The values, in an array of their own; the stored tensor is in memory meanwhile."""
        values = self.entry.source.read(self.entry.name)
        if self.view is not None:
            values = values.reshape(self.view)[self.take]
        if self.is_transposed:
            values = transposed(values)
        elif self.take:
            values = np.array(values)
        return values if self.scale == 1.0 else values.astype(np.float64) * self.scale

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.entry.dtype if self.scale == 1.0 else np.dtype(np.float64)


class Stored:
    """The tensors of a container by their names without the prefix `model.`.

    A float32 master weight is taken in place of the weight that was rounded from it, tensor by tensor, and compared
    with it when it is read.
    """

    def __init__(self, container: Container) -> None:
        """
        Raises:
            UserError: a tensor is stored under two names, is not floating point, or has a master of another shape.
        """
        self.path = container.path
        self.left_out: dict[str, str] = {}
        self.has_masters = False
        self._weights = container.weights
        self._weight_names: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        self._used: set[str] = set()
        for name, tensor in container.weights.entries.items():
            short = name.removeprefix(PREFIX)
            self._check_dtype(tensor)
            if short in self._entries:
                raise UserError(f"{self.path}: holds both {self._entries[short].name} and {name}; keep one of the two")
            self._entries[short] = Entry(name, tensor.shape, tensor.dtype, container.weights)
            self._weight_names[short] = name
        if (masters := container.masters) is not None:
            weight_of = {name: self._weight_of(name) for name in masters.entries}
            checked = CheckedMasters(masters, container.weights, weight_of)
            for name, tensor in masters.entries.items():
                self._check_dtype(tensor)
                self._take_master(Entry(name, tensor.shape, tensor.dtype, checked, rounded=weight_of[name]))

    def _check_dtype(self, tensor: StoredTensor) -> None:
        if tensor.dtype.kind != "f" and tensor.dtype.name != "bfloat16":
            raise UserError(f"{self.path}: {tensor.name} holds {tensor.dtype}; the tensors must be floating point")

    def _weight_of(self, master: str) -> str:
        """The weight of a master, as the files call it."""
        weight = self._weight_names.get(_short(master))
        if weight is None:
            raise UserError(f"{self.path}: has a master weight {master} and no weight of it; copy all its files")
        return weight

    def _take_master(self, master: Entry) -> None:
        short = _short(master.name)
        weight = self._entries[short]
        if weight.shape != master.shape:
            raise UserError(
                f"{self.path}: {weight.name} has shape {list(weight.shape)} and its master weight "
                f"{list(master.shape)}; the two must be of the same save"
            )
        self._entries[short] = master
        self.has_masters = True

    def __contains__(self, short: str) -> bool:
        return short in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def name(self, short: str) -> str:
        """As the files call it."""
        return self._entries[short].name

    def shape(self, short: str) -> tuple[int, ...]:
        """
        Raises:
            UserError: there is no such tensor.
        """
        return self._entry(short).shape

    def matrix(self, short: str) -> tuple[int, int]:
        """Shape of a linear weight.

        Raises:
            UserError: there is no such tensor, or it is no matrix.
        """
        shape = self.shape(short)
        if len(shape) != 2 or not all(shape):
            raise UserError(f"{self.path}: {self.name(short)} has shape {list(shape)}; it must be a matrix")
        return shape[0], shape[1]

    def use(self, short: str) -> Entry:
        """A tensor that something is made of.

        Raises:
            UserError: there is no such tensor.
        """
        entry = self._entry(short)
        self._used.add(short)
        if entry.rounded is not None:
            self.left_out[entry.rounded] = f"{ROUNDED_FROM} {entry.name}"
        return entry

    def leave(self, short: str, reason: str) -> None:
        """Nothing is made of a tensor, nor of its master weight."""
        entry = self._entry(short)
        self._used.add(short)
        for name in (entry.name, entry.rounded):
            if name is not None:
                self.left_out[name] = reason

    def read(self, short: str) -> np.ndarray[Any, Any]:
        """The values of a tensor, for a decision that depends on them."""
        entry = self._entry(short)
        return entry.source.read(entry.name)

    def are_same(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same bits, compared in the copies that the model was run with.

        A tied weight has a master under one of its names only. One tensor is in memory at a time.
        """
        return self._digest(first) == self._digest(second)

    def _digest(self, short: str) -> tuple[tuple[int, ...], np.dtype[Any], bytes]:
        values = self._weights.read(self._weight_names[short])
        return values.shape, values.dtype, hashlib.sha256(values.reshape(-1).view(np.uint8).data).digest()

    def check_shape(self, short: str, expected: tuple[int, ...], reason: str) -> None:
        """
        Raises:
            UserError: there is no such tensor, or it has another shape.
        """
        shape = self.shape(short)
        if shape != expected:
            raise UserError(
                f"{self.path}: {self.name(short)} has shape {list(shape)}, not {list(expected)} as {reason}"
            )

    def unused(self) -> list[str]:
        """Names, as the files call them, of tensors without a place."""
        return [entry.name for short, entry in self._entries.items() if short not in self._used]

    def _entry(self, short: str) -> Entry:
        entry = self._entries.get(short)
        if entry is None:
            raise UserError(f"{self.path}: has no tensor {short} (with or without {PREFIX!r} before it)")
        return entry


def _short(master: str) -> str:
    """The name of a master's weight without the prefix."""
    return master.removeprefix(PREFIX).removesuffix(MASTER)
