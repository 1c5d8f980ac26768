"""Runs that start from given weights and record their maps do so alike in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import write_checkpoint
from tests.distributed.launch import run_ranks
from tests.tolerances import FLOAT32, assert_close
from tests.train.conftest import MakeRecipe, dataset, make_recipe, write_recipe
from tests.weights import trained_weights
from vha_paddle.config import Recipe
from vha_paddle.maps import MEASURES

__all__ = ["dataset", "make_recipe"]  # fixtures
WORKER = Path(__file__).with_name("training_worker.py")

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor_2": {"tensor": 2},
    "pipeline_2": {"pipeline": 2},
    "sharding_2_stage_3": {"sharding": 2, "sharding_stage": 3},
    "tensor_2_pipeline_2": {"tensor": 2, "pipeline": 2},
    "data_2": {"data": 2},
}


def recorded(recipe: Recipe) -> dict[str, np.ndarray]:
    """Losses, gradient norms, validation losses, and every measure of every layer and group at every step."""
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert all(record["maps"]["layer"] == [0, 1] for record in records)
    values = {key: np.array([r[key] for r in records if key in r]) for key in ("loss", "grad_norm", "val_loss")}
    return values | {measure: np.array([record["maps"][measure] for record in records]) for measure in MEASURES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("maps_and_start")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_starts_and_records_as_one_process(
    layout: str, make_recipe: MakeRecipe, dataset: Path, folder: Path, tmp_path: Path
) -> None:
    start = folder / "start"
    changes = {"run__start_from": str(start), "logging__maps_interval": 1, "schedule__total_tokens": 3 * 64}
    one = make_recipe(run__output=str(folder / "one"), **changes)
    many = make_recipe(run__output=str(tmp_path / "many"), parallel=LAYOUTS[layout], **changes)
    if not start.exists():  # the first of the layouts
        weights = {name: array.astype(np.float32) for name, array in trained_weights(one.model, seed=1).items()}
        write_checkpoint(start, one, weights, (dataset / "tokenizer.model").read_bytes())
        run_ranks(WORKER, 1, [str(write_recipe(one, folder / "recipe.yaml"))])
    run_ranks(WORKER, many.num_ranks, [str(write_recipe(many, tmp_path / "recipe.yaml"))])
    expected, found = recorded(one), recorded(many)
    assert len(expected["val_loss"]) == 1 and len(expected["loss"]) == 3
    for key, values in expected.items():
        assert_close(found[key], values, FLOAT32, key)
