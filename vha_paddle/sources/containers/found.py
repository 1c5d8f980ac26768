"""Tell the format of a path by its files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vha_paddle.errors import UserError
from vha_paddle.sources.containers.disk import names_in
from vha_paddle.sources.containers.distcp import is_flex_folder, lacks_metadata, open_distcp
from vha_paddle.sources.containers.merged import open_safetensors
from vha_paddle.sources.containers.pdparams import open_pdparams
from vha_paddle.sources.containers.stored import StoredTensors

MODEL_FOLDER = "model_state"
MASTER_FOLDER = "master_weight"
PARAMETER_FILE = "model_state.pdparams"
_STEP_FOLDER = re.compile(r"checkpoint-([0-9]{1,18})")


@dataclass(frozen=True)
class Container:
    """A path that has been opened: what was taken of it, and its tensors."""

    path: Path
    """What was taken: a file, the folder of safetensors files, or `model_state/`."""
    form: Literal["safetensors", "pdparams", "flex"]
    weights: StoredTensors
    masters: StoredTensors | None
    """The float32 master weights of a flex checkpoint, named as the weights with `.w_0` behind. Parameters that were
    trained in float32 have none, nor has the second name of a tied weight."""
    notes: tuple[str, ...] = ()
    """What was chosen among several, a line each."""


def open_container(path: Path) -> Container:
    """Open a checkpoint that PaddleFleet, Paddle or safetensors wrote.

    Args:
        path: a `.safetensors` or `.pdparams` file, or a folder with such (of `.pdparams`, `model_state.pdparams`); of
            a flex checkpoint `model_state/`, the folder above it (`checkpoint-N/`), or a run's output folder: there
            its own `model_state/` if it has one, else that of its newest `checkpoint-N/`.

    Raises:
        UserError: there is no such checkpoint, or a file of it is missing, damaged or holds what is not data.
    """
    if not path.exists():
        raise UserError(f"{path}: does not exist")
    if path.suffix == ".pdparams":
        return Container(path, "pdparams", open_pdparams(path), None)
    if path.suffix == ".safetensors":
        return Container(path, "safetensors", open_safetensors(path), None)
    steps = _steps(path)
    if is_flex_folder(path):
        return _flex(path)
    if is_flex_folder(path / MODEL_FOLDER):
        newest = f"; {steps[-1]} was passed over, give its path to read it" if steps else ""
        return _flex(path / MODEL_FOLDER, f"{path / MODEL_FOLDER} was read, the final save{newest}" if steps else "")
    if (path / PARAMETER_FILE).exists():
        return Container(path / PARAMETER_FILE, "pdparams", open_pdparams(path / PARAMETER_FILE), None)
    if path.is_dir() and any(path.glob("*.safetensors")):
        return Container(path, "safetensors", open_safetensors(path), None)
    if steps:
        note = f"{steps[-1]} was read, the newest of {len(steps)} checkpoints" if len(steps) > 1 else ""
        return _flex(steps[-1] / MODEL_FOLDER, note or f"{steps[-1]} was read")
    for folder in (path, path / MODEL_FOLDER, *sorted(path.glob(f"checkpoint-*/{MODEL_FOLDER}"))):
        if lacks_metadata(folder):
            return _flex(folder)  # which names the file
    raise UserError(
        f"{path}: no checkpoint: it holds no .safetensors file, no {PARAMETER_FILE}, and neither ID.metadata, "
        f"{MODEL_FOLDER}/ID.metadata nor checkpoint-N/{MODEL_FOLDER}/ID.metadata"
    )


def _flex(folder: Path, note: str = "") -> Container:
    """The checkpoint whose `model_state/` this is, or a flex folder of another name, which has no masters."""
    notes = (note,) if note else ()
    weights = open_distcp(folder)
    masters_folder = folder.absolute().parent / MASTER_FOLDER
    if folder.absolute().name != MODEL_FOLDER or not names_in(masters_folder):
        return Container(folder, "flex", weights, None, notes)
    masters = open_distcp(masters_folder)
    if masters.save_id != weights.save_id:
        raise UserError(
            f"{masters_folder}: its last save has the id {masters.save_id}, that of {MODEL_FOLDER}/ has "
            f"{weights.save_id}; copy the two of one save"
        )
    return Container(folder, "flex", weights, masters, notes)


def _steps(path: Path) -> list[Path]:
    """The flex checkpoints of a run's output folder, by step."""
    steps = {int(match.group(1)): name for name in names_in(path) if (match := _STEP_FOLDER.fullmatch(name))}
    folders = [path / steps[step] for step in sorted(steps)]
    return [folder for folder in folders if is_flex_folder(folder / MODEL_FOLDER)]
