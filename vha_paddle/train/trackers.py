"""Trackers that a recipe asks for: wandb, and VisualDL's files. metrics.jsonl is the record, they are copies of it.

Each step is in a tracker once, also where a resumed run trains it again. VisualDL's file is cut back to the step that
the run resumes from, as metrics.jsonl is. What wandb has cannot be taken back: the steps that it has are passed over,
which the run repeats bit for bit.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from vha_paddle.checkpoint.layout import METRICS_FILE
from vha_paddle.config import Recipe
from vha_paddle.files import atomic_write
from vha_paddle.maps import means_of

WANDB_ID_FILE = "wandb_id.txt"
VISUALDL_FILE = Path("visualdl") / "vdlrecords.run.log"
_FINISH_SECONDS = 120.0  # for wandb's upload at the end of a run; the rest stays on disk, for `wandb sync`
_FRAME = struct.Struct("<Q")  # the length of a VisualDL record, before it


class Backend(Protocol):
    """A tracker as it is used here; whatever it raises ends it, not the run."""

    def log(self, step: int, curves: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """A tracker that may fail: it is reported once and then left alone."""

    def __init__(self, name: str, start: Callable[[], Backend]) -> None:
        self._name = name
        self._backend: Backend | None = None
        try:
            self._backend = start()
        except Exception as error:  # whatever a tracker raises, training goes on
            self._give_up(error)

    def log(self, record: Mapping[str, Any]) -> None:
        """A record of metrics.jsonl."""
        self._do(lambda backend: backend.log(record["step"], curves_of(record)))

    def flush(self) -> None:
        """What is logged is handed on, so that a run which ends now loses none of it."""
        self._do(lambda backend: backend.flush())

    def close(self) -> None:
        self._do(lambda backend: backend.close())

    def _do(self, action: Callable[[Backend], None]) -> None:
        if self._backend is None:
            return
        try:
            action(self._backend)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._backend = None
        text = f"warning: {self._name} failed ({error}); training goes on, {METRICS_FILE} has every step"
        print(text, file=sys.stderr)


def trackers_of(recipe: Recipe, output: Path, first_step: int, recorded: int) -> list[Tracker]:
    """Those that the recipe asks for.

    Args:
        first_step: steps done before this start.
        recorded: the last step that an earlier start has recorded; it may be beyond `first_step`.
    """
    trackers = []
    if recipe.logging.wandb != "off":
        trackers.append(Tracker("wandb", lambda: Wandb(recipe, output, first_step, recorded)))
    if recipe.logging.visualdl:
        trackers.append(Tracker("VisualDL", lambda: VisualDL(recipe.run.name, output / VISUALDL_FILE, first_step)))
    return trackers


def curves_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, those of a part as `seconds/forward`; of the maps their means over layers and groups.
    Lists, words and what is not finite are left to metrics.jsonl."""
    numbers: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            part = means_of(value) if key == "maps" else value
            numbers |= {f"{key}/{name}": number for name, number in part.items()}
        elif key != "step":
            numbers[key] = value
    return {
        name: float(value) for name, value in numbers.items() if isinstance(value, int | float) and math.isfinite(value)
    }


class Wandb:
    """A wandb run, the same one for all starts of a run; its id is kept in the run's directory."""

    def __init__(self, recipe: Recipe, output: Path, first_step: int, recorded: int) -> None:
        import wandb

        kept = output / WANDB_ID_FILE
        continues = first_step > 0 and kept.is_file()
        if not continues:  # also where a run begins anew that had saved nothing: its curves are another run's
            with atomic_write(kept) as file:
                file.write(secrets.token_hex(4).encode())
        self._passed_over = recorded if continues else 0
        mode: Literal["online", "offline"] = "online" if recipe.logging.wandb == "online" else "offline"
        self._run: Any = wandb.init(
            project=recipe.logging.wandb_project,
            name=recipe.run.name,
            id=kept.read_text(encoding="ascii").strip(),
            mode=mode,
            dir=os.fspath(output),
            config=recipe.model_dump(mode="json"),
            # offline each start has a folder of its own; `wandb sync` puts those of one id together
            resume="allow" if mode == "online" else None,
            settings={"finish_timeout": _FINISH_SECONDS},
        )

    def log(self, step: int, curves: Mapping[str, float]) -> None:
        if step > self._passed_over:
            self._run.log(dict(curves), step=step)

    def flush(self) -> None:
        """Another process has had it from the start."""

    def close(self) -> None:
        self._run.finish()


class VisualDL:
    """Scalars in one file that `visualdl --logdir` shows."""

    def __init__(self, name: str, path: Path, first_step: int) -> None:
        from visualdl import LogWriter

        path.parent.mkdir(exist_ok=True)
        if path.exists():
            cut_after(path, first_step)
        self._writer: Any = LogWriter(logdir=os.fspath(path.parent), file_name=path.name, display_name=name)

    def log(self, step: int, curves: Mapping[str, float]) -> None:
        for tag, value in curves.items():
            self._writer.add_scalar(tag=tag, step=step, value=value)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def cut_after(path: Path, step: int) -> None:
    """Take the records of later steps, and one that a crash has cut, from the end of a VisualDL file."""
    from visualdl.proto.record_pb2 import Record

    content = path.read_bytes()
    starts, end = [], 0
    while end + _FRAME.size <= len(content):
        after = end + _FRAME.size + _FRAME.unpack_from(content, end)[0]
        if after > len(content):
            break
        starts.append(end)
        end = after
    while starts:
        start = starts.pop()
        record = Record.FromString(content[start + _FRAME.size : end])
        if any(value.id <= step and not value.HasField("meta_data") for value in record.values):
            break
        end = start
    os.truncate(path, end)
