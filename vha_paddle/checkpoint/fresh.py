"""A checkpoint of weights that no run has trained: of step 0, without optimizer state. Needs no Paddle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import vha_paddle
from vha_paddle.checkpoint.layout import (
    TENSOR_METADATA,
    Content,
    RunState,
    tensor_file,
    write_manifest,
)
from vha_paddle.checkpoint.writing import CommonFiles, write_common
from vha_paddle.config import Recipe
from vha_paddle.tensor_file import FileRecord, TensorSpec, write_tensors


def write_fresh_checkpoint(
    directory: Path,
    recipe: Recipe,
    tokenizer: Path,
    specs: Mapping[str, TensorSpec],
    arrays: Iterable[np.ndarray[Any, Any]],
    router: Mapping[str, np.ndarray[Any, Any]],
) -> None:
    """Fill an empty directory with a checkpoint for `run.start_from`, evaluation and export.

    Args:
        tokenizer: as `data.tokenizer`; its files are copied.
        specs: canonical name to dtype and logical shape of every parameter.
        arrays: one for each of `specs`, in their order; each is asked for when the one before it is written.
        router: what the routers of a mixture of experts remember; empty for other models.

    Raises:
        OSError: the disk is full or fails.
    """
    contents: dict[Content, tuple[Mapping[str, TensorSpec], Iterable[np.ndarray[Any, Any]]]] = {
        "model": (specs, arrays),
        "optimizer": ({}, ()),
    }
    if router:
        contents["router"] = {name: (array.dtype, array.shape) for name, array in router.items()}, router.values()
    files: dict[str, FileRecord] = {}
    for content, (of_tensors, values) in contents.items():
        name = tensor_file(content, 0, 1)
        files[name] = write_tensors(directory / name, of_tensors, values, TENSOR_METADATA)
    nothing_trained = RunState(
        step=0, tokens=0, samples=0, seed=recipe.run.seed, data_fingerprint="none", version=vha_paddle.__version__
    )
    files |= write_common(directory, CommonFiles(recipe, tokenizer, nothing_trained))
    write_manifest(directory, files)
