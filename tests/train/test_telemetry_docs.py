"""docs/telemetry.md against the records of real runs: every key of one is in the other."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.train.conftest import MEASURED, MakeRecipe, write_recipe
from vha_paddle.config import Recipe
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train import step as step_module
from vha_paddle.train.trainer import RunData, Trainer

ROOT = Path(__file__).resolve().parents[2]
TRAINING_WORKER = ROOT / "tests" / "distributed" / "training_worker.py"
GPU = {"mfu_of_peak", "memory.allocated", "memory.reserved"}
SEEN_ELSEWHERE = {"failed_saves"}  # tests/train/test_asynchronous_save.py
MIXTURE: dict[str, Any] = {
    "model__intermediate_size": None,
    "model__tie_word_embeddings": False,
    "model__experts": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "capacity_factor": 1.25,
    },
}


def documented() -> dict[str, str]:
    """The keys of the table and their units."""
    text = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([a-z_.A-Z]+)` \| (.*?) \|", text, re.MULTILINE))


def records(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def keys(record: dict[str, Any]) -> set[str]:
    found = set()
    for key, value in record.items():
        found |= {f"{key}.{part}" for part in value} if isinstance(value, dict) else {key}
    return {re.sub(r"^val_losses\..*", "val_losses.NAME", key) for key in found}


@pytest.fixture
def found(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Path) -> list[Any]:
    """Records of a dense run with all that can be asked for and a skipped step, of a mixture, and of a pipeline."""
    validation = {"web": str(dataset / "validation"), "code": str(dataset / "validation")}
    dense = make_recipe(data__validation=validation, logging__maps_interval=2)
    pipeline = make_recipe(run__output=str(tmp_path / "pipeline"), parallel__pipeline=2)
    run_ranks(TRAINING_WORKER, 2, [str(write_recipe(pipeline, tmp_path / "recipe.yaml"))])
    mixture = make_recipe(run__output=str(tmp_path / "mixture"), **MIXTURE)
    Trainer(mixture, RunData(mixture), Mesh()).fit()
    original = step_module.accumulate_gradients
    losses = iter([1.0, math.nan] + 9 * [1.0])
    monkeypatch.setattr(step_module, "accumulate_gradients", lambda *a, **o: original(*a, **o) * next(losses))
    Trainer(dense, RunData(dense), Mesh()).fit()
    return [record for recipe in (dense, mixture, pipeline) for record in records(recipe)]


def test_every_key_of_a_record_is_in_the_table_and_the_other_way_round(found: list[dict[str, Any]]) -> None:
    recorded = set().union(*map(keys, found))
    assert recorded - set(documented()) == set()
    assert set(documented()) - recorded == GPU | SEEN_ELSEWHERE


def test_seconds_and_bytes_are_what_the_table_says(found: list[dict[str, Any]]) -> None:
    assert {key for key, unit in documented().items() if unit == "s"} >= {"seconds.data", "communication_seconds"}
    for record in found:
        assert all(0 <= seconds < 600 for seconds in record["seconds"].values())
        assert record.get("communication_seconds", 0) <= sum(record["seconds"].values())
        assert record["mfu"] > 0
        if "memory" in record:
            assert 2**20 < record["memory"]["resident"] < 2**40
        norms = [norm for norm in record["grad_norms"].values() if norm is not None]
        assert math.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(record["grad_norm"], rel=1e-12)


def test_the_page_names_what_differs_between_runs_of_a_recipe() -> None:
    text = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"but times and memory \((.*?)\)", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(MEASURED)
