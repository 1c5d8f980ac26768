"""Write the weights of a Hugging Face model directory, tensor by tensor, in files of limited size.

Memory holds one tensor, however large the model. Each file is digested while it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vha_paddle.errors import RunError, UserError
from vha_paddle.export.config import write_json
from vha_paddle.export.plan import PlannedTensor
from vha_paddle.tensor_file import FileRecord, write_tensors

MAX_SHARD_BYTES = 5_000_000_000  # the size that Hugging Face's own writer splits at
INDEX_FILE = "model.safetensors.index.json"

Progress = Callable[[int, int], None]
"""Told, after each tensor, the bytes written so far and those of the whole."""


def write_weights(
    directory: Path,
    planned: Sequence[PlannedTensor],
    tensors: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> dict[str, FileRecord]:
    """Fill `directory` with the weights, and their index where there are several files.

    Args:
        planned: every tensor to write.
        tensors: (name, array) in the order of `planned`, with its shapes and dtypes.
        max_shard_bytes: weights beyond this many bytes are split over several files, with an index.

    Returns:
        Size and digest of each file of weights.

    Raises:
        RunError: `tensors` is not what was planned.
        OSError: the disk is full or fails.
    """
    shards = split_into_shards(planned, max_shard_bytes)
    stream = iter(tensors)
    done, total = 0, sum(tensor.num_bytes for tensor in planned)

    def arrays(shard: Sequence[PlannedTensor]) -> Iterator[np.ndarray]:
        nonlocal done
        for tensor in shard:
            yield _next_array(stream, tensor)
            done += tensor.num_bytes
            progress(done, total)

    records = {}
    for file_name, shard in shards.items():
        layout = {tensor.name: (tensor.dtype, tensor.shape) for tensor in shard}
        records[file_name] = write_tensors(
            directory / file_name,
            layout,
            arrays(shard),
            {"format": "pt"},  # transformers 4 asks for this word
            reserve=True,
        )
    if (extra := next(stream, None)) is not None:
        raise RunError(f"{extra[0]}: a tensor beyond the planned ones; nothing was kept")
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {tensor.name: name for name, shard in shards.items() for tensor in shard},
        }
        write_json(directory / INDEX_FILE, index)
    return records


def _next_array(stream: Iterator[tuple[str, np.ndarray]], tensor: PlannedTensor) -> np.ndarray:
    """The next tensor, which must be the planned one."""
    name, array = next(stream, ("nothing", np.empty(0)))
    if (name, array.shape, array.dtype) != (tensor.name, tensor.shape, tensor.dtype):
        raise RunError(
            f"{name} {list(array.shape)} {array.dtype} came where {tensor.name} {list(tensor.shape)} "
            f"{tensor.dtype} was planned; nothing was kept"
        )
    return array


def shard_bytes(text: str) -> int:
    """Bytes of a size in Hugging Face's spelling: `5GB`, `500MB` (powers of 1000), `2GiB` (of 1024), or a number.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"([1-9][0-9]*)(?:([KMGT])(i?)B)?", text, re.IGNORECASE)
    if match is None:
        raise UserError(f"--max-shard-size {text}: must be a size such as 5GB, 500MB or 2GiB")
    unit = 1024 if match[3] else 1000
    return int(match[1]) * unit ** (" KMGT".index(match[2].upper()) if match[2] else 0)


def split_into_shards(planned: Sequence[PlannedTensor], max_shard_bytes: int) -> dict[str, list[PlannedTensor]]:
    """File name to its tensors, in order; a file exceeds the limit only where one tensor does."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}
