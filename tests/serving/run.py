"""`make serve-check`: do clients as they are published compute what the exported model computes?

Every model is exported, given to every client with the same prompt tokens, and compared with transformers 5 in
float32: the log-probabilities of the prompt's tokens and of 16 greedy tokens, and those tokens themselves. A client
that is known to refuse a model, or to make another one of it, must still do so, for docs/serving.md says so.

Exit code 1 where one does not do what is expected.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.serving.clients import PROCESSES, REFERENCE, WORKERS, Process
from tests.serving.compare import Found, compare, table
from tests.serving.models import MODELS, SIZES, Made, make
from tests.tolerances import FLOAT32

NUM_PROMPT, NUM_NEW = 48, 16
TEXT = "def fox(dog):\n    return 'lazy dogs, 12 of them: \u6f22\u5b57 \u00e9'  # jumps over\n"
TIMEOUT_S = 900


def ask(process: Process, made: dict[str, Made], folder: Path) -> dict[str, Any]:
    """The answers of one process; every model has the same error where it ends without an answer."""
    job_file, answer_file = folder / "job.json", folder / "answer.json"
    answer_file.unlink(missing_ok=True)
    directories = {name: getattr(made[name], process.reads) for name in process.models}
    tokens = np.random.default_rng(0).integers(4, SIZES["vocab_size"], NUM_PROMPT).tolist()
    job = {
        "models": {name: str(directory) for name, directory in directories.items()},
        "tokens": tokens,
        "num_new": NUM_NEW,
        "text": TEXT,
        "options": process.options,
    }
    job_file.write_text(json.dumps(job))
    command = [str(process.python), str(WORKERS / process.worker), str(job_file), str(answer_file)]
    try:
        result = subprocess.run(
            command, env=process.environment(), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder
        )
    except subprocess.TimeoutExpired:
        return _failed(process, f"no answer within {TIMEOUT_S} seconds")
    if not answer_file.is_file():
        return _failed(process, f"exit code {result.returncode}: {' | '.join(result.stderr.splitlines()[-3:])}")
    return json.loads(answer_file.read_text())


def _failed(process: Process, message: str) -> dict[str, Any]:
    return {"version": None, "models": {name: {"error": message} for name in process.models}}


def check(processes: tuple[Process, ...]) -> tuple[list[Found], dict[str, str]]:
    """Make the models, ask every client; what was found, and the version that each client names."""
    found: list[Found] = []
    versions: dict[str, str] = {}
    reference: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="serve-check-") as directory:
        folder = Path(directory)
        asked = {name for process in processes for name in process.models}
        made = {name: make(number, MODELS[name], folder) for number, name in enumerate(MODELS) if name in asked}
        for process in processes:
            print(f"{process.client}: {', '.join(process.models)}", file=sys.stderr, flush=True)
            answers = ask(process, made, folder)
            versions[process.client] = answers["version"]
            if process.client == REFERENCE:
                reference = _checked(answers["models"])
            found += [
                compare(process.client, name, process.expected, answers["models"][name], reference[name])
                for name in process.models
            ]
    return found, versions


def _checked(reference: dict[str, Any]) -> dict[str, Any]:
    """Without the reference nothing is compared; a model that repeats itself compares too little."""
    for name, answer in reference.items():
        if "error" in answer:
            sys.exit(f"{REFERENCE}: {name}: {answer['error']}")
        assert len(set(answer["greedy"])) > NUM_NEW // 4, f"{name}: its greedy tokens repeat: {answer['greedy']}"
    return reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--client",
        action="append",
        choices=sorted({process.client for process in PROCESSES} - {REFERENCE}),
        help="ask this one only, and the reference; may be repeated",
    )
    arguments = parser.parse_args()
    wanted = {REFERENCE, *arguments.client} if arguments.client else {process.client for process in PROCESSES}
    found, versions = check(tuple(process for process in PROCESSES if process.client in wanted))
    failed = [each for each in found if not each.passed]
    if arguments.json:
        cells = [asdict(each) | {"passed": each.passed} for each in found]
        print(json.dumps({"bound": FLOAT32, "versions": versions, "cells": cells, "passed": not failed}, indent=2))
    else:
        print(table(found))
        print(f"\nlargest difference of a log-probability over the largest (allowed: {FLOAT32:.0e}); greedy tokens")
        print("; ".join(f"{client}: {version}" for client, version in versions.items()))
    for each in failed:
        what = each.error or each.cell
        print(f"failed: {each.client}: {each.model}: {what}, expected: {each.expected}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
