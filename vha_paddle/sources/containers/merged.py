"""Folders of safetensors files: what Paddle's merge of a checkpoint writes, and what Hugging Face's tools write.

The merge's index names tensors that its files call otherwise, so names come from the files' headers. Its bfloat16 is
`U16` or `BF16`, by the version of the safetensors library that wrote it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.errors import UserError
from vha_paddle.sources.containers.arrays import value_dtype
from vha_paddle.sources.containers.disk import DiskFile
from vha_paddle.sources.containers.stored import StoredTensor
from vha_paddle.tensor_file import TensorFile, read_tensors

INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000
_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.safetensors")


class SafetensorsFiles:
    """One or several safetensors files as one; see `StoredTensors`."""

    def __init__(self, path: Path, files: list[TensorFile], index: Path | None) -> None:
        """
        Raises:
            UserError: two files hold a tensor of the same name.
        """
        self.path = path
        self.files = tuple(sorted([*(file.path for file in files), *([index] if index else [])]))
        self.entries: dict[str, StoredTensor] = {}
        self._file_of: dict[str, TensorFile] = {}
        for file in files:
            for name, entry in file.entries.items():
                if name in self.entries:
                    raise UserError(
                        f"{path}: tensor {ascii(name)} is in {self._file_of[name].path.name} and in {file.path.name}; "
                        "remove the files that do not belong to the checkpoint"
                    )
                self.entries[name] = StoredTensor(name, value_dtype(entry.dtype), entry.shape)
                self._file_of[name] = file

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """See `StoredTensors.read`."""
        return self._file_of[name].read(name).view(self.entries[name].dtype)


def open_safetensors(path: Path) -> SafetensorsFiles:
    """Open a safetensors file, or the model files of a folder: `model*.safetensors`, or its only one.

    Raises:
        UserError: there is none, one is damaged, or one of several is missing.
    """
    if not path.is_dir():
        return SafetensorsFiles(path, [read_tensors(path)], None)
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"{path}: has no .safetensors file; give the folder of a checkpoint")
    if len(files) > 1 and not files[0].name.startswith("model"):
        raise UserError(f"{path}: several .safetensors files, none named model*; give the path of one of them")
    index = path / INDEX_FILE
    _check_complete(path, {file.name for file in files}, index)
    return SafetensorsFiles(path, [read_tensors(file) for file in files], index if index.exists() else None)


def _check_complete(path: Path, names: set[str], index: Path) -> None:
    """No shard is missing: neither of those that the names count, nor of those that the index refers to."""
    expected = set(_files_of(index)) if index.exists() else set()
    for name in names:
        if match := _SHARD.fullmatch(name):
            stem, _, total = match.groups()
            expected |= {f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)}
    if missing := sorted(expected - names):
        raise UserError(f"{path / missing[0]}: is missing; copy all {len(expected)} files of the checkpoint")


def _files_of(index: Path) -> list[str]:
    """The files that an index refers to; what it calls the tensors is of no interest."""
    try:
        if DiskFile(index).size > MAX_INDEX_BYTES:
            raise ValueError
        names = json.loads(index.read_bytes())["weight_map"].values()
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index}: has no weight_map of tensors to files; remove it, it is not needed") from None
    return list(names)
