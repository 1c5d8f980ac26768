"""`.pdparams` files: a pickled state dict, whole tensors by name.

Source: Paddle 3.3.1, framework/io.py (`_build_saved_state_dict`) and framework/io_utils.py (`_unpack_saved_dict`, which
cuts a tensor of more than 1 GiB for protocols 2 and 3).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.errors import UserError
from vha_paddle.sources.containers.arrays import pickled_array, read_state_dict, read_values, value_dtype
from vha_paddle.sources.containers.disk import DiskFile
from vha_paddle.sources.containers.records import DamagedPickle, Pairs, PickledArray, checked_size, is_ints
from vha_paddle.sources.containers.stored import StoredTensor

CUT_TENSORS = "UnpackBigParamInfor@@"
"""Entry that states, of each tensor that was cut, its `OriginShape` and the names of its `slices`, in order."""


class ParameterFile:
    """An open `.pdparams` file; see `StoredTensors`."""

    def __init__(
        self, file: DiskFile, parts: dict[str, list[PickledArray]], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        self.path, self.files = file.path, (file.path,)
        self._file, self._parts = file, parts
        self.entries = {
            name: StoredTensor(name, value_dtype(arrays[0].dtype), shapes[name]) for name, arrays in parts.items()
        }

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """See `StoredTensors.read`."""
        entry, parts = self.entries[name], self._parts[name]
        values = np.empty(math.prod(entry.shape), parts[0].dtype)
        start = 0
        for part in parts:
            stop = start + math.prod(part.shape)
            read_values(self._file, part, values[start:stop])
            start = stop
        return values.view(entry.dtype).reshape(entry.shape)


def open_pdparams(path: Path) -> ParameterFile:
    """Open a file that `paddle.save` wrote of a state dict.

    Raises:
        UserError: the file is absent, damaged, no state dict, or holds what is not data.
    """
    file = DiskFile(path)
    entries = read_state_dict(file)
    cut = _cut_tensors(file, entries.pop(CUT_TENSORS, Pairs()))
    parts: dict[str, list[PickledArray]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    part_of = {part: name for name, (_, names) in cut.items() for part in names}
    for name, value in entries.items():
        if name not in part_of:
            parts[name] = [pickled_array(file, name, value)]
            shapes[name] = parts[name][0].shape
        elif part_of[name] not in parts:  # where its first slice stands
            whole = part_of[name]
            shapes[whole], names = cut[whole]
            if whole in entries or not all(part in entries for part in names):
                raise _bad_cut(file)
            parts[whole] = [pickled_array(file, part, entries[part]) for part in names]
            if len({part.dtype for part in parts[whole]}) != 1 or any(len(part.shape) != 1 for part in parts[whole]):
                raise _bad_cut(file)
            if sum(part.shape[0] for part in parts[whole]) != math.prod(shapes[whole]):
                raise _bad_cut(file)
    if not cut.keys() <= parts.keys():
        raise _bad_cut(file)
    return ParameterFile(file, parts, shapes)


def _cut_tensors(file: DiskFile, value: Any) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    """Of each cut tensor its shape and the names of its slices; every slice is named once."""
    cut = {}
    if not isinstance(value, Pairs):
        raise _bad_cut(file)
    for name, facts in value:
        fields = dict(facts) if isinstance(facts, Pairs) and all(isinstance(key, str) for key, _ in facts) else {}
        shape: Any = fields.get("OriginShape")
        names: Any = fields.get("slices")
        if not isinstance(name, str) or name in cut or not is_ints(shape) or not isinstance(names, list) or not names:
            raise _bad_cut(file)
        if not all(isinstance(part, str) for part in names):
            raise _bad_cut(file)
        try:
            checked_size(shape)
        except DamagedPickle:
            raise _bad_cut(file) from None
        cut[name] = tuple(shape), names
    all_names = [part for _, names in cut.values() for part in names]
    if len(set(all_names)) != len(all_names):
        raise _bad_cut(file)
    return cut


def _bad_cut(file: DiskFile) -> UserError:
    return UserError(f"{file.path}: entry {CUT_TENSORS} does not describe the file's tensors; copy the file again")
