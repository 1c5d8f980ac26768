"""`tools/evaluate.py`: the loss of checkpoint and export, and the data that it refuses."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, small_recipe, small_tokenizer, trained_weights, write_checkpoint
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.data.indexed import write_indexed
from vha_paddle.data.tokenizer_files import IDENTIFYING_FILES
from vha_paddle.evaluate import tokenizer_digest
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.output import REPORT_FILE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory; `exported` beside it; `data` and `foreign`, made with its tokenizer and with another."""
    folder = tmp_path_factory.mktemp("evaluate")
    recipe, tokenizer = small_recipe(SMALL_VHA), small_tokenizer()
    path = folder / "run" / "checkpoints" / "step-00000007"
    write_checkpoint(path, recipe, trained_weights(recipe), tokenizer)
    export_checkpoint(path, folder / "exported", "float32")
    tokens = np.random.default_rng(0).integers(0, 320, 200)
    for name, digest in {"data": hashlib.sha256(tokenizer).hexdigest(), "foreign": "0" * 64}.items():
        write_indexed(folder / name, [tokens], 330, eod_id=None, tokenizer_sha256=digest, source="test")
    return folder / "run"


def tool(folder: Path, *arguments: str, length: str = "--sequence-length=12") -> subprocess.CompletedProcess[str]:
    lengths = [length] if length else []
    command = [sys.executable, str(ROOT / "tools/evaluate.py"), *arguments, *lengths, "--json"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_the_export_has_the_checkpoints_loss(run: Path) -> None:
    results = [tool(run.parent, model, "--data", "data") for model in ("run", "exported")]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    trained, served = (json.loads(result.stdout) for result in results)
    assert trained["tokens"] == served["tokens"] == 192
    assert (trained["sequences"], trained["sequence_length"]) == (16, 12)
    assert_close(np.array(served["loss"]), np.array(trained["loss"]), FLOAT32, "loss")


def test_sequences_are_as_long_as_in_training_unless_asked(run: Path) -> None:
    for model in ("run", "exported"):
        figures = json.loads(tool(run.parent, model, "--data", "data", length="").stdout)
        assert (figures["sequences"], figures["sequence_length"], figures["tokens"]) == (6, 32, 192)
    report = run.parent / "exported" / REPORT_FILE
    report.rename(report.with_name("away"))
    try:  # 200 tokens; the model promises 64 positions, and without its report it does not say what it was trained on
        figures = json.loads(tool(run.parent, "exported", "--data", "data", length="").stdout)
        assert (figures["sequences"], figures["sequence_length"]) == (3, 64)
    finally:
        report.with_name("away").rename(report)


def test_sequences_longer_than_the_model_serves_are_refused(run: Path) -> None:
    for model in ("run", "exported"):
        result = tool(run.parent, model, "--data", "data", length="--sequence-length=65")
        assert (result.returncode, result.stdout) == (2, "")
        assert "error: --sequence-length 65: must not exceed the model's max_position_embeddings=64;" in result.stderr


def test_data_of_another_tokenizer_is_refused(run: Path) -> None:
    for model in ("run", "exported"):
        result = tool(run.parent, model, "--data", "foreign")
        assert result.returncode == 2 and result.stdout == ""
        assert "foreign was made with tokenizer 0000" in result.stderr


def test_the_tokenizer_of_a_directory_that_holds_none_is_unknown(run: Path) -> None:
    exported = run.parent / "exported"
    assert tokenizer_digest(run) == tokenizer_digest(exported) == hashlib.sha256(small_tokenizer()).hexdigest()
    for name in IDENTIFYING_FILES:
        (exported / name).rename(exported / f"{name}.away")
    try:
        assert tokenizer_digest(exported) is None
    finally:
        for name in IDENTIFYING_FILES:
            (exported / f"{name}.away").rename(exported / name)
