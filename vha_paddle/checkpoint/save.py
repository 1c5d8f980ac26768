"""Write a checkpoint: each rank puts its own slices into the logical tensors, nothing is gathered."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import paddle

from vha_paddle.checkpoint.layout import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    RECIPE_FILE,
    TENSOR_METADATA,
    TOKENIZER_FILE,
    RunState,
    list_steps,
    step_directory,
    write_manifest,
    write_state,
)
from vha_paddle.config import Recipe, recipe_to_yaml
from vha_paddle.errors import RunError
from vha_paddle.files import fsync_directory, fsync_tree
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.tensor_file import create_tensors, fill_tensors

TensorSpec = tuple[np.dtype[Any], tuple[int, ...]]


class OptimizerState(Protocol):
    """What a checkpoint needs of an optimizer (`train.optimizer.Optimizer`)."""

    parameters: list[paddle.Tensor]

    def slots(self) -> dict[str, dict[str, paddle.Tensor]]: ...

    def powers(self) -> dict[str, dict[str, Any]]: ...


def save_checkpoint(
    output: Path, state: RunState, optimizer: OptimizerState, recipe: Recipe, tokenizer: Path, mesh: Mesh
) -> Path:
    """Write the checkpoint of `state.step`; every rank calls it, and all return when it is complete.

    Raises:
        RunError: a rank could not write. Nothing that looks like a checkpoint is left.
    """
    final = step_directory(output, state.step)
    temporary = final.parent / f".{final.name}.tmp"
    failure: OSError | None = None
    try:
        if mesh.is_main:
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that died while saving
            temporary.mkdir(parents=True)
            for file, tensors in _logical_tensors(optimizer).items():
                create_tensors(temporary / file, tensors, TENSOR_METADATA)
    except OSError as error:
        failure = error
    _stop_if_any_failed(failure, temporary, mesh)
    try:
        _write_slices(temporary, optimizer, mesh)
    except OSError as error:
        failure = error
    _stop_if_any_failed(failure, temporary, mesh)
    try:
        if mesh.is_main:
            (temporary / RECIPE_FILE).write_text(recipe_to_yaml(recipe), encoding="utf-8")
            shutil.copyfile(tokenizer, temporary / TOKENIZER_FILE)
            write_state(temporary, state)
            write_manifest(temporary)
            fsync_tree(temporary)
            if final.exists():  # the same step, trained again after an older checkpoint was resumed
                shutil.rmtree(final)
            os.replace(temporary, final)
            fsync_directory(final.parent)
    except OSError as error:
        failure = error
    _stop_if_any_failed(failure, temporary, mesh)
    return final


def remove_old_checkpoints(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints. Called by one rank after a newer one is complete."""
    for step in list_steps(output)[:-keep]:
        shutil.rmtree(step_directory(output, step))


def _logical_tensors(optimizer: OptimizerState) -> dict[str, dict[str, TensorSpec]]:
    """dtype and logical shape of every tensor of the two files, also of those that other ranks own."""
    model: dict[str, TensorSpec] = {}
    state: dict[str, TensorSpec] = {}
    slots = {slot: _dtype(_any(tensors)) for slot, tensors in optimizer.slots().items()}
    for parameter in optimizer.parameters:
        info = info_of(parameter)
        model[info.name] = (_dtype(parameter), info.placement.shape)
        for slot, dtype in slots.items():
            state[f"{info.name}.{slot}"] = (dtype, info.placement.shape)
    for name, powers in optimizer.powers().items():
        state[f"{name}_power"] = (_dtype(_any(powers)), (1,))
    return {MODEL_FILE: model, OPTIMIZER_FILE: state}


def _write_slices(directory: Path, optimizer: OptimizerState, mesh: Mesh) -> None:
    """Write what this rank is the first to hold: of equal copies on several ranks one is written."""
    model, state = fill_tensors(directory / MODEL_FILE), fill_tensors(directory / OPTIMIZER_FILE)
    slots = optimizer.slots()
    for parameter in optimizer.parameters:
        name, placement = info_of(parameter).name, info_of(parameter).placement
        if placement.axis is None and mesh.tensor_rank != 0:
            continue
        if mesh.data_rank == 0:
            target = model.array(name)
            placement.write_slice(target, host_array(parameter), mesh.tensor_rank, mesh.tensor_degree)
        if mesh.replica == 0:
            for slot, tensors in slots.items():
                if name in tensors:
                    target = state.array(f"{name}.{slot}")
                    placement.write_slice(target, host_array(tensors[name]), mesh.tensor_rank, mesh.tensor_degree)
    if mesh.is_main:
        for name, powers in optimizer.powers().items():
            state.array(f"{name}_power")[...] = host_array(_any(powers)).reshape([1])
    model.flush()
    state.flush()


def _any(tensors: Mapping[str, paddle.Tensor]) -> paddle.Tensor:
    """One of a slot's tensors: what holds for it holds for all."""
    return next(iter(tensors.values()))


def _dtype(tensor: paddle.Tensor) -> np.dtype[Any]:
    """numpy's name for a tensor's dtype, without copying the tensor to the host."""
    return np.dtype(str(tensor.dtype).removeprefix("paddle."))


def _stop_if_any_failed(failure: OSError | None, temporary: Path, mesh: Mesh) -> None:
    """All ranks stop together, so that none waits for one that failed."""
    if not mesh.any_rank(failure is not None):
        return
    if mesh.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
    reason = f"{failure.strerror}" if failure is not None else "another rank could not write"
    raise RunError(f"checkpoint {temporary.parent}: not saved ({reason}); free space or fix permissions and rerun")


def host_array(tensor: paddle.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as numpy, true bfloat16 included (Paddle hands out its bits as uint16)."""
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array.view(ml_dtypes.bfloat16) if tensor.dtype == paddle.bfloat16 else array
