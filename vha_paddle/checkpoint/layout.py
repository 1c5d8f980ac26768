"""What a checkpoint is on disk, and when it counts as whole.

    RUN/checkpoints/step-00000300/
        model-00003-of-00016.safetensors      the parameters, or parts of them, that rank 3 of 16 answers for
        optimizer-00003-of-00016.safetensors  AdamW's moments (and float32 master weights) of the same
        router-00000-of-00016.safetensors     load and biases of the routers of a mixture of experts
        recipe.yaml                           the resolved recipe
        tokenizer.model                       the SentencePiece model of the data, or tokenizer.json and what
                                              belongs to it, of a Hugging Face tokenizer
        state.json                            step, tokens, samples: where the run stood
        manifest.json                         size and SHA-256 of each file above; written last

Tensors have canonical names, `<parameter>` and `<parameter>.<slot>`. Together the files hold every logical tensor
exactly once (see `logical.py`), so any layout reads what any other wrote. A rank without anything to answer for
writes no file: the manifest is the list of files.

A checkpoint is built in a hidden temporary directory and renamed when it is complete, so a directory with this
name is whole unless it was damaged later, which the manifest shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from vha_paddle.checkpoint.logical import LogicalTensors
from vha_paddle.config import Recipe, load_recipe
from vha_paddle.data.tokenizer_files import IDENTIFYING_FILES
from vha_paddle.errors import UserError
from vha_paddle.files import atomic_write
from vha_paddle.tensor_file import FileRecord, read_tensors

RECIPE_FILE = "recipe.yaml"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
METRICS_FILE = "metrics.jsonl"  # of the run, beside checkpoints/

# Linear weights are [in, out], as Paddle multiplies; virtual heads are numbered n = group * P + physical head.
TENSOR_METADATA = {"format": "vha_paddle", "linear_layout": "in_out", "head_order": "group_major"}

Content = Literal["model", "optimizer", "router"]

_STEP_DIRECTORY = re.compile(r"step-([0-9]{8})")
_TENSOR_FILE = re.compile(r"(model|optimizer|router)-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
_CHUNK_BYTES = 256 << 10
_MAX_DIGEST_THREADS = 8


@dataclass(frozen=True)
class RunState:
    """Where a run stands after an optimizer step. Random draws are functions of (seed, step), so no generator
    state needs saving beyond these numbers."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # for reading one back

    step: Annotated[int, Field(ge=0)]
    """Optimizer steps done; 0 for weights that no run has trained, which have no optimizer state either."""
    tokens: Annotated[int, Field(ge=0)]
    """Training tokens seen, over all ranks."""
    samples: Annotated[int, Field(ge=0)]
    """Training sequences seen, over all ranks: the global sample index of the next one."""
    seed: Annotated[int, Field(ge=0)]
    data_fingerprint: str
    """Digest of data, sequence length and seed: with another one, `samples` would mean other text."""
    version: str
    """Version of vha_paddle that wrote the checkpoint."""
    skipped: Annotated[int, Field(ge=0)] = 0
    """Of the steps, those that were skipped: their loss or gradient was no number, or the loss a spike."""
    skipped_in_a_row: Annotated[int, Field(ge=0)] = 0
    """The last ones of them, one after another; 0 where the last step was applied."""
    losses: tuple[float, ...] = ()
    """Of the last steps that were applied, where spikes are looked for."""


_RUN_STATE = TypeAdapter(RunState)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint opened for reading."""

    path: Path
    recipe: Recipe
    state: RunState
    files: Mapping[str, FileRecord]
    """The manifest."""

    @property
    def tokenizer_path(self) -> Path:
        """The file that identifies the tokenizer, for `load_tokenizer`; what belongs to it lies beside it."""
        return self.path / next(name for name in IDENTIFYING_FILES if name in self.files)

    def model_tensors(self) -> LogicalTensors:
        """The parameters.

        Raises:
            UserError: a file is damaged, or states another orientation or head order than this version writes.
        """
        return self._tensors("model")

    def optimizer_tensors(self) -> LogicalTensors:
        """The optimizer's state, under `<parameter>.<slot>`. Raises as `model_tensors`."""
        return self._tensors("optimizer")

    def router_tensors(self) -> LogicalTensors:
        """What the routers remember (`model.balance`); none of a model without experts. Raises as `model_tensors`."""
        return self._tensors("router")

    def _tensors(self, content: Content) -> LogicalTensors:
        files = [read_tensors(self.path / name) for name in tensor_files(self.files, content)]
        for file in files:
            for key, expected in TENSOR_METADATA.items():
                found = file.metadata.get(key)
                if found != expected:
                    raise UserError(f"{file.path}: metadata {key}={found}: must be {expected}; convert the file first")
        return LogicalTensors(self.path, files)


def tensor_file(content: Content, number: int, total: int) -> str:
    """Name of the file that rank `number` of `total` writes; counted from 0, as ranks are."""
    return f"{content}-{number:05d}-of-{total:05d}.safetensors"


def other_files(names: Iterable[str]) -> list[str]:
    """Those of `names` that hold no tensors."""
    return sorted(name for name in names if not _TENSOR_FILE.fullmatch(name))


def tensor_files(names: Iterable[str], content: Content) -> list[str]:
    """Those of `names` that hold tensors of the model, the optimizer or the routers."""
    matches = (_TENSOR_FILE.fullmatch(name) for name in names)
    return sorted(match[0] for match in matches if match and match[1] == content)


def checkpoints_directory(output: Path) -> Path:
    """Where a run with `run.output` keeps its checkpoints."""
    return output / "checkpoints"


def step_directory(output: Path, step: int) -> Path:
    return checkpoints_directory(output) / f"step-{step:08d}"


def list_steps(output: Path) -> list[int]:
    """Steps of the finished checkpoints of a run, oldest first; temporary directories are not among them.

    What has a checkpoint's name is one, if perhaps a damaged one: a file, or a link to a disk that is not there.

    Raises:
        UserError: there is something that cannot be looked into, which must not pass for a fresh directory.
    """
    directory = checkpoints_directory(output)
    if not os.path.lexists(directory):
        return []
    try:
        matches = [_STEP_DIRECTORY.fullmatch(name) for name in os.listdir(directory)]
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be read ({error.strerror}); restore it, or mount the disk that it is on"
        ) from None
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


def open_checkpoint(path: Path, share: int = 0, num_shares: int = 1) -> Checkpoint:
    """Open a checkpoint, or the newest of a run directory, after checking its files against the manifest.

    Args:
        share, num_shares: of this many processes which open it together, the one that this is. Each checks the
            digests of its share of the files, and the sizes of all.

    Raises:
        UserError: none is there, it is incomplete, or a file differs from the manifest.
    """
    path = resolve_checkpoint(path)
    return _read(path, check_files(path, share, num_shares))


def check_files(path: Path, share: int = 0, num_shares: int = 1) -> dict[str, FileRecord]:
    """Compare the files of a checkpoint with its manifest, which is returned; arguments as of `open_checkpoint`.

    Raises:
        UserError: it is incomplete, or a file differs from the manifest.
    """
    files = read_manifest(path)
    mine = set(sorted(files)[share::num_shares])
    _refuse_faults(path, files, mine)
    return files


def open_without_digests(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest of a run directory, after checking the sizes of its files: reads no tensor.

    Raises:
        UserError: as `open_checkpoint`.
    """
    path = resolve_checkpoint(path)
    files = read_manifest(path)
    _refuse_faults(path, files, with_digest=set())
    return _read(path, files)


def _refuse_faults(path: Path, files: Mapping[str, FileRecord], with_digest: set[str]) -> None:
    with ThreadPoolExecutor(min(_MAX_DIGEST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        faults = pool.map(lambda name: find_fault(path / name, files[name], name in with_digest), files)
        for fault in faults:
            if fault is not None:
                raise UserError(f"{fault}; use another checkpoint")


def _read(path: Path, files: Mapping[str, FileRecord]) -> Checkpoint:
    try:
        state = _RUN_STATE.validate_json(json.dumps(read_json(path / STATE_FILE)))
    except ValidationError:
        raise UserError(f"{path / STATE_FILE}: not the state this version writes; use the version that did") from None
    named = _STEP_DIRECTORY.fullmatch(path.name)
    if named and int(named[1]) != state.step:
        raise UserError(f"{path}: holds step {state.step}; rename it to {step_directory(Path(), state.step).name}")
    return Checkpoint(path, load_recipe(path / RECIPE_FILE), state, files)


def write_state(directory: Path, state: RunState) -> None:
    write_json(directory / STATE_FILE, asdict(state))


def write_manifest(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """List the files of a checkpoint; the last thing written into it."""
    write_json(directory / MANIFEST_FILE, {"files": {name: asdict(files[name]) for name in sorted(files)}})


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """What the manifest says of each file.

    Raises:
        UserError: it is not a manifest, or lacks a file that every checkpoint has.
    """
    path = directory / MANIFEST_FILE
    try:
        files = {name: FileRecord(**record) for name, record in read_json(path)["files"].items()}
        valid = all(type(file.bytes) is int and type(file.sha256) is str for file in files.values())
    except (KeyError, TypeError, AttributeError):
        valid = False
    if not valid or any("/" in name for name in files):
        raise UserError(f"{path}: not a manifest; the checkpoint is damaged, use another")
    for content in ("model", "optimizer"):
        if not tensor_files(files, content):
            raise UserError(f"{directory}: holds no {content}-XXXXX-of-XXXXX.safetensors; use another checkpoint")
    for names in ((RECIPE_FILE,), IDENTIFYING_FILES, (STATE_FILE,)):
        if not any(name in files for name in names):
            raise UserError(f"{directory}: incomplete, {' or '.join(names)} is missing; use another checkpoint")
    return files


def find_fault(
    path: Path, record: FileRecord, with_digest: bool = True, progress: Callable[[int], None] = lambda count: None
) -> str | None:
    """What distinguishes a file from its record in the manifest, or None where they agree.

    Args:
        progress: told the bytes read since it was last told.
    """
    try:
        if not path.is_file():
            return f"{path.parent}: incomplete, {path.name} is missing"
        if path.stat().st_size != record.bytes or (with_digest and sha256_of(path, progress) != record.sha256):
            return f"{path}: differs from the manifest (damaged or edited)"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return None


def record_of(path: Path) -> FileRecord:
    """What the manifest is to say of a finished file."""
    return FileRecord(path.stat().st_size, sha256_of(path))


def sha256_of(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces; `progress` is told the bytes of each."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            progress(count)
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Read a value back.

    Raises:
        UserError: the file is absent or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); the checkpoint is damaged, use another") from None


def write_json(path: Path, value: Any) -> None:
    """Write a value, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
