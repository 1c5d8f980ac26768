"""Write a Hugging Face model directory: weights streamed tensor by tensor, all or nothing.

Memory holds one tensor (one layer's attention while it folds), however large the model: the files are created
at their full size and filled through a mapping. A directory with the final name is always complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vha_paddle.config import Model
from vha_paddle.errors import RunError, UserError
from vha_paddle.export.config import generation_config, hf_config, write_json
from vha_paddle.export.plan import NUMPY_DTYPES, PlannedTensor
from vha_paddle.export.tokenizer import TokenizerExport
from vha_paddle.files import atomic_directory, fsync_directory, fsync_tree
from vha_paddle.tensor_file import create_tensors, fill_tensors

REPORT_FILE = "fold_report.json"
MAX_SHARD_BYTES = 5_000_000_000  # the size that Hugging Face's own writer splits at

Progress = Callable[[int, int], None]
"""Told, after each tensor, the bytes written so far and those of the whole."""


def write_hf_model(
    directory: Path,
    model: Model,
    planned: Sequence[PlannedTensor],
    tensors: Iterable[tuple[str, np.ndarray]],
    tokenizer: TokenizerExport,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> None:
    """Fill `directory` with weights, configuration and tokenizer.

    Args:
        model: the recipe's.
        planned: every tensor to write, all of one dtype.
        tensors: (name, array) in the order of `planned`, with its shapes and its dtype.
        max_shard_bytes: weights beyond this many bytes are split over several files, with an index.

    Raises:
        RunError: the disk is full, or `tensors` is not what was planned.
    """
    write_json(directory / "config.json", hf_config(model, planned[0].dtype, tokenizer.special))
    write_json(directory / "generation_config.json", generation_config(tokenizer.special))
    tokenizer.write(directory, model.max_position_embeddings)
    shards = split_into_shards(planned, max_shard_bytes)
    stream = iter(tensors)
    done, total = 0, sum(tensor.num_bytes for tensor in planned)
    for file_name, shard in shards.items():
        for num_bytes in _write_shard(directory / file_name, shard, stream):
            done += num_bytes
            progress(done, total)
    if (extra := next(stream, None)) is not None:
        raise RunError(f"{extra[0]}: a tensor beyond the planned ones; nothing was kept")
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {tensor.name: name for name, shard in shards.items() for tensor in shard},
        }
        write_json(directory / "model.safetensors.index.json", index)


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


def _write_shard(path: Path, shard: Sequence[PlannedTensor], stream: Iterator[tuple[str, np.ndarray]]) -> Iterator[int]:
    """Write one file from the next tensors of `stream`; gives the bytes of each once it is in place."""
    layout = {tensor.name: (NUMPY_DTYPES[tensor.dtype], tensor.shape) for tensor in shard}
    create_tensors(path, layout, {"format": "pt"})  # transformers 4 asks for this word
    file = fill_tensors(path)
    for tensor in shard:
        name, array = next(stream, ("nothing", np.empty(0)))
        if (name, array.shape, array.dtype) != (tensor.name, *reversed(layout[tensor.name])):
            raise RunError(
                f"{name} {list(array.shape)} {array.dtype} came where {tensor.name} {list(tensor.shape)} "
                f"{tensor.dtype} was planned; nothing was kept"
            )
        file.array(name)[...] = array
        yield tensor.num_bytes
    file.flush()


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse an output that is there already; with `overwrite`, one that is not an earlier export.

    Raises:
        UserError: naming `out` and the remedy.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out}: is a file or a link; name a directory to make")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{out}: exists; name another, or add --overwrite to replace the export in it")
    if not (out / REPORT_FILE).is_file():
        raise UserError(f"{out}: holds no {REPORT_FILE}, so it is no export to overwrite; name another")


@contextlib.contextmanager
def output_directory(out: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary directory that takes the name `out` when the block ends well.

    An earlier export at `out` stays in place until the new one is on disk, and returns if the exchange fails.

    Raises:
        UserError: as `check_output`.
    """
    check_output(out, overwrite)
    retired: Path | None = None
    try:
        with atomic_directory(out) as directory:
            yield directory
            check_output(out, overwrite)  # another process may have written meanwhile
            if out.exists():
                fsync_tree(directory)
                retired = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
                os.replace(out, retired)
    except BaseException:
        if retired is not None and not out.exists():
            os.replace(retired, out)
        raise
    if retired is not None:
        shutil.rmtree(retired)
        fsync_directory(out.parent)
