"""Look into a checkpoint, check that it is intact, or write its tensors into other files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.checkpoint.inspect import describe, find_faults, reshard, table, total_bytes
from vha_paddle.errors import RunError, run_tool

EPILOG = """\
examples:
  # what the newest checkpoint of a run holds, and which file holds it; reads no tensor
  python tools/checkpoint.py inspect runs/quickstart

  # one number out of it
  python tools/checkpoint.py inspect runs/quickstart --json | jq .parameters

  # recompute every digest after a copy
  python tools/checkpoint.py verify /backup/step-00000300

  # what 1,024 ranks wrote, in 8 files each for weights and optimizer state
  python tools/checkpoint.py reshard runs/large/checkpoints/step-00100000 archive/step-00100000 --files 8

A checkpoint holds one file of weights and one of optimizer state for each rank that had something to write; any
layout reads any of them. A resharded one holds the same tensors bit by bit. To continue a run from it, put it at
RUN/checkpoints/step-XXXXXXXX of a new run.output.
exit codes: 0 done, 1 the checkpoint is damaged (each damaged file is named) or the disk is full, 2 wrong input.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{inspect,verify,reshard}")
    for name, text in {
        "inspect": "step, tokens, layout, files, and every tensor",
        "verify": "recompute the digests of all files; check that each tensor is there exactly once",
        "reshard": "write the same tensors into N files of about equal size",
    }.items():
        command = commands.add_parser(
            name, help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("checkpoint", type=Path, help="its directory, or a run's (the newest is taken)")
        if name == "reshard":
            command.add_argument("output", type=Path, help="directory to make; it appears complete or not at all")
            command.add_argument("--files", type=int, default=1, metavar="N", help="default: %(default)s")
        command.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.command == "inspect":
        figures = describe(arguments.checkpoint)
        print(json.dumps(figures, indent=2) if arguments.json else "\n".join(table(figures)))
    elif arguments.command == "verify":
        verify(arguments.checkpoint, arguments.json)
    else:
        with progress_bar("writing", total_bytes(arguments.checkpoint)) as bar:
            reshard(arguments.checkpoint, arguments.output, arguments.files, bar.update)
        figures = describe(arguments.output)
        written = {"output": str(arguments.output), "files": figures["files"]}
        print(
            json.dumps(written, indent=2)
            if arguments.json
            else f"wrote {len(figures['files'])} files to {arguments.output}"
        )


def verify(checkpoint: Path, as_json: bool) -> None:
    """Print what is wrong with each file.

    Raises:
        RunError: a file is damaged.
    """
    with progress_bar("verifying", total_bytes(checkpoint)) as bar:
        faults = find_faults(checkpoint, bar.update)
    damaged = [fault for fault in faults.values() if fault is not None]
    if as_json:
        print(
            json.dumps(
                {"intact": not damaged, "faults": {name: fault for name, fault in faults.items() if fault}}, indent=2
            )
        )
    elif not damaged:
        print(f"{len(faults)} files are intact, and hold every tensor exactly once")
    if damaged:
        raise RunError("; ".join(damaged))


def progress_bar(text: str, num_bytes: int) -> tqdm:
    """On a terminal only."""
    return tqdm(desc=text, total=num_bytes, unit="B", unit_scale=True, disable=None, leave=False)


if __name__ == "__main__":
    run_tool(main)
