"""What `run_ranks` promises: the launcher's environment, an error with the output, nothing left running."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks


def script(directory: Path, text: str) -> Path:
    path = directory / "rank_script.py"
    path.write_text(text)
    return path


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_rank_gets_its_arguments_and_the_launchers_environment(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import os, sys
from tests.tolerances import FLOAT32
assert sys.argv[1:] == ["one", "two"]
assert os.environ["PADDLE_TRAINER_ID"] == "0" and os.environ["PADDLE_TRAINERS_NUM"] == "1"
assert os.environ["PADDLE_CURRENT_ENDPOINT"] == os.environ["PADDLE_TRAINER_ENDPOINTS"]
assert os.environ["PADDLE_DISTRI_BACKEND"] == "gloo" and os.environ["OMP_NUM_THREADS"] == "1"
""",
    )
    run_ranks(path, 1, ["one", "two"], timeout=30)


def test_a_module_can_be_run_by_name() -> None:
    run_ranks("tests.tolerances", 1, [], timeout=30)


def test_a_failing_rank_is_shown_with_its_output_and_its_children_end(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("about to fail")
sys.exit(7)
""",
    )
    with pytest.raises(AssertionError, match="(?s)rank 0 ended with exit code 7.*about to fail"):
        run_ranks(path, 1, [str(tmp_path / "pid")], timeout=30)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_one_failing_rank_ends_the_others(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import os, pathlib, socket, sys, time
rank = os.environ["PADDLE_TRAINER_ID"]
if rank == "1":
    raise ValueError("rank one is unwell")
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
server = socket.create_server(("", int(os.environ["PADDLE_MASTER"].rsplit(":", 1)[1])))
time.sleep(600)
""",
    )
    with pytest.raises(AssertionError, match="(?s)rank 1 ended with exit code 1.*rank one is unwell"):
        run_ranks(path, 2, [str(tmp_path / "pid")], timeout=60)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_hung_rank_is_ended_and_shows_where_it_hung(tmp_path: Path) -> None:
    path = script(tmp_path, "import time\n\ndef stuck():\n    time.sleep(600)\n\nstuck()\n")
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0\] are still running after 1 s.*in stuck"):
        run_ranks(path, 1, [], timeout=1)
