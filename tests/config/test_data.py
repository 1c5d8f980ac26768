"""The data section: blends of training sets, named validation sets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vha_paddle.config import load_recipe, recipe_to_yaml
from vha_paddle.config.schema import Data
from vha_paddle.errors import UserError

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


def data_of(value: str) -> Data:
    return load_recipe(QUICKSTART, [f"data.{value}"]).data


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        (["0.7", "0.2", "0.1"], [7, 2, 1]),
        (["2", "2.5"], [4, 5]),
        (["1e-3", "0.999"], [1, 999]),
        (["6", "4"], [3, 2]),
        (["5"], [1]),
        (["0.1", "0.2", "0.3"], [1, 2, 3]),
    ],
    ids=str,
)
def test_weights_are_taken_to_the_digits_that_are_written(weights: list[str], whole: list[int]) -> None:
    sets = ", ".join(f"{{prefix: set{number}, weight: {weight}}}" for number, weight in enumerate(weights))
    data = data_of(f"train=[{sets}]")
    assert data.whole_weights == whole
    assert [part.prefix for part in data.training_sets] == [f"set{number}" for number in range(len(weights))]


def test_one_prefix_is_a_blend_of_one() -> None:
    data = data_of("train=corpus")
    assert data.whole_weights == [1] and [part.prefix for part in data.training_sets] == ["corpus"]


def test_validation_sets_have_names() -> None:
    assert data_of("validation={web: a, code: b}").validation_sets == {"web": "a", "code": "b"}
    assert data_of("validation=a").validation_sets == {"validation": "a"}


def test_sets_survive_being_written_out(tmp_path: Path) -> None:
    overrides = ["data.train=[{prefix: a, weight: 0.7}, {prefix: b, weight: 2}]", "data.validation={web: a, code: b}"]
    recipe = load_recipe(QUICKSTART, overrides)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("train=[{prefix: a, weight: 0}]", "data.train.0.weight=0: must be greater than 0"),
        ("train=[{prefix: a, weight: 1}, {prefix: b, weight: -2}]", "data.train.1.weight=-2: must be greater than 0"),
        ("train=[{prefix: a, weight: .inf}]", "data.train.0.weight=inf: must be a finite number"),
        ("train=[{prefix: a, weight: much}]", "data.train.0.weight='much': must be a valid number"),
        ("train=[{prefix: a}]", "data.train.0.weight: required key is missing; add it"),
        ("train=[{prefix: a, wieght: 1}]", "data.train.0.weight: required key is missing; 'wieght' is there"),
        (
            "train=[{prefix: a, weight: 1, epochs: 2}]",
            "data.train.0.epochs: unknown key; known here: prefix, weight",
        ),
        ("train=[a, b]", "data.train.0='a': must be"),
        ("train=[]", "data.train=[]: List should have at least 1 item"),
        ("train={a: b}", "data.train=a section: must be a valid list"),
        ("train=3", "data.train=3: must be a valid string"),
        ("train=[{prefix: a, weight: 1}, {prefix: a, weight: 1}]", "data.train: names a 2 times; name it once"),
        (
            "train=[{prefix: a, weight: 0.1234567}, {prefix: b, weight: 1}]",
            "data.train: the weights are 1234567 : 10000000 in whole numbers, whose sum must not exceed 1000000",
        ),
        ("validation={}", "data.validation=a section: Dictionary should have at least 1 item"),
        ("validation={a: 3}", "data.validation.a=3: must be a valid string"),
        ("validation={a/b: c}", "should match pattern"),
        ("validation=[a]", "data.validation=['a']: must be a valid dictionary"),
        ("document_mask=1", "data.document_mask=1: must be a valid boolean"),
    ],
)
def test_what_is_no_blend_is_refused_in_one_line(value: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        data_of(value)
    assert message in str(caught.value) and "\n" not in str(caught.value)
