"""What `docker run IMAGE …` runs.

usage:
  docker run IMAGE                                  the quickstart: corpus, training, fold, export, a sample
  docker run IMAGE train RECIPE [section.key=value …]
                                                    the recipe on as many ranks as it asks for, in this container
  docker run IMAGE TOOL [arguments …]               tools/TOOL.py, such as fold_export, generate, plan; --help explains
  docker run IMAGE python …                         anything else, such as a launcher command of several nodes
  docker run IMAGE help                             this text and the list of tools

Add --gpus all for the GPU image, --shm-size 8g for several ranks, and -v for data, runs and exported, which lie
under /opt/vha-paddle.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vha_paddle.config import load_recipe
from vha_paddle.errors import UserError, run_tool

LAUNCHER = ("-m", "paddle.distributed.launch")


def tools() -> list[str]:
    return sorted(path.stem for path in (ROOT / "tools").glob("*.py"))


def command(arguments: list[str]) -> list[str]:
    """The program that the container's arguments stand for.

    Raises:
        UserError: there is none, or the recipe is wrong.
    """
    first, rest = (arguments[0], arguments[1:]) if arguments else ("quickstart", [])
    if first == "train":
        return _training(rest)
    if first in tools():
        return [sys.executable, f"tools/{first}.py", *rest]
    if shutil.which(first) is None:
        raise UserError(f"{first}: neither a tool ({', '.join(tools())}) nor a program of this image")
    return arguments


def _training(arguments: list[str]) -> list[str]:
    """The launcher with as many ranks as the recipe has. With other flags than --allow-changed the tool alone: it tells
    something, or starts its ranks itself (--reduced)."""
    tool = ["tools/train.py", *arguments]
    parser = argparse.ArgumentParser("train", add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--allow-changed", action="append")
    known, flags = parser.parse_known_intermixed_args(arguments)
    if flags or not known.words:
        return [sys.executable, *tool]
    recipe = load_recipe(Path(known.words[0]), known.words[1:])
    logs = f"{recipe.run.output}/logs"
    return [sys.executable, *LAUNCHER, "--nproc_per_node", str(recipe.num_ranks), "--log_dir", logs, *tool]


def main() -> None:
    arguments = sys.argv[1:]
    if arguments in (["help"], ["--help"], ["-h"]):
        print(f"{__doc__}\ntools: {', '.join(tools())}")
        return
    os.chdir(ROOT)
    program = command(arguments)
    os.execvp(program[0], program)


if __name__ == "__main__":
    run_tool(main)
