"""The hidden folder beside the output in which a run keeps what is done, so that a killed run can be continued.

`.OUT.work/` holds

* `lock`, locked by the run that uses the folder;
* `job.json`: what is being made, of which input. Another command is refused, because its parts would be others;
* `tokenizer/`: the tokenizer in use, given or trained;
* `parts/NNNNNNNN/`: the parts that are done (`parts.py`). A part appears whole, under its name, or not at all;
* `whole/`: the data folder as it will be, once `complete.json` lies beside it.

The last steps are: `complete.json` is written; what was at OUT goes into `replaced/`; `whole/` takes the name OUT;
`.OUT.work/` is deleted. Each is one rename, and a run that finds `complete.json` carries on at the
step that is missing.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vha_paddle.data.folder import check_out
from vha_paddle.data.parts import PART_FILE, Counts, part_folder
from vha_paddle.errors import RunError, UserError
from vha_paddle.files import atomic_write, fsync_directory, fsync_tree


class Workspace:
    """The working folder of one output folder, open and locked until it is closed.

    Attributes:
        parts, tokenizer, whole: folders in it, as above.
    """

    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        """Make the folder, or continue in the one that is there.

        Args:
            job: all that decides what the parts hold, as JSON values.

        Raises:
            UserError: another run uses the folder, or it holds the parts of another command.
            OSError: it cannot be written.
        """
        self._out = out
        self.folder = work_folder(out)
        self.parts, self.tokenizer, self.whole = (self.folder / name for name in ("parts", "tokenizer", "whole"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "lock", "w")  # noqa: SIM115  # kept open as long as the workspace
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{self.folder} is in use by another run; wait for it, or name another folder") from None
        try:
            self._agree(job)
            self.parts.mkdir(exist_ok=True)
            for left in self.parts.glob(".*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
        except BaseException:
            self._lock.close()
            raise

    def _agree(self, job: dict[str, Any]) -> None:
        path = self.folder / "job.json"
        if path.is_file():
            difference = _difference(json.loads(path.read_text("utf-8")), job)
            if difference:
                raise UserError(
                    f"{self.folder} holds the unfinished work of another command: {difference}; "
                    "repeat that command to finish it, or delete the folder to start anew"
                )
        else:
            with atomic_write(path) as file:
                file.write(json.dumps(job).encode())

    def done(self, num_parts: int) -> dict[int, Counts]:
        """The parts that are done, by number."""
        found = {}
        for number in range(num_parts):
            path = part_folder(self.parts, number) / PART_FILE
            if path.is_file():
                found[number] = Counts.from_json(json.loads(path.read_text("utf-8")))
        return found

    def completed(self) -> dict[str, Any] | None:
        """The summary that was given to `complete` by a run that was killed thereafter, or None."""
        path = self.folder / "complete.json"
        summary: dict[str, Any] | None = json.loads(path.read_text("utf-8")) if path.is_file() else None
        return summary

    def complete(self, summary: dict[str, Any]) -> None:
        """State that `whole` is what it should be."""
        fsync_tree(self.whole)
        os.chmod(self.whole, 0o755)
        with atomic_write(self.folder / "complete.json") as file:
            file.write(json.dumps(summary).encode())

    def publish(self) -> None:
        """Give `whole` the name of the output folder, and delete the working folder."""
        if self.whole.is_dir():
            if self._out.is_dir():
                replaced = self.folder / "replaced"
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(self._out, replaced)
            os.rename(self.whole, self._out)
            fsync_directory(self._out.parent)
        for large in (self.parts, self.folder / "replaced"):
            shutil.rmtree(large, ignore_errors=True)
        self.delete()

    def delete(self) -> None:
        """Delete the folder: first its name, so that what a kill leaves is never taken for work to continue."""
        leftover = self.folder.with_name(f"{self.folder.name}.old")
        shutil.rmtree(leftover, ignore_errors=True)
        os.rename(self.folder, leftover)
        shutil.rmtree(leftover)
        self._lock.close()

    def close(self) -> None:
        """Leave the folder to the next run; delete it if nothing in it is worth one."""
        if self._lock.closed:
            return
        if self.completed() is not None or any(not path.name.endswith(".tmp") for path in self.parts.iterdir()):
            self._lock.close()
        else:
            self.delete()


def make_once(
    out: Path, overwrite: bool, job: dict[str, Any], make: Callable[[Workspace], dict[str, Any]]
) -> dict[str, Any]:
    """Make an output folder, or go on where a run of the same job was killed.

    Args:
        job: as `Workspace` takes it.
        make: fills `whole` and returns the summary; not called where that was done before.

    Returns:
        The summary.

    Raises:
        UserError: as `Workspace` and `check_out`.
        RunError: the folder could not be written.
    """
    try:
        workspace = Workspace(out, job)
        try:
            summary = workspace.completed()
            if summary is None:
                check_out(out, overwrite)
                summary = make(workspace)
                workspace.complete(summary)
            if workspace.whole.is_dir():
                check_out(out, overwrite)  # again: hours may have passed
            workspace.publish()
        finally:
            workspace.close()
    except OSError as error:
        raise RunError(f"cannot write {out}: {error}") from None
    return summary


def work_folder(out: Path) -> Path:
    """The working folder of an output folder."""
    return out.with_name(f".{out.name}.work")


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first thing in which two jobs differ, or None."""
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if key == "inputs" and isinstance(old, list) and isinstance(new, list):
            for one, other in zip(old, new, strict=False):
                if one != other:
                    return f"its input {one[0]} has another name, size or time of change than {other[0]} now"
            return f"it has {len(old)} input files, this command {len(new)}"
        return f"its {key} is {json.dumps(old)}, that of this command {json.dumps(new)}"
    return None
