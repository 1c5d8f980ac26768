"""One function opens every kind of checkpoint, by what lies on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, small_recipe, small_tokenizer, trained_weights, write_checkpoint
from tests.sources.upstream.models import MODELS, config, options, weights
from tests.sources.upstream.written import flex, merged, write_config
from vha_paddle.errors import UserError
from vha_paddle.evaluate import load_model, open_model
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.sources.base import Source
from vha_paddle.sources.hugging_face import is_hugging_face, open_hugging_face
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


@pytest.mark.parametrize("name", ["fork_no_premix", "core"])
def test_virtual_heads_are_not_taken_for_a_stock_model_whatever_the_configuration_says(
    name: str, tmp_path: Path
) -> None:
    """The research fork's config.json says Qwen3ForCausalLM."""
    model = MODELS[name]
    stock = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    write_config(merged(tmp_path, weights(model)), config(model) | stock)
    assert not is_hugging_face(tmp_path)
    with pytest.raises(UserError, match=r"holds .*vha_.*, so it is a VHA checkpoint, whatever config.json says"):
        open_hugging_face(tmp_path)
    found = open_model(tmp_path)
    assert isinstance(found, Source) and found.kind.startswith("PaddleFleet")
    loaded = load_model(tmp_path).named_tensors()
    expected = found.weights.read("model.layers.1.self_attn.postmix_b").astype(np.float32)
    np.testing.assert_array_equal(loaded["model.layers.1.self_attn.postmix_b"].numpy(), expected)


def test_a_training_checkpoint_beside_a_configuration_of_a_stock_model_is_opened(tmp_path: Path) -> None:
    model = MODELS["fork_no_premix"]
    flex(tmp_path, weights(model))
    write_config(tmp_path, config(model))
    assert open_source(tmp_path).kind == "PaddleFleet research fork, flex"


def test_a_stock_directory_holds_nothing_to_fold(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "out", "float32")
    (tmp_path / "out" / "fold_report.json").unlink()
    assert is_hugging_face(tmp_path / "out")
    with pytest.raises(UserError, match=r"nothing to fold; serve it as it is, or make .*tools/import_hf\.py"):
        open_source(tmp_path / "out")
