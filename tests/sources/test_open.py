"""One function opens every kind of checkpoint, by what lies on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import SMALL_VHA, small_recipe, small_tokenizer, trained_weights, write_checkpoint
from tests.sources.upstream.models import MODELS, config, options, weights
from tests.sources.upstream.written import flex, write_config
from vha_paddle.errors import UserError
from vha_paddle.sources.open import open_source
from vha_paddle.sources.unfolded import MODEL_TYPE

STATED: list[dict[str, Any]] = [
    {"config": Path("config.json")},
    {"norm_order": "premix-norm"},
    {"gate_order": "postmix-gate"},
]


def test_a_checkpoint_of_another_project_is_opened(tmp_path: Path) -> None:
    model = MODELS["fork"]
    path = flex(tmp_path, weights(model))
    source = open_source(path, write_config(tmp_path, config(model)), **options(model))
    assert source.kind == "PaddleFleet research fork, flex"


def test_nothing_and_what_is_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; give a checkpoint"):
        open_source(tmp_path / "missing")
    with pytest.raises(UserError) as error:
        open_source(tmp_path)
    for part in ("manifest.json", "config.json", ".safetensors", ".pdparams", ".metadata"):
        assert part in str(error.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of this package within its run."""
    recipe = small_recipe(SMALL_VHA)
    path = tmp_path_factory.mktemp("own") / "run" / "checkpoints" / "step-00000007"
    return write_checkpoint(path, recipe, trained_weights(recipe), small_tokenizer())


def test_a_checkpoint_of_this_package_and_its_run_are_opened(checkpoint: Path) -> None:
    assert open_source(checkpoint).path == checkpoint
    assert open_source(checkpoint.parents[1]).path == checkpoint


@pytest.mark.parametrize("stated", STATED, ids=lambda stated: next(iter(stated)))
def test_what_has_no_effect_on_a_checkpoint_of_this_package_is_refused(
    stated: dict[str, Any], checkpoint: Path
) -> None:
    with pytest.raises(UserError, match="has no effect on a checkpoint of this package"):
        open_source(checkpoint, **stated)


@pytest.mark.parametrize("stated", STATED, ids=lambda stated: next(iter(stated)))
def test_an_unfolded_directory_is_told_by_its_type(stated: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE}))
    with pytest.raises(UserError, match="has no effect on an unfolded directory"):
        open_source(tmp_path, **stated)
    with pytest.raises(UserError, match="fold=None"):  # read by the reader of such directories
        open_source(tmp_path)
