"""Weights as files: shards, index, progress, and a stream that is not the plan."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import Exported
from vha_paddle.errors import RunError, UserError
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.plan import PlannedTensor
from vha_paddle.export.writer import shard_bytes, split_into_shards, write_weights


def tensor(name: str, *shape: int) -> PlannedTensor:
    return PlannedTensor(name, (name,), shape, np.dtype(np.float32))


def test_progress_counts_every_byte(exported: Exported, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = export_checkpoint(
        exported.checkpoint, tmp_path / "out", "float32", progress=lambda *call: calls.append(call)
    )
    assert len(calls) == report["tensors"]
    assert calls[-1] == (report["bytes"], report["bytes"])


def test_shards_are_filled_in_order_and_only_a_large_tensor_exceeds_the_limit() -> None:
    planned = [tensor("a", 10), tensor("b", 10), tensor("c", 100), tensor("d", 5), tensor("e", 5)]
    names = {file: [each.name for each in shard] for file, shard in split_into_shards(planned, 80).items()}
    assert names == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }


def test_the_index_names_the_file_of_every_tensor(exported: Exported, tmp_path: Path) -> None:
    report = export_checkpoint(exported.checkpoint, tmp_path / "out", "float32", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": report["bytes"]}
    assert len(index["weight_map"]) == report["tensors"]
    assert set(index["weight_map"].values()) == {p.name for p in (tmp_path / "out").glob("*.safetensors")}


@pytest.mark.parametrize("fault", ["missing", "twice", "extra", "wrong name", "wrong shape", "wrong dtype"])
def test_a_stream_that_is_not_the_plan_is_refused(tmp_path: Path, fault: str) -> None:
    planned = [tensor("a", 2, 3), tensor("b", 4)]
    a, b = ("a", np.zeros((2, 3), np.float32)), ("b", np.zeros(4, np.float32))
    streams = {
        "missing": [a],
        "twice": [a, a],
        "extra": [a, b, b],
        "wrong name": [a, ("c", b[1])],
        "wrong shape": [("a", np.zeros((3, 2), np.float32)), b],
        "wrong dtype": [a, ("b", np.zeros(4, np.float64))],
    }
    with pytest.raises(RunError, match="planned"):
        write_weights(tmp_path, planned, iter(streams[fault]))


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    planned = [tensor("a", 2, 3), tensor("b", 4)]
    stream = [("a", np.ones((2, 3), np.float32)), ("b", np.zeros(4, np.float32))]
    records = write_weights(tmp_path, planned, iter(stream), max_shard_bytes=30)
    assert set(records) == {path.name for path in tmp_path.glob("*.safetensors")} and len(records) == 2
    for name, record in records.items():
        content = (tmp_path / name).read_bytes()
        assert (record.bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2**31), ("64kb", 64_000), ("1TiB", 2**40), ("12345", 12345)],
)
def test_sizes_are_spelt_as_hugging_face_spells_them(text: str, num_bytes: int) -> None:
    assert shard_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0GB", "5 GB", "-1GB", "5G", "1.5GB", "GB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="must be a size such as 5GB"):
        shard_bytes(text)
