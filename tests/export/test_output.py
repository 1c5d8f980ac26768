"""All or nothing: what is left on disk when an export is refused, fails or is killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import Exported
from tests.export.verified import Verified
from vha_paddle.errors import RunError, UserError
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.output import check_output, clear_what_was_left, output_directory
from vha_paddle.sources.base import Source

ROOT = Path(__file__).resolve().parents[2]

# Kills itself where it is told to. Exports over an earlier export, if there is one.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from vha_paddle import files
from vha_paddle.export import fold_export, output

phase, checkpoint, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

def die(*arguments, **keys):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(done, total):
    time.sleep(0.02)
    if phase == "a tensor" and done > total / 2:
        die()

replace, count = os.replace, 0
def replacing(source, target):
    global count
    count += 1
    if phase == f"rename {count}":
        die()
    replace(source, target)
    if phase == f"after rename {count}":
        die()

os.replace = replacing
if phase == "settings":
    fold_export._write_settings = die
if phase == "card":
    fold_export.model_card = die
if phase == "flush":
    files.fsync_tree = die
print("ready", flush=True)
verify = die if phase == "verify" else None
fold_export.export_checkpoint(checkpoint, out, "float32", overwrite=True, verify=verify, progress=progress)
"""


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_existing_output_is_refused(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists; name another, or add --overwrite"):
        export_checkpoint(exported.checkpoint, tmp_path, "float32")
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_overwriting_what_is_no_export_is_refused(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds no fold_report\.json"):
        export_checkpoint(exported.checkpoint, tmp_path, "float32", overwrite=True)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_or_a_link_in_the_place_of_the_output_is_refused(exported: Exported, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a file or a link"):
        export_checkpoint(exported.checkpoint, out, "float32", overwrite=True)


@pytest.mark.parametrize("name", [".", "..", "/", "new/.."])
def test_an_output_that_cannot_be_named_is_refused(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A directory is built beside its place: of `.` that would be inside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is no name that a directory can be given"):
        check_output(Path(name), checkpoint, overwrite=True)


def test_an_output_inside_the_checkpoint_or_around_it_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    before = contents(checkpoint)
    for out in (checkpoint / "out", checkpoint, checkpoint / ".." / checkpoint.name / "out"):
        with pytest.raises(UserError, match="lies inside the checkpoint"):
            export_checkpoint(checkpoint, out, "float32", overwrite=True)
    with pytest.raises(UserError, match="holds the checkpoint"):
        export_checkpoint(checkpoint, tmp_path, "float32", overwrite=True)
    assert contents(checkpoint) == before


def test_an_empty_directory_is_filled(exported: Exported, tmp_path: Path) -> None:
    export_checkpoint(exported.checkpoint, tmp_path, "float32")
    assert (tmp_path / "model.safetensors").is_file()


def test_overwriting_replaces_the_export_and_leaves_nothing_beside_it(exported: Exported, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(exported.checkpoint, out, "float32", max_shard_bytes=20_000)
    export_checkpoint(exported.checkpoint, out, "float32", overwrite=True)
    assert contents(out) == contents(exported.directory)
    assert names(tmp_path) == ["out"]


def test_the_earlier_export_stays_until_the_new_one_is_verified(exported: Exported, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(exported.checkpoint, out, "bfloat16")
    before = contents(out)

    def verify(source: Source, directory: Path) -> Verified:
        assert contents(out) == before
        return Verified("logits differ")

    with pytest.raises(RunError, match="verification failed"):
        export_checkpoint(exported.checkpoint, out, "float32", overwrite=True, verify=verify)
    assert contents(out) == before
    assert names(tmp_path) == ["out"]


def test_the_earlier_export_comes_back_when_the_exchange_fails(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_checkpoint(exported.checkpoint, out, "float32")
    before, replace = contents(out), os.replace

    def failing(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "input/output error")
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="input/output error"):
        patch.setattr(os, "replace", failing)
        with output_directory(out, exported.checkpoint, overwrite=True) as directory:
            (directory / "new").write_text("new")
    assert contents(out) == before
    assert names(tmp_path) == ["out"]


def test_verification_sees_the_finished_files_before_they_have_their_name(exported: Exported, tmp_path: Path) -> None:
    out, seen = tmp_path / "out", []

    def verify(source: Source, directory: Path) -> Verified:
        assert source.path == exported.checkpoint and not out.exists()
        seen.append(contents(directory))
        return Verified()

    report = export_checkpoint(exported.checkpoint, out, "float32", verify=verify)
    assert seen[0].items() <= contents(out).items()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= seen[0].keys()
    assert report["verification"] == Verified().figures()
    assert json.loads((out / "fold_report.json").read_text())["verification"]["relative"] == 9e-6
    assert "9.000e-06" in (out / "README.md").read_text()


def test_nothing_is_left_when_verification_exceeds_its_bound(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="verification failed in float32: logits differ; nothing was kept"):
        export_checkpoint(
            exported.checkpoint, tmp_path / "out", "float32", verify=lambda *paths: Verified("logits differ")
        )
    assert names(tmp_path) == []


PHASES = ["a tensor", "settings", "verify", "card", "flush", "rename 1", "after rename 1"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_leaves_nothing_that_looks_finished_and_the_next_run_succeeds(
    exported: Exported, tmp_path: Path, phase: str
) -> None:
    out = tmp_path / "out"
    assert run_killed(phase, exported.checkpoint, out).returncode == -signal.SIGKILL
    if phase == "after rename 1":
        assert contents(out) == contents(exported.directory) and names(tmp_path) == ["out"]
        return
    (left,) = names(tmp_path)
    assert left.startswith(".out.") and left.endswith(".tmp")
    export_checkpoint(exported.checkpoint, out, "float32")
    assert contents(out) == contents(exported.directory) and names(tmp_path) == ["out"]


@pytest.mark.parametrize("phase", ["verify", "rename 1", "after rename 1", "rename 2", "after rename 2"])
def test_a_kill_while_an_export_is_replaced_loses_neither(exported: Exported, tmp_path: Path, phase: str) -> None:
    out = tmp_path / "out"
    export_checkpoint(exported.checkpoint, out, "bfloat16")
    earlier, new = contents(out), contents(exported.directory)
    assert run_killed(phase, exported.checkpoint, out).returncode == -signal.SIGKILL
    if out.exists():
        assert contents(out) == (new if phase == "after rename 2" else earlier)
    clear_what_was_left(out)
    assert contents(out) == (new if phase == "after rename 2" else earlier) and names(tmp_path) == ["out"]
    export_checkpoint(exported.checkpoint, out, "float32", overwrite=True)
    assert contents(out) == new and names(tmp_path) == ["out"]


def test_a_kill_at_any_moment(exported: Exported, tmp_path: Path) -> None:
    out, generator = tmp_path / "out", np.random.default_rng(0)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, "none", str(exported.checkpoint), str(out)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(generator.uniform(0, 0.6))  # an export takes 24 tensors of 20 ms each
        finally:
            process.kill()
            process.communicate()
        if out.exists():
            assert contents(out) == contents(exported.directory)
            shutil.rmtree(out)
    export_checkpoint(exported.checkpoint, out, "float32")
    assert contents(out) == contents(exported.directory) and names(tmp_path) == ["out"]


def run_killed(phase: str, checkpoint: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, phase, str(checkpoint), str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_only_what_killed_runs_to_this_output_left_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in (".out.abcdefgh.tmp", ".out.12345678.tmp", ".out.b.abcdefgh.tmp", ".other.abcdefgh.tmp", ".out.notes"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.filefile.tmp").write_text("mine")
    alive = os.open(tmp_path / ".out.12345678.tmp", os.O_RDONLY)
    try:
        fcntl.flock(alive, fcntl.LOCK_EX)
        (line,) = clear_what_was_left(out)
    finally:
        os.close(alive)
    assert ".out.abcdefgh.tmp: removed" in line
    assert ".out.abcdefgh.tmp" not in names(tmp_path) and len(names(tmp_path)) == 5


def test_a_run_holds_its_directory(exported: Exported, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with output_directory(out, exported.checkpoint, overwrite=False) as directory:
        assert clear_what_was_left(out) == [] and directory.is_dir()


# A full disk


@pytest.mark.parametrize("call", ["posix_fallocate", "write"])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = contents(exported.checkpoint)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError) as error:
        patch.setattr(f"vha_paddle.tensor_file.os.{call}", full)
        export_checkpoint(exported.checkpoint, tmp_path / "out", "float32")
    assert "cannot be written" in str(error.value) and "No space left on device" in str(error.value)
    assert names(tmp_path) == [] and contents(exported.checkpoint) == before


def test_a_limit_of_the_system_is_an_error_of_one_line(exported: Exported, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/fold_export.py"), str(exported.checkpoint), str(tmp_path / "out")]

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    result = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=small_files, timeout=120)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: ") and "File too large" in result.stderr
    assert names(tmp_path) == []


def test_room_is_required_before_anything_is_read(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 70_000_000})())
    export_checkpoint(exported.checkpoint, tmp_path / "fits", "float32")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 60_000_000})())
    with pytest.raises(RunError, match=r"out: needs 67,169,\d{3} bytes, 60,000,000 are free on its disk"):
        export_checkpoint(exported.checkpoint, tmp_path / "deep" / "out", "float32")
    assert names(tmp_path) == ["fits"]


def test_a_place_that_cannot_be_written_is_an_error_without_traceback(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        export_checkpoint(exported.checkpoint, tmp_path / "file" / "out", "float32")


def test_an_output_may_lie_where_nothing_is_yet(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b", tmp_path / "checkpoint", overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_second_of_two_runs_to_one_output_is_refused(tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(UserError, match="exists; name another|holds no fold_report"),
        output_directory(out, tmp_path / "checkpoint", overwrite) as directory,
    ):
        (directory / "second").write_text("")
        out.mkdir()
        (out / "first").write_text("")
    assert names(tmp_path) == ["out"] and names(out) == ["first"]
