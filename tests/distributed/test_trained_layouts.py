"""Whole runs under each axis: the record of every step, validation included, is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.launch import run_ranks
from tests.tolerances import FLOAT32, assert_close
from tests.train.conftest import NUM_STEPS, MakeRecipe, dataset, make_recipe, write_recipe
from vha_paddle.config import Recipe

__all__ = ["dataset", "make_recipe"]  # fixtures
WORKER = Path(__file__).with_name("training_worker.py")

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "tensor, pipeline": {"tensor": 2, "sequence": True, "pipeline": 2},
    "data": {"data": 2},
    "sharded weights": {"sharding": 2, "sharding_stage": 3},
}
# three sequences: two microbatches of which the second is half full, and data ranks with unequal work
CHANGES = {"logging__eval_sequences": 3, "model__hidden_dropout": 0.1}


def trained(recipe: Recipe, path: Path) -> dict[str, np.ndarray]:
    """Loss, gradient norm and validation loss of every step that has one."""
    run_ranks(WORKER, recipe.num_ranks, [str(write_recipe(recipe, path))])
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    return {key: np.array([r[key] for r in records if key in r]) for key in ("loss", "grad_norm", "val_loss")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_records_what_one_process_records(layout: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    one = make_recipe(run__output=str(tmp_path / "one"), **CHANGES)
    many = make_recipe(run__output=str(tmp_path / "many"), parallel=LAYOUTS[layout], **CHANGES)
    expected, found = (trained(recipe, tmp_path / "recipe.yaml") for recipe in (one, many))
    assert len(expected["val_loss"]) == 2
    for key, values in expected.items():
        assert_close(found[key], values, FLOAT32, key)
