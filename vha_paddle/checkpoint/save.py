"""Save checkpoints: each rank writes the parts it answers for, nothing is gathered.

A synchronous save writes them straight from where they are. An asynchronous one first copies them to host memory,
while the next step computes its gradients: only the update, which changes them, has to wait for the copy.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import paddle

from vha_paddle.checkpoint.layout import Content, RunState, checkpoints_directory, step_directory
from vha_paddle.checkpoint.logical import Cut
from vha_paddle.checkpoint.retention import remove_old_checkpoints
from vha_paddle.checkpoint.writing import CommonFiles, OwnTensor, Writing, reason
from vha_paddle.config import Recipe
from vha_paddle.errors import RunError
from vha_paddle.files import remove
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import answered_for
from vha_paddle.parallel.placement import info_of

CLOSING_SECONDS = 60.0  # for other ranks to finish a save while this one ends with an error

Read = Callable[[], np.ndarray[Any, Any]]
Router = Mapping[str, np.ndarray[Any, Any]]


class OptimizerState(Protocol):
    """What a checkpoint needs of an optimizer (`train.optimizer.Optimizer`)."""

    parameters: list[paddle.Tensor]

    def slots(self) -> dict[str, dict[str, paddle.Tensor]]: ...

    def powers(self) -> dict[str, dict[str, Any]]: ...


class CheckpointSaver:
    """The saves of one run, one at a time: a save waits for the one before it.

    Args:
        output: the run's directory.
        tokenizer: what to keep with each checkpoint, as `data.tokenizer`.
    """

    def __init__(self, output: Path, recipe: Recipe, tokenizer: Path, mesh: Mesh) -> None:
        self.output, self.recipe, self.tokenizer, self.mesh = output, recipe, tokenizer, mesh
        self._writing: Writing | None = None
        # Kept from save to save: the first write to a page of new memory costs ten times the copy.
        self._copies: dict[str, np.ndarray[Any, Any]] = {}

    def save(self, state: RunState, optimizer: OptimizerState, router: Router | None = None) -> Path:
        """Write the checkpoint of `state.step`; every rank calls it. `router` is what the routers of a mixture of
        experts remember, the same on every rank.

        Under `checkpoint.asynchronous` the state must not change before `wait_for_copy`, and the checkpoint is there
        after `wait`.

        Raises:
            RunError: a rank could not write this checkpoint, or the one before it. Nothing that looks like a
                checkpoint is left.
        """
        self.wait()
        asynchronous, mesh = self.recipe.checkpoint.asynchronous, self.mesh
        final = step_directory(self.output, state.step)
        temporary = final.parent / f".{final.name}.tmp"
        self._prepare(temporary)
        copies: list[tuple[str, paddle.Tensor]] = []

        def read_copy(name: str, tensor: paddle.Tensor) -> Read:
            copies.append((name, tensor))
            return lambda: self._copies[name]

        def copy() -> None:
            for name, tensor in copies:
                self._copy(name, tensor)

        contents = own_tensors(optimizer, mesh, read_copy if asynchronous else _read_in_place)
        if router is not None and mesh.is_main:
            contents["router"] = {name: _own_array(array) for name, array in router.items()}
        common = CommonFiles(self.recipe, self.tokenizer, state)
        self._writing = Writing(
            temporary, final, mesh.rank, mesh.num_ranks, contents, common, copy if asynchronous else None
        )
        self._writing.start(asynchronous)
        if not asynchronous:
            self.wait()
        return final

    def wait_for_copy(self) -> None:
        """Until the state of a save in flight, if any, is copied and may change."""
        if self._writing is not None:
            self._writing.wait_for_copy()

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight."""
        return self._writing is not None

    def wait(self) -> bool:
        """Until the save in flight, if any, is complete; then remove checkpoints beyond those to keep.

        Every rank calls it, and all learn that the checkpoint is there. Returns whether there was one in flight.

        Raises:
            RunError: a rank could not write.
        """
        if self._writing is None:
            return False
        writing, self._writing = self._writing, None
        writing.wait_for_files()
        self._agree(writing.file_error, writing.temporary, writing)
        writing.wait()
        self._agree(writing.completion_error, writing.temporary, writing)
        if self.mesh.is_main:
            rules = self.recipe.checkpoint
            remove_old_checkpoints(self.output, rules.keep, self.recipe.tokens_per_step, rules.keep_every_tokens)
        return True

    def close(self) -> None:
        """Let a save in flight finish when the run ends with an error; asks no other rank, raises nothing."""
        if self._writing is not None:
            self._writing.wait(CLOSING_SECONDS)
            self._writing = None

    def _prepare(self, temporary: Path) -> None:
        """Make the temporary directory, without those of a run that died while saving."""
        error: OSError | None = None
        try:
            if self.mesh.is_main:
                for stale in checkpoints_directory(self.output).glob(".step-*.tmp"):
                    with contextlib.suppress(OSError):  # only the one in the way must go
                        remove(stale)
                temporary.mkdir(parents=True)
        except OSError as caught:
            error = caught
        self._agree(error, temporary)

    def _agree(self, error: Exception | None, temporary: Path, writing: Writing | None = None) -> None:
        """All ranks stop together where one failed, so that none waits for it."""
        if not self.mesh.any_rank(error is not None):
            return
        if writing is not None:
            writing.abandon()
        reasons = self.mesh.objects(reason(error) if error is not None else None)
        told = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None]
        if self.mesh.is_main:  # every rank has stopped writing
            shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"checkpoint {temporary.parent}: not saved ({'; '.join(told) or 'another rank could not write'}); "
            "free space or fix permissions and rerun"
        ) from error

    def _copy(self, name: str, tensor: paddle.Tensor) -> None:
        """Copy a tensor to host memory."""
        array = host_view(tensor)
        if not tensor.place.is_cpu_place():
            self._copies[name] = array
            return
        if name not in self._copies:
            self._copies[name] = np.empty_like(array)
        np.copyto(self._copies[name], array)


def save_checkpoint(
    output: Path,
    state: RunState,
    optimizer: OptimizerState,
    recipe: Recipe,
    tokenizer: Path,
    mesh: Mesh,
    router: Router | None = None,
) -> Path:
    """Write one checkpoint and wait until it is complete; every rank calls it.

    Raises:
        RunError: a rank could not write. Nothing that looks like a checkpoint is left.
    """
    saver = CheckpointSaver(output, recipe, tokenizer, mesh)
    path = saver.save(state, optimizer, router)
    saver.wait()
    return path


def own_tensors(
    optimizer: OptimizerState, mesh: Mesh, reader: Callable[[str, paddle.Tensor], Read]
) -> dict[Content, dict[str, OwnTensor]]:
    """What this rank writes: the weights it answers for and their state; on rank 0 also the powers of the betas."""
    model: dict[str, OwnTensor] = {}
    state: dict[str, OwnTensor] = {}
    slots = optimizer.slots()
    for parameter in answered_for(optimizer.parameters, mesh):
        info = info_of(parameter)
        cut = Cut.of(info.placement, mesh.seat)
        model[info.name] = _own(info.name, parameter, cut, reader)
        for slot, tensors in slots.items():
            if info.name in tensors:  # a float32 parameter has no master weight
                name = f"{info.name}.{slot}"
                state[name] = _own(name, tensors[info.name], cut, reader)
    if mesh.is_main:
        for name, powers in optimizer.powers().items():
            power = next(iter(powers.values()))  # equal for all
            state[f"{name}_power"] = _own(f"{name}_power", power.reshape([1]), None, reader)
    return {"model": model, "optimizer": state}


def _own(name: str, tensor: paddle.Tensor, cut: Cut | None, reader: Callable[[str, paddle.Tensor], Read]) -> OwnTensor:
    dtype = np.dtype(str(tensor.dtype).removeprefix("paddle."))
    return OwnTensor((dtype, tuple(tensor.shape)), cut, reader(name, tensor))


def _own_array(array: np.ndarray[Any, Any]) -> OwnTensor:
    """One that is never written to, so it needs no copy."""
    return OwnTensor((array.dtype, array.shape), None, lambda: array)


def _read_in_place(name: str, tensor: paddle.Tensor) -> Read:
    return functools.partial(host_view, tensor)


def host_view(tensor: paddle.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as numpy: its own memory where that is the host's, else a copy."""
    if not tensor.place.is_cpu_place() or tensor.dtype == paddle.bfloat16:  # numpy's DLPack knows no bfloat16
        return host_array(tensor)
    return np.from_dlpack(tensor.detach())


def host_array(tensor: paddle.Tensor) -> np.ndarray[Any, Any]:
    """A copy of a tensor as numpy, true bfloat16 included (Paddle hands out its bits as uint16)."""
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array.view(ml_dtypes.bfloat16) if tensor.dtype == paddle.bfloat16 else array
