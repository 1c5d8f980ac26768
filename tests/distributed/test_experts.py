"""Runs of a mixture of experts on several ranks: what is recorded, saved, read under other layouts, and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases import num_ranks
from tests.distributed.launch import run_ranks
from tests.distributed.test_launched_runs import logical_digests
from tests.tolerances import FLOAT32, assert_close
from tests.train.conftest import NUM_STEPS, MakeRecipe, dataset, make_recipe, write_recipe
from vha_paddle.checkpoint.layout import open_checkpoint, step_directory
from vha_paddle.config import Recipe

__all__ = ["dataset", "make_recipe"]  # fixtures
HERE = Path(__file__).parent
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "router_z_loss_coef": 1e-3,
    "router_bias_update_rate": 1e-3,
}
MIXTURE = {"model__intermediate_size": None, "model__experts": EXPERTS, "checkpoint__keep": NUM_STEPS}


def trained(recipe: Recipe, path: Path) -> list[dict[str, Any]]:
    run_ranks(HERE / "training_worker.py", recipe.num_ranks, [str(write_recipe(recipe, path))])
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def figures(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The series of every number that a run records and that does not tell the time."""
    series = {key: np.array([record[key] for record in records]) for key in ("loss", "grad_norm")}
    series["val_loss"] = np.array([record["val_loss"] for record in records if "val_loss" in record])
    return series | {key: np.array([record["moe"][key] for record in records]) for key in records[0]["moe"]}


def test_ranks_whose_experts_get_no_token_take_part() -> None:
    run_ranks(HERE / "expert_layer_worker.py", 2, [])


@pytest.mark.parametrize(
    "layout",
    [{"sharding": 2, "expert": 2}, {"pipeline": 2, "sharding": 2, "expert": 2}],
    ids=lambda layout: ", ".join(layout),
)
def test_a_run_records_what_one_process_records(
    layout: dict[str, int], make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    one = make_recipe(run__output=str(tmp_path / "one"), **MIXTURE)
    many = make_recipe(run__output=str(tmp_path / "many"), parallel=layout, data__micro_batch_size=1, **MIXTURE)
    expected, found = (figures(trained(recipe, tmp_path / "recipe.yaml")) for recipe in (one, many))
    assert expected["max_load"].shape == (NUM_STEPS, 2)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert_close(found[key], values, FLOAT32, key)


def test_checkpoints_keep_experts_and_routers_under_any_layout_and_a_run_resumes_bit_exactly(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make_recipe(parallel={"sharding": 2, "expert": 2}, **MIXTURE)
    unbroken = figures(trained(recipe, tmp_path / "recipe.yaml"))
    newest = step_directory(Path(recipe.run.output), NUM_STEPS)
    files = {file.name: file.read_bytes() for file in newest.iterdir()}
    expected = logical_digests(newest)
    checkpoint = open_checkpoint(newest)
    routers = {name: checkpoint.router_tensors().array(name).tobytes() for name in checkpoint.router_tensors()}
    assert [name.rpartition("mlp.")[2] for name in routers] == ["gate.bias", "gate.load"] * 2
    experts = checkpoint.model_tensors().entries["model.layers.0.mlp.experts.down_proj"]
    assert experts.shape == (6, 8, 16) and len(experts.pieces) == 2

    source = newest
    for number, layout in enumerate(("one", "tensor_2_sharding_2_expert_2", "sharding_2_expert_2")):
        output = tmp_path / f"copy{number}"
        run_ranks(HERE / "reshard_worker.py", num_ranks(layout), [str(source), str(output), layout])
        for mode in ("synchronous", "asynchronous"):
            source = step_directory(output / mode, NUM_STEPS)  # the next layout reads what this one wrote
            assert logical_digests(source) == expected, f"{layout}, {mode}"
            tensors = open_checkpoint(source).router_tensors()
            assert {name: tensors.array(name).tobytes() for name in tensors} == routers, f"{layout}, {mode}"

    shutil.rmtree(newest)
    resumed = figures(trained(recipe, tmp_path / "recipe.yaml"))
    assert all(np.array_equal(resumed[key], values) for key, values in unbroken.items())
    assert {file.name: file.read_bytes() for file in newest.iterdir()} == files
