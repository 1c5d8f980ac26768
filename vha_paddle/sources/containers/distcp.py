"""Flex folders: `RANK_ID.distcp`, a pickled state dict of each rank's pieces, and `ID.metadata`, which says of what.

Several saves may lie side by side; the one of the highest id counts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.errors import UserError
from vha_paddle.sources.containers.arrays import BFLOAT16, pickled_array, read_state_dict, read_values, value_dtype
from vha_paddle.sources.containers.disk import DiskFile, names_in
from vha_paddle.sources.containers.metadata import Piece, PiecedTensor, read_metadata
from vha_paddle.sources.containers.pieces import assemble, chosen
from vha_paddle.sources.containers.records import PickledArray
from vha_paddle.sources.containers.stored import StoredTensor

_METADATA_FILE = re.compile(r"([0-9]{1,9})\.metadata")
_RANK_FILE = re.compile(r"[0-9]{1,9}_([0-9]{1,9})\.distcp")


class FlexFolder:
    """An open flex folder; see `StoredTensors`."""

    def __init__(self, path: Path, save_id: int) -> None:
        """
        Raises:
            UserError: a file is missing or damaged, or the files do not hold what the metadata says.
        """
        self.path, self.save_id = path, save_id
        metadata = DiskFile(path / f"{save_id}.metadata")
        tensors = read_metadata(metadata)
        names = sorted({piece.file for tensor in tensors.values() for piece in tensor.pieces})
        self._files = {name: _rank_file(path, name, metadata) for name in names}
        self._arrays = {name: _arrays(file) for name, file in self._files.items()}
        self.files = tuple(sorted([metadata.path, *(file.path for file in self._files.values())]))
        self.entries: dict[str, StoredTensor] = {}
        self._pieces: dict[str, list[Piece]] = {}
        for name, tensor in tensors.items():
            dtype = self._checked_dtype(name, tensor)
            pieces = chosen(tensor.shape, tensor.pieces)
            if pieces is None:
                raise UserError(
                    f"{metadata.path}: the pieces of {ascii(name)} are not the whole of it: they leave a gap or "
                    "overlap; save the checkpoint again"
                )
            self.entries[name] = StoredTensor(name, dtype, tensor.shape)
            self._pieces[name] = pieces
        described = {(piece.file, name) for name, tensor in tensors.items() for piece in tensor.pieces}
        for file_name, arrays in self._arrays.items():
            for name in arrays:
                if (file_name, name) not in described:
                    raise UserError(
                        f"{path / file_name}: holds {ascii(name)}, which {metadata.path.name} does not know; the two "
                        "are of different saves, copy both again"
                    )

    def _checked_dtype(self, name: str, tensor: PiecedTensor) -> np.dtype[Any]:
        """The dtype of the tensor's values, after comparing its pieces with the arrays of the files."""
        dtypes = set()
        for piece in tensor.pieces:
            array = self._arrays[piece.file].get(name)
            if array is None:
                raise UserError(f"{self.path / piece.file}: tensor {ascii(name)} is missing; copy the file again")
            if array.shape != piece.stored_shape:
                raise UserError(
                    f"{self.path / piece.file}: {ascii(name)} has shape {list(array.shape)}, the metadata says "
                    f"{list(piece.stored_shape)}; the two are of different saves, copy both again"
                )
            dtypes.add(array.dtype)
        expected = tensor.dtype or value_dtype(min(dtypes, key=str))
        stored = np.dtype(np.uint16) if expected == BFLOAT16 else expected
        if dtypes != {stored}:
            raise UserError(
                f"{self.path / tensor.pieces[0].file}: {ascii(name)} is stored as {min(dtypes, key=str)}, the metadata "
                f"says {expected}; the two are of different saves, copy both again"
            )
        return expected

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """See `StoredTensors.read`."""

        def read_into(piece: Piece, target: np.ndarray[Any, Any]) -> None:
            read_values(self._files[piece.file], self._arrays[piece.file][name], target)

        entry, pieces = self.entries[name], self._pieces[name]
        stored = np.dtype(np.uint16) if entry.dtype == BFLOAT16 else entry.dtype
        return assemble(entry.shape, stored, pieces, read_into).view(entry.dtype)


def open_distcp(path: Path) -> FlexFolder:
    """Open one flex folder: the one that has the `.metadata` file itself, `model_state/` or `master_weight/`.

    Raises:
        UserError: there is no metadata, a file is missing, damaged or holds what is not data, or the pieces of a
            tensor are not the whole of it.
    """
    described, written = save_ids(path, _METADATA_FILE), save_ids(path, _RANK_FILE)
    if not described | written:
        raise UserError(f"{path}: has neither ID.metadata nor .distcp files; give a flex folder that is complete")
    newest = max(described | written)
    if newest not in described:
        before = ", or remove those files to read the save before" if described else ""
        raise UserError(
            f"{path / f'{newest}.metadata'}: is missing, beside *_{newest}.distcp of the last save; copy it{before}"
        )
    return FlexFolder(path, newest)


def is_flex_folder(path: Path) -> bool:
    """Whether the folder has a metadata file of its own."""
    return bool(save_ids(path, _METADATA_FILE))


def lacks_metadata(path: Path) -> bool:
    """Whether the folder has files of ranks, and none that says what is in them."""
    return bool(save_ids(path, _RANK_FILE)) and not is_flex_folder(path)


def save_ids(path: Path, pattern: re.Pattern[str]) -> set[int]:
    """The ids of the saves that have a file of this kind in a folder."""
    return {int(match.group(1)) for name in names_in(path) if (match := pattern.fullmatch(name))}


def _rank_file(path: Path, name: str, metadata: DiskFile) -> DiskFile:
    if not (path / name).exists():
        raise UserError(f"{path / name}: is missing, {metadata.path.name} refers to it; copy the files of all ranks")
    return DiskFile(path / name)


def _arrays(file: DiskFile) -> dict[str, PickledArray]:
    return {name: pickled_array(file, name, value) for name, value in read_state_dict(file).items()}
