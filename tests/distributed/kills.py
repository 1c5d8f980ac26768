"""Kill a run again and again, and compare what it becomes with a run that nothing has disturbed.

`KilledRun` is for tests and for the program `kill_harness.py`. The run is launched by Paddle's launcher. After each
kill, and when a last start has brought it to its end, every record of metrics.jsonl (but for times) and every byte of
every checkpoint must be the unbroken run's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vha_paddle.checkpoint.layout import checkpoints_directory, list_steps, step_directory
from vha_paddle.config import Recipe, recipe_to_yaml

HERE = Path(__file__).parent
TIMES = ("tokens_per_second", "mfu", "seconds", "memory", "communication_seconds")
"""Keys of a record that differ between runs."""
TIMEOUT = 600.0


@dataclass(frozen=True)
class Kill:
    """Who is killed when."""

    who: str
    """A rank's number, `ranks`, `launcher` or `everything`."""
    phase: str | None
    """Where rank 0 is then; None while the processes start."""
    steps_ahead: int
    """In which step, counted from the newest checkpoint; the next with the phase, where not all have it."""
    share: float
    """Of the time that the phase (or the start) takes at most, when: 0 to 1."""
    signal: str = "KILL"

    def __str__(self) -> str:
        where = "start" if self.phase is None else f"{self.phase}, {self.steps_ahead} steps on"
        return f"{self.who} ({where}, at {self.share:.2f})"


# What a phase takes at most, roughly, in seconds. A save that is written behind training begins with its phase.
LONGEST = {"data": 0.002, "forward": 0.02, "gradients": 0.02, "optimizer": 0.01, "evaluation": 0.03, "checkpoint": 0.15}
_MOMENTS = [None, None, "data", "forward", "gradients", "optimizer", *["evaluation"] * 2, *["checkpoint"] * 5]


def random_kill(generator: random.Random) -> Kill:
    """Any of the moments, saves most often."""
    who = generator.choice(["0", "1", "ranks", "launcher", "everything"])
    return Kill(who, generator.choice(_MOMENTS), generator.randint(1, 6), generator.random())


class KilledRun:
    """A run that is killed, in `recipe.run.output`, and the unbroken one, whose directory is kept beside it."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        self.output = Path(recipe.run.output)
        self.unbroken = self.output.with_name(f"{self.output.name}.unbroken")
        self.path = directory / "recipe.yaml"
        self.path.write_text(recipe_to_yaml(recipe), encoding="utf-8")
        self.start_seconds = 0.0

    def train_unbroken(self) -> None:
        """The run that nothing disturbs; its directory makes room for the other's."""
        begin = time.monotonic()
        self._end(self._launch(), expected_failure=False)
        self.start_seconds = time.monotonic() - begin - self._training_seconds()
        os.rename(self.output, self.unbroken)

    def kill(self, kill: Kill) -> int:
        """Start, or start again, and kill; returns the launcher's exit code."""
        steps = list_steps(self.output)
        newest = steps[-1] if steps else 0
        if kill.phase is None:
            launcher = self._launch()
            time.sleep(kill.share * self.start_seconds)
            for process in victims(launcher.pid, kill.who):
                os.kill(process, signal.Signals[f"SIG{kill.signal}"])
        else:
            every = {"evaluation": self.recipe.logging.eval_interval, "checkpoint": self.recipe.checkpoint.interval}
            step = newest + kill.steps_ahead
            step = min(step + -step % (every.get(kill.phase) or 1), self.recipe.num_steps)
            seconds = kill.share * LONGEST[kill.phase]
            launcher = self._launch(kill.signal, kill.who, str(step), kill.phase, str(seconds))
        return self._end(launcher, expected_failure=True)

    def said(self) -> str:
        """What the ranks of the last start said."""
        logs = sorted((self.directory / "logs").glob("workerlog.*"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def finish(self) -> None:
        """Start again, and let it come to its end."""
        self._end(self._launch(), expected_failure=False)

    @property
    def is_done(self) -> bool:
        """Whether the last step is saved."""
        return list_steps(self.output)[-1:] == [self.recipe.num_steps]

    def begin_anew(self) -> None:
        """Forget the run; the unbroken one stays."""
        shutil.rmtree(self.output)

    def check(self) -> None:
        """Compare with the unbroken run as far as this one has come.

        Raises:
            AssertionError: a record or a file differs.
        """
        expected = _records(self.unbroken)
        found = _records(self.output)
        assert found == expected[: len(found)], next(
            (mine, other) for mine, other in zip(found, expected, strict=False) if mine != other
        )
        for step in list_steps(self.output):
            theirs = step_directory(self.unbroken, step)
            if theirs.is_dir():  # a signal saves at other steps too
                mine = {path.name: path.read_bytes() for path in step_directory(self.output, step).iterdir()}
                other = {path.name: path.read_bytes() for path in theirs.iterdir()}
                assert mine.keys() == other.keys() and all(mine[name] == other[name] for name in mine), f"step {step}"

    def check_end(self) -> None:
        """Compare the finished run, of which nothing half-written must be left."""
        self.check()
        assert len(_records(self.output)) == self.recipe.num_steps
        assert list_steps(self.output)[-1] == self.recipe.num_steps
        assert not list(checkpoints_directory(self.output).glob(".*"))

    def clean(self) -> None:
        """End what is left of the processes."""
        for process in self._processes():
            os.kill(process, signal.SIGKILL)

    def _launch(self, *kill: str) -> subprocess.Popen[bytes]:
        shutil.rmtree(self.directory / "logs", ignore_errors=True)
        launcher = [sys.executable, str(HERE / "tied.py"), "paddle.distributed.launch", "--nproc_per_node", "2"]
        worker = [str(HERE / "kill_worker.py"), str(self.path), *kill]
        environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
        return subprocess.Popen(
            [*launcher, "--log_dir", str(self.directory / "logs"), *worker],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _end(self, launcher: subprocess.Popen[bytes], expected_failure: bool) -> int:
        """Wait for the launcher and for what it has started; returns the launcher's exit code."""
        try:
            code = launcher.wait(TIMEOUT)
            deadline = time.monotonic() + TIMEOUT
            while self._processes():
                assert time.monotonic() < deadline, "a rank goes on without its launcher"
                time.sleep(0.05)
        except BaseException:
            launcher.kill()
            self.clean()
            raise
        if not expected_failure:
            assert code == 0, self.said()[-6000:]
        return code

    def _processes(self) -> list[int]:
        """Those of this run, by the recipe on their command line."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != os.getpid():
                try:
                    words = (process / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue  # it has ended
                if str(self.path).encode() in words:
                    found.append(int(process.name))
        return found

    def _training_seconds(self) -> float:
        lines = (self.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = [json.loads(line)["seconds"] for line in lines]
        return sum(value for record in seconds for phase, value in record.items() if phase != "start")


def victims(launcher: int, who: str) -> list[int]:
    """Process ids; of ranks, those that the launcher has started so far."""
    ranks: dict[str, int] = {}
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii").split()
        for child in children:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            number = [word.split(b"=")[1].decode() for word in variables if word.startswith(b"PADDLE_TRAINER_ID=")]
            ranks |= {rank: int(child) for rank in number}
    except OSError:
        pass  # one has ended
    if who in ("launcher", "everything"):
        return [launcher, *(ranks.values() if who == "everything" else ())]
    return [process for rank, process in ranks.items() if who in (rank, "ranks")]


def _records(output: Path) -> list[dict[str, Any]]:
    """Whole records without the times."""
    metrics = output / "metrics.jsonl"
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]
