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

from vha_paddle.data.folder import check_name, check_out, difference
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
        other = difference(json.loads(path.read_text("utf-8")), job) if path.is_file() else None
        if other is not None and self._is_worth_keeping():
            raise UserError(
                f"{self.folder} holds the unfinished work of another command: {other}; "
                "repeat that command to finish it, or delete the folder to start anew"
            )
        if other is not None or not path.is_file():
            shutil.rmtree(self.tokenizer, ignore_errors=True)
            with atomic_write(path) as file:
                file.write(json.dumps(job).encode())

    def _is_worth_keeping(self) -> bool:
        """Whether a part is done, or all."""
        done = self.parts.iterdir() if self.parts.is_dir() else ()
        return self.completed() is not None or any(not path.name.endswith(".tmp") for path in done)

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
        leftover = _leftover(self.folder)
        shutil.rmtree(leftover, ignore_errors=True)
        os.rename(self.folder, leftover)
        shutil.rmtree(leftover)
        self._lock.close()

    def close(self) -> None:
        """Leave the folder to the next run; delete it if nothing in it is worth one."""
        if self._lock.closed:
            return
        if self._is_worth_keeping():
            self._lock.close()
        else:
            self.delete()


def make_once(
    out: Path,
    overwrite: bool,
    job: dict[str, Any],
    already: Callable[[], dict[str, Any] | None],
    make: Callable[[Workspace], dict[str, Any]],
) -> dict[str, Any]:
    """Make an output folder, or go on where a run of the same job was killed; nothing, where one came to its end.

    Args:
        job: as `Workspace` takes it.
        already: returns the content of the manifest if `out` holds what the job makes, and None if it holds no data.
        make: fills `whole` and returns the content of the manifest; not called where that was done before.

    Returns:
        The summary: the manifest, and before it `out` and whether the folder was complete before.

    Raises:
        UserError: as `Workspace` and `check_out`.
        RunError: the folder could not be written.
    """
    check_name(out)
    common = {"out": str(out), "dry_run": False}

    def complete_before() -> dict[str, Any] | None:
        content = None if overwrite else already()
        return None if content is None else common | {"already_complete": True} | content

    try:
        # Where nothing was left behind, so that it takes no right to write.
        if not any(folder.exists() for folder in (work_folder(out), _leftover(work_folder(out)))):
            summary = complete_before()
            if summary is not None:
                return summary
        workspace = Workspace(out, job)
        try:
            summary = workspace.completed()
            if summary is None:
                summary = complete_before()
                if summary is not None:
                    return summary
                check_out(out, overwrite)
                summary = common | {"already_complete": False} | make(workspace)
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


def _leftover(folder: Path) -> Path:
    """The name of a working folder while it is deleted."""
    return folder.with_name(f"{folder.name}.old")
