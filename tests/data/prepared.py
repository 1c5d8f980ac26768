"""What the tests of tools/prepare_data.py share: corpora on disk, plans, and the content of folders."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vha_paddle.data.prepare import Plan

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "prepare_data.py"
SPLIT_FILES = {f"{split}.{kind}" for split in ("train", "validation") for kind in ("bin", "idx", "json")}
FILES = {"tokenizer.model", "manifest.json"} | SPLIT_FILES


def run_tool(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def as_jsonl(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_mixed(folder: Path, texts: Sequence[str]) -> list[str]:
    """The texts, in order, as files of every kind below `folder`, named in that order."""
    folder.mkdir()
    bounds = [len(texts) * index // 6 for index in range(7)]
    one, two, three, four, five, six = (texts[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False))
    (folder / "0.jsonl").write_bytes(as_jsonl(one))
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(as_jsonl(two), mtime=0))
    pq.write_table(pa.table({"text": three, "id": range(len(three))}), folder / "2.parquet", row_group_size=4)
    (folder / "3.jsonl.zst").write_bytes(pa.compress(as_jsonl(four), "zstd", asbytes=True))
    for number, text in enumerate(five):
        (folder / f"4-{number:04d}.txt").write_bytes(text.encode())
    (folder / "5.jsonl").write_bytes(as_jsonl(six))
    return [str(folder)]


def plan_for(out: Path, inputs: Sequence[str], tokenizer: Path, **changes: object) -> Plan:
    """A plan of small parts."""
    values = {"validation_fraction": 0.2, "overwrite": False, "part_bytes": 2000} | changes
    return Plan(out=out, inputs=tuple(inputs), tokenizer=tokenizer, train_vocab_size=None, **values)  # type: ignore[arg-type]
