"""Read a checkpoint into a model and an optimizer of any layout: each rank reads its own slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from vha_paddle.checkpoint.layout import Checkpoint
from vha_paddle.checkpoint.save import OptimizerState
from vha_paddle.errors import UserError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.tensor_file import TensorFile


def load_parameters(parameters: Mapping[str, paddle.Tensor], tensors: TensorFile, mesh: Mesh) -> None:
    """Fill every parameter from the file of logical tensors.

    Raises:
        UserError: a tensor is missing, left over, or of another shape than the model's.
    """
    unexpected = sorted(set(tensors) - set(parameters))
    if unexpected:
        raise UserError(f"{tensors.path}: unexpected tensor {unexpected[0]}; the file belongs to another model")
    for name, parameter in parameters.items():
        _fill(parameter, parameter, tensors, name, mesh)


def load_optimizer(optimizer: OptimizerState, checkpoint: Checkpoint, mesh: Mesh) -> None:
    """Fill the optimizer's state as it was when the checkpoint was written.

    Raises:
        UserError: a tensor is missing or of another shape than the parameter's.
    """
    tensors = checkpoint.optimizer_tensors()
    slots = optimizer.slots()
    for parameter in optimizer.parameters:
        name = info_of(parameter).name
        for slot, states in slots.items():
            if name in states:  # another sharding rank owns the rest
                _fill(states[name], parameter, tensors, f"{name}.{slot}", mesh)
    for name, powers in optimizer.powers().items():
        value = np.array(tensors.array(f"{name}_power"))
        for power in powers.values():
            power.set_value(value.reshape(power.shape))


def _fill(target: Any, parameter: paddle.Tensor, tensors: TensorFile, name: str, mesh: Mesh) -> None:
    placement = info_of(parameter).placement
    logical = tensors.array(name)
    if logical.shape != placement.shape:
        raise UserError(
            f"{tensors.path}: {name} has shape {list(logical.shape)}, the model needs {list(placement.shape)}; "
            "the recipe does not match the checkpoint"
        )
    local = np.ascontiguousarray(placement.slice_of(logical, mesh.tensor_rank, mesh.tensor_degree))
    target.set_value(device_tensor(local, target.dtype))


def device_tensor(array: np.ndarray[Any, Any], dtype: Any) -> paddle.Tensor:
    """A tensor of `dtype` from any numpy array, bfloat16 included."""
    if array.dtype.name == "bfloat16":
        return paddle.to_tensor(array.view(np.uint16), dtype="bfloat16").astype(dtype)
    return paddle.to_tensor(array).astype(dtype)
