"""What a checkpoint is on disk, and when it counts as whole.

    RUN/checkpoints/step-00000300/
        model.safetensors      every parameter: canonical name, logical shape (the parallel layout leaves no trace)
        optimizer.safetensors  AdamW's moments (and float32 master weights) under `<parameter>.<slot>`
        recipe.yaml            the resolved recipe
        tokenizer.model        the SentencePiece model of the data
        state.json             step, tokens, samples: where the run stood
        manifest.json          size and SHA-256 of each file above; written last

A checkpoint is built in a hidden temporary directory and renamed when it is complete, so a directory with this
name is whole unless it was damaged later, which the manifest shows.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vha_paddle.config import Recipe, load_recipe
from vha_paddle.errors import UserError
from vha_paddle.files import atomic_write
from vha_paddle.tensor_file import TensorFile, read_tensors

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RECIPE_FILE = "recipe.yaml"
TOKENIZER_FILE = "tokenizer.model"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"

# Linear weights are [in, out], as Paddle multiplies; virtual heads are numbered n = group * P + physical head.
TENSOR_METADATA = {"format": "vha_paddle", "linear_layout": "in_out", "head_order": "group_major"}

_STEP_DIRECTORY = re.compile(r"^step-(\d{8})$")


@dataclass(frozen=True)
class RunState:
    """Where a run stands after an optimizer step. Random draws are functions of (seed, step), so no generator
    state needs saving beyond these numbers."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Training tokens seen, over all ranks."""
    samples: int
    """Training sequences seen, over all ranks: the global sample index of the next one."""
    seed: int
    data_fingerprint: str
    """Digest of data, sequence length and seed: with another one, `samples` would mean other text."""
    version: str
    """Version of vha_paddle that wrote the checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint opened for reading."""

    path: Path
    recipe: Recipe
    state: RunState

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_FILE

    def model_tensors(self) -> TensorFile:
        """The parameters.

        Raises:
            UserError: the file states another orientation or head order than this version writes.
        """
        tensors = read_tensors(self.path / MODEL_FILE)
        for key, expected in TENSOR_METADATA.items():
            found = tensors.metadata.get(key)
            if found != expected:
                raise UserError(f"{tensors.path}: metadata {key}={found}: must be {expected}; convert the file first")
        return tensors

    def optimizer_tensors(self) -> TensorFile:
        return read_tensors(self.path / OPTIMIZER_FILE)


def checkpoints_directory(output: Path) -> Path:
    """Where a run with `run.output` keeps its checkpoints."""
    return output / "checkpoints"


def step_directory(output: Path, step: int) -> Path:
    return checkpoints_directory(output) / f"step-{step:08d}"


def list_steps(output: Path) -> list[int]:
    """Steps of the finished checkpoints of a run, oldest first; temporary directories are not among them."""
    directory = checkpoints_directory(output)
    if not directory.is_dir():
        return []
    matches = (_STEP_DIRECTORY.match(entry.name) for entry in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def resolve_checkpoint(path: Path) -> Path:
    """A checkpoint directory as given, or the newest one of a run directory.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    steps = list_steps(path)
    if not steps:
        raise UserError(
            f"{path}: neither a checkpoint (no {MANIFEST_FILE}) nor a run with checkpoints; "
            "give a step-XXXXXXXX directory or the run's output directory"
        )
    return step_directory(path, steps[-1])


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest of a run directory, after checking sizes and digests of its files.

    Raises:
        UserError: none is there, it is incomplete, or a file differs from the manifest.
    """
    path = resolve_checkpoint(path)
    verify_manifest(path)
    state = _read_json(path / STATE_FILE)
    try:
        run_state = RunState(**state)
    except TypeError:
        raise UserError(f"{path / STATE_FILE}: not the state this version writes; use the version that did") from None
    return Checkpoint(path, load_recipe(path / RECIPE_FILE), run_state)


def write_state(directory: Path, state: RunState) -> None:
    _write_json(directory / STATE_FILE, asdict(state))


def write_manifest(directory: Path) -> None:
    """Record every file of `directory`; the last thing written into a checkpoint."""
    files = {
        entry.name: {"bytes": entry.stat().st_size, "sha256": sha256_of(entry)}
        for entry in sorted(directory.iterdir())
        if entry.name != MANIFEST_FILE
    }
    _write_json(directory / MANIFEST_FILE, {"files": files})


def verify_manifest(directory: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        UserError: naming the first file that is missing or differs.
    """
    path = directory / MANIFEST_FILE
    try:
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in _read_json(path)["files"].items()}
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not a manifest; the checkpoint is damaged, use another") from None
    required = {MODEL_FILE, OPTIMIZER_FILE, RECIPE_FILE, TOKENIZER_FILE, STATE_FILE}
    for name in sorted(required | set(expected)):
        file = directory / name
        if "/" in name or name not in expected or not file.is_file():
            raise UserError(f"{directory}: incomplete, {name} is missing; use another checkpoint")
        size, digest = expected[name]
        if file.stat().st_size != size or sha256_of(file) != digest:
            raise UserError(f"{file}: differs from the manifest (damaged or edited); use another checkpoint")


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); the checkpoint is damaged, use another") from None


def _write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
