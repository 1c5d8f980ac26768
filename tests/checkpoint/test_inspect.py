"""Inspecting, verifying and resharding, as functions."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, STATE, small_recipe, trained_weights, write_checkpoint
from vha_paddle.checkpoint import inspect
from vha_paddle.checkpoint.inspect import describe, divide, find_faults, reshard
from vha_paddle.checkpoint.layout import MANIFEST_FILE, open_checkpoint, record_of, write_manifest
from vha_paddle.errors import RunError, UserError
from vha_paddle.tensor_file import read_tensors, write_tensors

RECIPE = small_recipe(SMALL_VHA)
WEIGHTS = trained_weights(RECIPE)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "step-00000007", RECIPE, WEIGHTS, b"a tokenizer", num_files=2)


def silent(count: int) -> None:
    """Progress that nobody looks at."""


def assert_holds_the_weights(path: Path) -> None:
    tensors = open_checkpoint(path).model_tensors()
    assert set(tensors) == set(WEIGHTS)
    for name, array in WEIGHTS.items():
        assert tensors.array(name).tobytes() == array.tobytes(), name


def test_the_description_counts_each_parameter_once(checkpoint: Path) -> None:
    figures = describe(checkpoint)
    assert figures["parameters"] == sum(array.size for array in WEIGHTS.values())
    assert (figures["step"], figures["tokens"], figures["samples"]) == (STATE.step, STATE.tokens, STATE.samples)
    assert figures["layout"]["tensor"] == 1
    listed = [path for path in checkpoint.iterdir() if path.name != MANIFEST_FILE]
    assert figures["bytes"] == sum(path.stat().st_size for path in listed)
    assert {file["name"] for file in figures["files"]} == {path.name for path in listed}


def test_the_description_says_which_file_holds_which_part(checkpoint: Path) -> None:
    rows = {row["name"]: row for row in describe(checkpoint)["tensors"]}
    assert rows.keys() == WEIGHTS.keys()
    row = rows["model.embed_tokens.weight"]
    assert row["shape"] == (330, 20) and row["dtype"] == "float32"
    assert row["parts"] == [
        {"file": f"model-0000{n}-of-00002.safetensors", "view": (330, 20), "start": (165 * n, 0), "stop": (stop, 20)}
        for n, stop in ((0, 165), (1, 330))
    ]


def test_describing_reads_no_tensor(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor or a digest was read")

    monkeypatch.setattr("vha_paddle.tensor_file.np.memmap", refuse)
    monkeypatch.setattr("vha_paddle.checkpoint.layout.sha256_of", refuse)
    assert describe(checkpoint)["step"] == STATE.step


def test_every_damaged_file_is_named(checkpoint: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "tokenizer.model"]
    for name in names:
        content = bytearray((checkpoint / name).read_bytes())
        content[-1] ^= 1
        (checkpoint / name).write_bytes(content)
    (checkpoint / "recipe.yaml").unlink()
    faults = find_faults(checkpoint, silent)
    assert sorted(name for name, fault in faults.items() if fault) == sorted([*names, "recipe.yaml"])


def test_progress_comes_to_the_bytes_of_all_files(checkpoint: Path) -> None:
    told: list[int] = []
    find_faults(checkpoint, told.append)
    assert sum(told) == inspect.total_bytes(checkpoint)


def test_a_part_that_was_never_written_is_found(checkpoint: Path) -> None:
    """The manifest agrees with the files, and yet they are not all."""
    (checkpoint / "model-00001-of-00002.safetensors").unlink()
    files = [path for path in checkpoint.iterdir() if path.name != MANIFEST_FILE]
    write_manifest(checkpoint, {path.name: record_of(path) for path in files})
    with pytest.raises(RunError, match="a part is missing after"):
        find_faults(checkpoint, silent)


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_resharded_checkpoint_holds_the_same_bits(checkpoint: Path, tmp_path: Path, num_files: int) -> None:
    reshard(checkpoint, tmp_path / "out", num_files, silent)
    assert_holds_the_weights(tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").state == STATE
    written = sorted((tmp_path / "out").glob("model-*"))
    assert [path.name for path in written] == [
        f"model-{n:05d}-of-{num_files:05d}.safetensors" for n in range(num_files)
    ]
    sizes = [sum(entry.num_bytes for entry in read_tensors(path).entries.values()) for path in written]
    assert max(sizes) - min(sizes) <= WEIGHTS["model.embed_tokens.weight"].nbytes


def test_no_more_files_are_made_than_there_are_tensors(tmp_path: Path) -> None:
    weights = {"a": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}
    checkpoint = write_checkpoint(tmp_path / "in", RECIPE, weights, b"a tokenizer")
    reshard(checkpoint, tmp_path / "out", 5, silent)
    assert len(list((tmp_path / "out").glob("model-*"))) == 2


def test_large_and_small_tensors_are_divided_about_equally() -> None:
    groups = divide({"a": 8, "b": 1, "c": 4, "d": 3, "e": 2}, 2)
    assert [sum({"a": 8, "b": 1, "c": 4, "d": 3, "e": 2}[name] for name in group) for group in groups] == [9, 9]


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    weights = {f"layers.{index}": np.full((2, 200_000), index, np.float32) for index in range(30)}
    checkpoint = write_checkpoint(tmp_path / "in", RECIPE, weights, b"a tokenizer", num_files=2)
    tracemalloc.start()
    reshard(checkpoint, tmp_path / "out", 1, silent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one = weights["layers.0"].nbytes
    waiting = 8 * one  # smaller than a chunk, of which eight may wait to be written and digested
    assert peak < waiting + 4 * one < sum(array.nbytes for array in weights.values()) / 2, f"{peak:,} bytes"


def test_an_output_that_exists_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out: exists"):
        reshard(checkpoint, tmp_path / "out", 1, silent)


def test_an_output_inside_the_checkpoint_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="lies inside the checkpoint"):
        reshard(checkpoint, checkpoint / "out", 1, silent)


def test_fewer_than_one_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--files 0: must be at least 1"):
        reshard(checkpoint, tmp_path / "out", 0, silent)


def test_a_full_disk_leaves_no_output(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inspect, "write_manifest", full)
    with pytest.raises(RunError, match="out: cannot be written"):
        reshard(checkpoint, tmp_path / "out", 1, silent)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name]


def test_a_damaged_checkpoint_is_not_resharded(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model-00000-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="differs from the manifest"):
        reshard(checkpoint, tmp_path / "out", 1, silent)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"files": 3}', '{"files": {"a": 1}}', '{"files": {"a": {"bytes": "1", "sha256": ""}}}']
    + ['{"files": {"../state.json": {"bytes": 1, "sha256": ""}}}', "9" * 5000, "[" * 100_000],
)
def test_what_is_no_manifest_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / MANIFEST_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="manifest.json: (not a manifest|cannot be read)"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["model-00000-of-00001.safetensors", "optimizer-00000-of-00001.safetensors"])
def test_a_manifest_without_tensors_is_refused(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "in", RECIPE, WEIGHTS, b"a tokenizer")
    files = [path for path in checkpoint.iterdir() if path.name not in (MANIFEST_FILE, name)]
    write_manifest(checkpoint, {path.name: record_of(path) for path in files})
    with pytest.raises(UserError, match=f"holds no {name.partition('-')[0]}-"):
        open_checkpoint(checkpoint)


def test_a_file_that_the_manifest_does_not_list_is_not_read(checkpoint: Path) -> None:
    spec = {"stray": (np.dtype(np.float32), (1,))}
    write_tensors(checkpoint / "model-00002-of-00002.safetensors", spec, [np.zeros(1, np.float32)], {})
    assert_holds_the_weights(checkpoint)
