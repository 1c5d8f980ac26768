"""Runs on two nodes, each with a launcher of its own, over loopback: docs/launching.md says what it promises."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launch import PORTS, free_ports
from tests.distributed.test_launched_runs import losses
from tests.tolerances import FLOAT32, assert_close
from tests.train.conftest import NUM_STEPS, MakeRecipe, dataset, make_recipe, write_recipe
from vha_paddle.checkpoint.layout import open_checkpoint, step_directory
from vha_paddle.config import Recipe

ROOT = Path(__file__).resolve().parents[2]
NUM_NODES = 2
SECONDS = 600  # for two nodes to end
TIED = str(Path(__file__).with_name("tied.py"))
__all__ = ["dataset", "make_recipe"]  # fixtures


class Nodes:
    """Two launchers, as two machines would run them, and what each of them printed."""

    def __init__(self, recipe: Recipe, directory: Path, ranks_per_node: int) -> None:
        self.directory = directory
        path = write_recipe(recipe, directory / "recipe.yaml")
        (port,) = free_ports(1)
        launcher = [sys.executable, TIED, "paddle.distributed.launch"]
        script = [TIED, str(ROOT / "tools/train.py"), str(path)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "MASTER_"))}
        # for the ports that a launcher chooses; by default an outgoing connection may take one before its use
        kept |= {"PORT_RANGE": f"{PORTS.start}:{PORTS.stop - 1}", "OMP_NUM_THREADS": "1"}
        self.launchers: list[subprocess.Popen[bytes]] = []
        for rank in range(NUM_NODES):
            options = ["--nnodes", str(NUM_NODES), "--rank", str(rank), "--master", f"127.0.0.1:{port}"]
            options += ["--nproc_per_node", str(ranks_per_node), "--log_dir", str(directory / f"logs-node{rank}")]
            with self._log(rank).open("wb") as output:
                self.launchers.append(
                    subprocess.Popen(
                        [*launcher, *options, *script],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=kept,
                        start_new_session=True,
                    )
                )

    def _log(self, rank: int) -> Path:
        return self.directory / f"node{rank}.log"

    def output(self, rank: int) -> str:
        """What the launcher of a node printed, its first rank's lines among them."""
        return self._log(rank).read_text(errors="replace")

    def wait(self) -> list[int]:
        """Exit codes of the launchers."""
        deadline = time.monotonic() + SECONDS
        return [launcher.wait(max(0.0, deadline - time.monotonic())) for launcher in self.launchers]

    def kill(self) -> None:
        """End the launchers; the ranks end with them."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()


@contextlib.contextmanager
def started(recipe: Recipe, directory: Path, ranks_per_node: int) -> Iterator[Nodes]:
    """Two nodes at work on a recipe; whatever happens, none of their processes is left."""
    directory.mkdir(exist_ok=True)
    nodes = Nodes(recipe, directory, ranks_per_node)
    try:
        yield nodes
    finally:
        nodes.kill()


def train_on_two_nodes(recipe: Recipe, directory: Path, ranks_per_node: int) -> str:
    """Train to the end; returns the output of node 0."""
    with started(recipe, directory, ranks_per_node) as nodes:
        codes = nodes.wait()
        assert codes == [0, 0], "\n".join(nodes.output(rank)[-3000:] for rank in range(NUM_NODES))
        return nodes.output(0)


def train_in_one_process(recipe: Recipe, directory: Path) -> None:
    path = write_recipe(recipe, directory / "one.yaml")
    command = [sys.executable, str(ROOT / "tools/train.py"), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize(("layout", "ranks_per_node"), [({"data": 2}, 1), ({"tensor": 2, "data": 2}, 2)])
def test_two_nodes_train_as_one_process(
    make_recipe: MakeRecipe, tmp_path: Path, layout: dict[str, int], ranks_per_node: int
) -> None:
    one = make_recipe(run__output=str(tmp_path / "one"))
    two = make_recipe(run__output=str(tmp_path / "two"), parallel=layout)
    train_in_one_process(one, tmp_path)
    train_on_two_nodes(two, tmp_path / "nodes", ranks_per_node)
    assert_close(losses(two), losses(one), FLOAT32, "losses and norms")
    expected, found = (open_checkpoint(Path(recipe.run.output)).model_tensors() for recipe in (one, two))
    assert set(found) == set(expected)
    for name in expected:
        assert_close(found.array(name), expected.array(name), FLOAT32, name)


def test_two_nodes_resume_bit_exactly(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(parallel={"tensor": 2})
    train_on_two_nodes(recipe, tmp_path / "nodes", 1)
    last = step_directory(Path(recipe.run.output), NUM_STEPS)
    unbroken = losses(recipe)
    expected = {file.name: file.read_bytes() for file in last.iterdir()}
    shutil.rmtree(last)
    assert "from step 3" in train_on_two_nodes(recipe, tmp_path / "nodes", 1)
    assert np.array_equal(losses(recipe), unbroken)
    assert {file.name: file.read_bytes() for file in last.iterdir()} == expected


def test_a_mistake_ends_both_nodes_with_exit_code_2_and_its_line(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(parallel={"tensor": 2}, data__train="absent")
    with started(recipe, tmp_path / "nodes", 1) as nodes:
        assert nodes.wait() == [2, 2]
        for rank in range(NUM_NODES):
            assert "error: absent.idx is no file to read" in nodes.output(rank)
            assert "Traceback" not in nodes.output(rank)
    assert not Path(recipe.run.output).exists()


def test_when_a_node_is_lost_the_other_fails(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(parallel={"data": 2}, schedule__total_tokens=64 * 10**6)  # more steps than anyone waits for
    with started(recipe, tmp_path / "nodes", 1) as nodes:
        deadline = time.monotonic() + SECONDS
        while not (Path(recipe.run.output) / "metrics.jsonl").is_file():
            assert nodes.launchers[0].poll() is None and time.monotonic() < deadline, nodes.output(0)[-3000:]
            time.sleep(0.1)
        os.kill(nodes.launchers[1].pid, signal.SIGKILL)
        assert nodes.launchers[0].wait(SECONDS) != 0
