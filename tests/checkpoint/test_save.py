"""Saving: a checkpoint is whole or absent, and ranks stop together."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from tests.checkpoints import SMALL_VHA, STATE, small_recipe
from vha_paddle.checkpoint.layout import checkpoints_directory, open_checkpoint
from vha_paddle.checkpoint.save import save_checkpoint
from vha_paddle.errors import RunError
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.optimizer import Optimizer

RECIPE = small_recipe(SMALL_VHA)
Save = Callable[[Mesh], Path]


class AnotherRankFailed(Mesh):
    """What a rank that wrote its part sees when another could not."""

    def any_rank(self, flag: bool) -> bool:
        return True


@pytest.fixture
def model() -> Decoder:
    return build_decoder(RECIPE.model, Mesh(), seed=0)


@pytest.fixture
def save(model: Decoder, tmp_path: Path) -> Save:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"a tokenizer")
    optimizer = Optimizer(model.parameters(), RECIPE, Mesh())
    return lambda mesh: save_checkpoint(tmp_path, STATE, optimizer, RECIPE, tokenizer, mesh)


@pytest.mark.parametrize("writer", ["create_tensors", "fill_tensors", "write_state", "write_manifest"])
def test_a_full_disk_leaves_nothing_that_looks_like_a_checkpoint(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"vha_paddle.checkpoint.save.{writer}", full)
    with pytest.raises(RunError, match=r"not saved \(No space left on device\)"):
        save(Mesh())
    assert not list(checkpoints_directory(tmp_path).iterdir())


def test_a_rank_stops_when_another_could_not_write(save: Save) -> None:
    with pytest.raises(RunError, match="another rank could not write"):
        save(AnotherRankFailed())


def test_saving_a_step_again_replaces_its_checkpoint(save: Save, model: Decoder) -> None:
    save(Mesh())
    model.norm.weight.set_value(paddle.full([RECIPE.model.hidden_size], 7.0))
    saved = open_checkpoint(save(Mesh())).model_tensors()
    assert np.array_equal(saved.array("model.norm.weight"), np.full(RECIPE.model.hidden_size, 7.0, np.float32))
