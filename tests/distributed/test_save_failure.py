"""A rank that cannot write stops the others: a checkpoint with a hole must never look whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import CASES
from tests.checkpoints import STATE
from tests.distributed.launch import run_ranks
from vha_paddle.checkpoint.layout import checkpoints_directory, list_steps, open_checkpoint
from vha_paddle.checkpoint.save import save_checkpoint
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.optimizer import Optimizer

WORKER = Path(__file__).with_name("save_failure_worker.py")
MODES = pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(b"a tokenizer")
    return tmp_path


@MODES
def test_when_one_rank_cannot_write_every_rank_stops_and_the_earlier_checkpoint_stays(output: Path, mode: str) -> None:
    run_ranks(WORKER, 2, [str(output), mode, "full"], timeout=120)
    for rank in range(2):
        said = (output / f"rank{rank}.txt").read_text(encoding="utf-8")
        assert "not saved (rank 1: No space left on device)" in said
    assert [path.name for path in checkpoints_directory(output).iterdir()] == [f"step-{STATE.step:08d}"]
    assert open_checkpoint(output).state.step == STATE.step


@MODES
def test_a_rank_killed_while_saving_leaves_nothing_that_looks_like_a_checkpoint(output: Path, mode: str) -> None:
    with pytest.raises(AssertionError, match="rank 1 ended with exit code -9"):
        run_ranks(WORKER, 2, [str(output), mode, "killed"], timeout=120)
    assert list_steps(output) == [STATE.step]
    assert open_checkpoint(output).state.step == STATE.step
    left = checkpoints_directory(output) / f".step-{STATE.step + 1:08d}.tmp"
    assert (left / "model-00000-of-00002.safetensors").is_file()

    recipe = CASES[0].recipe()
    optimizer = Optimizer(build_decoder(recipe.model, Mesh(), seed=0).parameters(), recipe, Mesh())
    save_checkpoint(output, STATE, optimizer, recipe, output / "tokenizer.model", Mesh())
    assert not left.exists()
