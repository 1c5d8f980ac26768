"""Carry out the Dockerfile without a container engine: each stage is an overlay over this machine's own system.

What this shows: that every step runs, that the build context holds what the steps need, that the image's program runs
as its user with nothing but the image's files. What it cannot show: the base image, whose place this machine takes (it
must be a Debian with the same Python), and the isolation of a real container. Needs root, for mounts.

  sudo python docker/rehearse.py cpu                   build the target, then run its quickstart
  sudo python docker/rehearse.py cpu generate --help   build it, then run that
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker/Dockerfile"


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it: the layers of files, lowest first, and the settings for a program."""

    layers: tuple[Path, ...] = (Path("/"),)
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "0"
    entrypoint: tuple[str, ...] = ()


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, without comments, lines joined."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def context_files() -> list[Path]:
    """The build context: what .dockerignore, which names what is wanted, lets through."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    wanted = [line[1:] for line in lines if line.startswith("!")]
    refused = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    found = [
        path for name in wanted for path in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])
    ]
    return [
        path
        for path in found
        if path.is_file() and not any(fnmatch.fnmatch(part, name) for part in path.parts for name in refused)
    ]


class Rehearsal:
    """The stages built so far, in a temporary directory."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.stages: dict[str, Stage] = {}
        self.arguments: dict[str, str] = {}

    def build(self, target: str) -> Stage:
        """Build the stages up to `target`, leaving out those of other targets."""
        name, stage = "", Stage()
        for instruction, rest in instructions():
            if instruction == "FROM":
                if name == target:
                    break
                base, _, name = rest.partition(" AS ")
                known = self.stages.get(base, Stage())
                upper = self.scratch / name
                (upper / "files").mkdir(parents=True)
                stage = replace(known, layers=(*known.layers, upper / "files"))
            elif instruction == "ARG":
                key, _, value = rest.partition("=")
                self.arguments[key] = value
            elif name.endswith(("-cpu", "-gpu")) and not name.endswith(f"-{target}"):
                continue  # another target's packages
            else:
                print(f"[{name}] {instruction} {rest}", flush=True)
                stage = self._carry_out(stage, instruction, rest)
            self.stages[name] = stage
        return self.stages[target]

    def _carry_out(self, stage: Stage, instruction: str, rest: str) -> Stage:
        if instruction == "ENV":
            pairs = dict(pair.split("=", 1) for pair in shlex.split(rest))
            path = {"PATH": os.environ["PATH"]} | stage.environment
            values = {key: re.sub(r"\$(\w+)", lambda found: path[found[1]], value) for key, value in pairs.items()}
            return replace(stage, environment=stage.environment | values)
        if instruction == "WORKDIR":
            self.run(stage, ["mkdir", "-p", rest])
            return replace(stage, directory=rest)
        if instruction == "USER":  # who may use this machine's Python, wherever it lies
            places = [str(place) for place in Path(sys.executable).resolve().parents[:-1]]
            self.run(stage, ["chmod", "a+rx", *places])
            return replace(stage, user=rest)
        if instruction == "ENTRYPOINT":
            return replace(stage, entrypoint=tuple(part.strip(' "') for part in rest.strip("[]").split(",")))
        if instruction == "RUN":
            self.run(stage, ["sh", "-ec", rest])
        elif instruction == "COPY":
            self._copy(stage, rest)
        elif instruction != "VOLUME":
            raise SystemExit(f"{instruction}: not rehearsed here")
        return stage

    def _copy(self, stage: Stage, rest: str) -> None:
        *options, source, target = rest.split()
        place = stage.layers[-1] / Path(stage.directory, target).relative_to("/")
        if options:
            origin = self.stages[options[0].removeprefix("--from=")]
            place.parent.mkdir(parents=True, exist_ok=True)
            self._in_mounted(origin, f"cp --archive {self.scratch}/merged{source} {place}")
            return
        for path in context_files():
            name = path.relative_to(ROOT)
            if source == "." or str(name) == source:
                to = place / name if source == "." else place
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)

    def run(self, stage: Stage, program: list[str]) -> None:
        """Run a program in the stage's files, as its user, with its environment."""
        passed = [f"{key}={value}" for key, value in (os.environ | stage.environment).items()]
        inside = ["env", "-i", *passed, "sh", "-ec", f'cd {shlex.quote(stage.directory)} && exec "$@"', "sh", *program]
        user = ["setpriv", f"--reuid={stage.user}", f"--regid={stage.user}", "--clear-groups"]
        merged = self.scratch / "merged"
        self._in_mounted(
            stage,
            f"mount --rbind /dev {merged}/dev; mount --types proc proc {merged}/proc; "
            f"exec chroot {merged} {shlex.join([*user, *inside])}",
            "--pid",
            "--fork",
            "--kill-child",
        )

    def _in_mounted(self, stage: Stage, script: str, *isolation: str) -> None:
        """Run a script of this machine's shell with the stage's files at `merged`. With a process table of its own it
        is process 1, as in a container."""
        merged, work = self.scratch / "merged", Path(tempfile.mkdtemp(dir=self.scratch))
        merged.mkdir(exist_ok=True)
        below = ":".join(str(layer) for layer in reversed(stage.layers[:-1]))
        mount = f"mount -t overlay overlay -o lowerdir={below},upperdir={stage.layers[-1]},workdir={work} {merged}"
        if result := subprocess.run(["unshare", "--mount", *isolation, "sh", "-ec", f"{mount}; {script}"]).returncode:
            sys.exit(f"error: a step ended with exit code {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("cpu", "gpu"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the image's program gets")
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("error: mounts need root; run it with sudo")
    with tempfile.TemporaryDirectory(prefix="rehearsal.") as scratch:
        # a file system of its own, in memory: layers of an overlay may not lie in each other
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8g", "tmpfs", scratch], check=True)
        try:
            rehearsal = Rehearsal(Path(scratch))
            image = rehearsal.build(options.target)
            print(f"[{options.target}] runs {shlex.join([*image.entrypoint, *options.arguments])}", flush=True)
            rehearsal.run(image, [*image.entrypoint, *options.arguments])
        finally:
            subprocess.run(["umount", scratch], check=True)


if __name__ == "__main__":
    main()
