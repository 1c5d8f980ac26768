"""The maps' record in training: when it is made, what it holds, where it is shown."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracles import maps as oracle
from tests.tolerances import FLOAT64, assert_close
from tests.train.conftest import NUM_STEPS, MakeRecipe
from vha_paddle.checkpoint.layout import open_checkpoint
from vha_paddle.config import Recipe
from vha_paddle.errors import UserError
from vha_paddle.maps import MEASURES, summary
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.trainer import RunData, Trainer


def records(recipe: Recipe) -> list[dict[str, Any]]:
    Trainer(recipe, RunData(recipe), Mesh()).fit()
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_maps_are_recorded_at_their_interval_and_at_the_end(make_recipe: MakeRecipe) -> None:
    assert [line["step"] for line in records(make_recipe(logging__maps_interval=4)) if "maps" in line] == [4, NUM_STEPS]


def test_they_are_off_by_default(make_recipe: MakeRecipe) -> None:
    assert not any("maps" in line for line in records(make_recipe()))


def test_a_record_holds_every_measure_of_the_weights_after_the_step(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(logging__maps_interval=3)
    record = records(recipe)[-1]["maps"]
    assert record.keys() == {"layer", *MEASURES} and record["layer"] == [0, 1]
    tensors = open_checkpoint(Path(recipe.run.output)).model_tensors()
    for layer in range(2):
        maps = [
            tensors.array(f"model.layers.{layer}.self_attn.{name}") for name in ("premix", "postmix_a", "postmix_b")
        ]
        expected = oracle.layer_figures(*(array.astype(np.float64) for array in maps))
        for measure, value in expected.items():
            assert_close(np.array(record[measure][layer]), np.array(value), FLOAT64, measure)


def test_their_means_are_a_line_of_the_console(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    lines = records(make_recipe(logging__maps_interval=2))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("maps:")]
    assert shown == [summary(line["maps"]) for line in lines if "maps" in line]
    assert shown[-1].startswith("maps: |W-I| ")


def test_a_tracker_gets_their_means(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=lambda values, step: logged.append(values), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    recipe = make_recipe(logging__maps_interval=6, logging__wandb="online", logging__wandb_project="test")
    record = records(recipe)[-1]["maps"]
    assert "maps" not in logged[-1] and "maps/premix_distance" not in logged[0]
    mean = np.mean(record["premix_distance"])
    assert logged[-1]["maps/premix_distance"] == pytest.approx(mean)


def test_a_model_without_maps_is_refused(make_recipe: MakeRecipe) -> None:
    grouped = {"kind": "grouped", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    with pytest.raises(UserError, match="logging.maps_interval=5: has no effect"):
        make_recipe(model__attention=grouped, optim__decay_target=None, logging__maps_interval=5)


@pytest.mark.parametrize("left_out", ["premix", "postmix"])
def test_a_model_with_one_map_has_its_measures_only(left_out: str, make_recipe: MakeRecipe) -> None:
    changes: dict[str, Any] = {f"model__attention__{left_out}": "none", "logging__maps_interval": 6}
    if left_out == "postmix":
        changes["model__attention__postmix_rank"] = None
    record = records(make_recipe(**changes))[-1]["maps"]
    assert record.keys() == {"layer", *(measure for measure in MEASURES if not measure.startswith(left_out))}
