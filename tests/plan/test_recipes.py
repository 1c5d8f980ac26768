"""Every recipe of the project can be counted and planned, and fits the GPUs that it names ranks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vha_paddle import counts
from vha_paddle.config import load_recipe
from vha_paddle.counts import FlopRule, topics
from vha_paddle.plan.cost import make_plan
from vha_paddle.plan.decode import decode, values
from vha_paddle.plan.gpus import GPUS
from vha_paddle.plan.report import render, summary

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_counted_and_planned(path: Path) -> None:
    recipe = load_recipe(path)
    plan = make_plan(recipe, GPUS["h800"], 0.4)
    assert plan.fits
    found = summary(plan, [], recipe.num_ranks)
    assert json.loads(json.dumps(found))["parameters_total"] == counts.parameters(recipe.model).total
    assert f"{counts.parameters(recipe.model).total:,}" in render(plan, [], recipe.num_ranks)
    assert counts.render(counts.summary(recipe))
    rule = FlopRule(sequence_length=recipe.data.sequence_length)
    for topic in (topics.cache(recipe), topics.params(recipe), topics.flops(recipe, rule), topics.fold(recipe, rule)):
        assert json.loads(json.dumps(topic)) == topic
    assert values(decode(recipe.model, 8, recipe.data.sequence_length, GPUS["h200"]))["bytes_per_token"]
