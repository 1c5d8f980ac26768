"""Read a checkpoint into a model and an optimizer of any layout: each rank reads its own slices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from vha_paddle.checkpoint.layout import Checkpoint, check_files, open_checkpoint, open_without_digests
from vha_paddle.checkpoint.logical import LogicalTensors
from vha_paddle.checkpoint.save import OptimizerState
from vha_paddle.errors import UserError
from vha_paddle.parallel.agreement import together
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import with_weight
from vha_paddle.parallel.placement import info_of


def find_damage(path: Path, mesh: Mesh) -> str | None:
    """What distinguishes a checkpoint from its manifest, or None; every rank calls it, checks the digests of its share
    of the files, and gets the same answer."""
    fault = None
    try:
        check_files(path, mesh.rank, mesh.num_ranks)
    except UserError as error:
        fault = str(error).split("; ")[0]  # without the remedy: the caller has one
    return next((fault for fault in mesh.objects(fault) if fault is not None), None)


def open_together(path: Path, mesh: Mesh, with_digests: bool = True) -> Checkpoint:
    """Open a checkpoint on every rank; each checks the digests of its share of the files, for all.

    Without `with_digests`, which `find_damage` has checked, only the sizes.

    Raises:
        UserError: on every rank, if one finds the checkpoint incomplete or damaged.
    """
    with together(mesh):
        checkpoint = open_checkpoint(path, mesh.rank, mesh.num_ranks) if with_digests else open_without_digests(path)
    return checkpoint


def load_parameters(parameters: Mapping[str, paddle.Tensor], tensors: LogicalTensors, mesh: Mesh) -> None:
    """Fill every parameter of this rank. Every rank calls it: together they must hold all the tensors.

    Raises:
        UserError: a tensor is missing, left over, or of another shape than the model's.
    """
    unexpected = sorted(set(tensors).difference(*mesh.objects(list(parameters))))
    if unexpected:
        raise UserError(f"{tensors.path}: unexpected tensor {unexpected[0]}; the file belongs to another model")
    with together(mesh):
        for parameter in with_weight(list(parameters.values()), mesh):
            _fill(parameter, parameter, tensors, info_of(parameter).name, mesh)


def load_masters(optimizer: OptimizerState, checkpoint: Checkpoint, mesh: Mesh) -> None:
    """Fill the master weights, if the optimizer keeps any, with the checkpoint's masters, which have the digits that
    bfloat16 lacks, or with its weights where it has none; every rank calls it.

    An optimizer makes its masters from the parameters that it is given: without this, its first step would undo
    `load_parameters`.
    """
    masters = optimizer.slots().get("master", {})
    tensors, suffix = checkpoint.optimizer_tensors(), ".master"
    if not any(name.endswith(suffix) for name in tensors):
        tensors, suffix = checkpoint.model_tensors(), ""
    with together(mesh):
        for parameter in optimizer.parameters:
            name = info_of(parameter).name
            if name in masters:  # another sharding rank owns the rest
                _fill(masters[name], parameter, tensors, name + suffix, mesh)


def load_optimizer(optimizer: OptimizerState, checkpoint: Checkpoint, mesh: Mesh) -> None:
    """Fill the optimizer's state as it was when the checkpoint was written.

    Raises:
        UserError: a tensor is missing or of another shape than the parameter's.
    """
    tensors = checkpoint.optimizer_tensors()
    slots = optimizer.slots()
    with together(mesh):
        for parameter in optimizer.parameters:
            name = info_of(parameter).name
            for slot, states in slots.items():
                if name in states:  # another sharding rank owns the rest
                    _fill(states[name], parameter, tensors, f"{name}.{slot}", mesh)
        for name, powers in optimizer.powers().items():
            value = np.array(tensors.array(f"{name}_power"))
            for power in powers.values():
                power.set_value(value.reshape(power.shape))


def router_state(expected: Mapping[str, np.ndarray[Any, Any]], checkpoint: Checkpoint) -> dict[str, Any]:
    """What the routers remembered when the checkpoint was written, for a model whose state is like `expected`.

    Raises:
        UserError: a tensor is missing or of another shape or dtype.
    """
    tensors, state = checkpoint.router_tensors(), {}
    for name, like in expected.items():
        array = state[name] = np.array(tensors.array(name))
        if (array.shape, array.dtype) != (like.shape, like.dtype):
            raise UserError(
                f"{tensors.path}: {name} is {array.dtype.name} {list(array.shape)}, the model needs "
                f"{like.dtype.name} {list(like.shape)}; the recipe does not match the checkpoint"
            )
    return state


def _fill(target: Any, parameter: paddle.Tensor, tensors: LogicalTensors, name: str, mesh: Mesh) -> None:
    placement = info_of(parameter).placement
    local = np.ascontiguousarray(tensors.part(name, placement, mesh.seat))
    is_same = str(target.dtype).removeprefix("paddle.") == local.dtype.name and local.dtype.name != "bfloat16"
    target.set_value(local if is_same else device_tensor(local, target.dtype))  # an array is copied once


def device_tensor(array: np.ndarray[Any, Any], dtype: Any) -> paddle.Tensor:
    """A tensor of `dtype` from any numpy array, bfloat16 included."""
    if array.dtype.name == "bfloat16":
        return paddle.to_tensor(array.view(np.uint16), dtype="bfloat16").astype(dtype)
    return paddle.to_tensor(array).astype(dtype)
