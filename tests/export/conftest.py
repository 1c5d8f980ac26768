"""One small checkpoint, exported once, for the tests that only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import (
    SMALL_VHA,
    Exported,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from vha_paddle.export.fold_export import export_checkpoint


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A VHA checkpoint and its float32 export; tests must not write into either."""
    folder = tmp_path_factory.mktemp("exported")
    recipe = small_recipe(SMALL_VHA)
    weights = trained_weights(recipe)
    path = folder / "run" / "checkpoints" / "step-00000007"
    checkpoint = write_checkpoint(path, recipe, weights, small_tokenizer())
    report = export_checkpoint(checkpoint, folder / "out", "float32")
    return Exported(recipe, weights, checkpoint, folder / "out", report)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A fresh VHA checkpoint."""
    recipe = small_recipe(SMALL_VHA)
    return write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
