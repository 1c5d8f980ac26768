"""Checkpoints as Paddle writes them, written without Paddle: pickles of the same instructions, the same folders.

`test_paddle_itself.py` compares them with what the installed Paddle writes.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from vha_paddle.tensor_file import write_tensors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
OLD_MODULE = "paddle.distributed.checkpoint.metadata"

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LocalTensorMetadata:
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...] | None = None
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None


@dataclass(frozen=True)
class LocalTensorIndex:
    tensor_key: str
    global_offset: tuple[int, ...]
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None
    replica_id: int | None = None
    local_shape: tuple[int, ...] | None = None


@dataclass
class Metadata:
    state_dict_metadata: Any = None
    storage_metadata: Any = None
    flat_mapping: Any = None


_CLASSES = (LocalTensorMetadata, LocalTensorIndex, Metadata)


@dataclass(frozen=True)
class Part:
    """What a rank's file has of a tensor: a box, or `elements` of the box in C order, stored flat."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    elements: tuple[int, int] | None = None
    replica: int | None = None

    def of(self, whole: np.ndarray) -> np.ndarray:
        box = whole[tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))]
        return np.array(box if self.elements is None else box.reshape(-1)[slice(*self.elements)], order="C")


def whole(array: np.ndarray, rank: int = 0) -> list[Part]:
    """In one rank's file."""
    return [Part(rank, (0,) * array.ndim, array.shape)]


def cut(array: np.ndarray, axis: int, ranks: int) -> list[Part]:
    """Equal boxes along an axis, one for each rank."""
    size = array.shape[axis] // ranks
    shape = tuple(size if i == axis else n for i, n in enumerate(array.shape))
    return [Part(r, tuple(r * size if i == axis else 0 for i in range(array.ndim)), shape) for r in range(ranks)]


def flattened(array: np.ndarray, stops: Sequence[int], ranks: Iterable[int] | None = None) -> list[Part]:
    """The elements up to each of `stops`, as sharded master weights lie."""
    starts, offset = [0, *stops[:-1]], (0,) * array.ndim
    ranks = range(len(stops)) if ranks is None else ranks
    return [Part(r, offset, array.shape, pair) for r, pair in zip(ranks, zip(starts, stops, strict=True), strict=True)]


def flattened_box(part: Part, stops: Sequence[int], ranks: Iterable[int]) -> list[Part]:
    """The elements of one box, up to each of `stops`."""
    pairs = zip(ranks, zip([0, *stops[:-1]], stops, strict=True), strict=True)
    return [Part(rank, part.offset, part.shape, pair) for rank, pair in pairs]


def write_flex_folder(
    folder: Path,
    arrays: Arrays,
    parts: Mapping[str, list[Part]] | None = None,
    save_id: int = 0,
    module: str = MODULE,
) -> None:
    """`RANK_ID.distcp` and `ID.metadata`; a tensor without `parts` is whole in the file of rank 0."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[int, dict[str, np.ndarray]] = {}
    metadata = Metadata({}, {}, {name: (name,) for name in arrays})
    for name, array in arrays.items():
        described: list[LocalTensorMetadata] = []
        for part in (parts or {}).get(name) or whole(array):
            files.setdefault(part.rank, {})[name] = part.of(array)
            flat = part.elements is not None
            entry = LocalTensorMetadata(part.offset, part.shape, str(array.dtype), array.shape, flat, part.elements)
            if entry not in described:
                described.append(entry)
            index = LocalTensorIndex(name, part.offset, flat, part.elements, part.replica, part.shape)
            metadata.storage_metadata[index] = f"{part.rank}_{save_id}.distcp"
        metadata.state_dict_metadata[name] = described
    for rank, held in files.items():
        write_pdparams(folder / f"{rank}_{save_id}.distcp", held)
    write_metadata(folder / f"{save_id}.metadata", metadata, module)


def write_metadata(path: Path, metadata: Any, module: str = MODULE) -> None:
    with path.open("wb") as file:
        _Pickler(file, module).dump(metadata)


def write_pdparams(path: Path, arrays: Arrays, protocol: int = 4, **more: Any) -> None:
    """A state dict as paddle.save pickles it: bfloat16 as uint16, and the table of names behind."""
    entries: dict[str, Any] = {name: stored(array) for name, array in arrays.items()} | more
    entries["StructuredToParameterName@@"] = {name: f"tensor_{i}" for i, name in enumerate(arrays)}
    with path.open("wb") as file:
        pickle.dump(entries, file, protocol)


def write_merged(folder: Path, arrays: Arrays, bfloat16: str = "BF16", shards: int = 1) -> None:
    """What the merge of a flex folder writes: names without `model.`, and an index that has it."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(arrays), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: arrays[name] if bfloat16 == "BF16" else stored(arrays[name]) for name in names[shard::shards]}
        write_tensors(
            folder / file, {name: (array.dtype, array.shape) for name, array in held.items()}, held.values(), {}
        )
        weight_map |= {f"model.{name}": file for name in held}
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stored(array: np.ndarray) -> np.ndarray:
    """The array that Paddle makes of a tensor."""
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


def sample(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Values of which no two are alike, so that none can be in another's place unseen."""
    order = np.random.default_rng(seed).permutation(math.prod(shape))
    bits, first = {2: (np.uint16, 0x3C01), 4: (np.uint32, 0x3F800001), 8: (np.uint64, 0x3FF0 << 48)}[
        np.dtype(dtype).itemsize
    ]
    return (order.astype(bits) + bits(first)).view(dtype).reshape(shape)


class _Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Names the classes of this file as those of Paddle."""

    def __init__(self, file: Any, module: str) -> None:
        super().__init__(file, 4)
        self._module = module

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj not in _CLASSES:
            return super().save_global(obj, name)
        self.save(self._module)
        self.save(obj.__qualname__)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)
        return None
