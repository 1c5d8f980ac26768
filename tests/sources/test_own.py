"""Checkpoints of this package as sources: masters before roundings, and digests taken beside the reading."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, small_recipe, small_tokenizer, trained_weights, write_checkpoint
from vha_paddle.checkpoint import layout
from vha_paddle.errors import UserError
from vha_paddle.sources import digests as module
from vha_paddle.sources.digests import Digests
from vha_paddle.sources.own import open_own
from vha_paddle.tensor_file import write_tensors

MODEL, OPTIMIZER = layout.tensor_file("model", 0, 1), layout.tensor_file("optimizer", 0, 1)
RECIPE = small_recipe(SMALL_VHA)
MASTERS = trained_weights(RECIPE)


def write(path: Path, with_masters: bool) -> Path:
    """A bfloat16 run's checkpoint; its moments are zeros."""
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in MASTERS.items()}
    write_checkpoint(path, RECIPE, rounded, small_tokenizer())
    state = {f"{name}.moment1": np.zeros(array.shape, np.float32) for name, array in MASTERS.items()}
    if with_masters:
        state |= {f"{name}.master": array for name, array in MASTERS.items()}
    specs = {name: (array.dtype, array.shape) for name, array in state.items()}
    write_tensors(path / OPTIMIZER, specs, state.values(), layout.TENSOR_METADATA)
    files = (file for file in path.iterdir() if file.name != layout.MANIFEST_FILE)
    layout.write_manifest(path, {file.name: layout.record_of(file) for file in files})
    return path


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("with_masters", [False, True])
def test_the_best_weights_are_read_and_the_others_named(tmp_path: Path, with_masters: bool) -> None:
    weights = open_own(write(tmp_path / "checkpoint", with_masters), with_digests=False).weights
    for name, array in MASTERS.items():
        expected = array if with_masters else array.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(weights.read(name), expected)
        assert weights.specs[name].dtype == expected.dtype
        assert weights.specs[name].stored == ((f"{name}.master",) if with_masters else (name,))
    left = {name: f"rounded from {name}.master" for name in MASTERS} if with_masters else {}
    assert weights.left_out == left


def origin(path: Path) -> dict[str, object]:
    provenance = open_own(path, with_digests=False).provenance
    return {key: provenance[key] for key in ("imported_from", "started_from") if key in provenance}


def test_a_checkpoint_says_where_its_weights_came_from_before_any_training(tmp_path: Path) -> None:
    started = RECIPE.model_copy(update={"run": RECIPE.run.model_copy(update={"start_from": "warm/gqa"})})
    plain = write_checkpoint(tmp_path / "plain", RECIPE, MASTERS, small_tokenizer())
    trained = write_checkpoint(tmp_path / "trained", started, MASTERS, small_tokenizer())
    assert (origin(plain), origin(trained)) == ({}, {"started_from": "warm/gqa"})
    files = {"b.safetensors": "22", "a.json": "11"}
    report = {"directory": "Qwen3-0.6B", "model_type": "qwen3", "files": files}
    (plain / "import_report.json").write_text(json.dumps(report))
    digest = hashlib.sha256(b"11  a.json\n22  b.safetensors\n").hexdigest()
    expected = {"directory": "Qwen3-0.6B", "architecture": "Qwen3ForCausalLM", "files_sha256": digest}
    assert origin(plain) == {"imported_from": expected}
    (trained / "warm_start_report.json").write_text(json.dumps({"started_from": "gqa, checkpoint step-00000300"}))
    assert origin(trained) == {"started_from": "gqa, checkpoint step-00000300"}


@pytest.mark.parametrize("text", ["{}", '{"directory": "d", "model_type": "bert", "files": {}}', "[]"])
def test_a_report_that_says_no_origin_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", RECIPE, MASTERS, small_tokenizer())
    (path / "import_report.json").write_text(text)
    with pytest.raises(UserError, match=r"import_report\.json: "):
        open_own(path, with_digests=False)


@pytest.mark.parametrize("with_masters", [False, True])
def test_what_is_read_is_digested_and_nothing_else(tmp_path: Path, with_masters: bool) -> None:
    path = write(tmp_path / "checkpoint", with_masters)
    unused = MODEL if with_masters else OPTIMIZER
    damage(path / unused)
    source = open_own(path, with_digests=False)
    with Digests(source) as digests:
        found = digests.result()
    assert found == {name: layout.sha256_of(path / name) for name in source.files}
    assert unused not in found and {OPTIMIZER, MODEL, "recipe.yaml", "state.json", "tokenizer.model"} - {unused} == set(
        found
    )


@pytest.mark.parametrize("name", [MODEL, "tokenizer.model", "recipe.yaml"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "checkpoint", with_masters=False)
    source = open_own(path, with_digests=False)
    damage(path / name)
    with Digests(source) as digests, pytest.raises(UserError, match=f"{name}: differs from the manifest"):
        digests.result()


def test_files_are_digested_side_by_side_in_small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_own(write(tmp_path / "checkpoint", with_masters=True), with_digests=False)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1000)
    with Digests(source) as digests:
        assert digests.result() == dict(source.files)


def test_a_file_without_a_stated_digest_is_digested_too(tmp_path: Path) -> None:
    source = open_own(write(tmp_path / "checkpoint", with_masters=False), with_digests=False)
    with Digests(replace(source, files=dict.fromkeys(source.files))) as digests:
        assert digests.result() == dict(source.files)
    with Digests(replace(source, files={})) as digests:
        assert digests.result() == {}
    with Digests(replace(source, files={"absent": None})) as digests, pytest.raises(UserError, match="cannot be read"):
        digests.result()


def test_digesting_stops_when_the_export_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_own(write(tmp_path / "checkpoint", with_masters=False), with_digests=False)
    begun, chunk = threading.Event(), module._chunk
    count = 0

    def counted(*arguments: object) -> memoryview:
        nonlocal count
        count += 1
        begun.set()
        return chunk(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_chunk", counted)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    with Digests(source):
        begun.wait(30)
    assert count < sum((source.path / name).stat().st_size for name in source.files)
