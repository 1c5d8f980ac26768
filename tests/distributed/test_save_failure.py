"""A rank that cannot write stops the others: a checkpoint with a hole must never look whole."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import run_ranks
from vha_paddle.checkpoint.layout import checkpoints_directory

WORKER = Path(__file__).with_name("save_failure_worker.py")


def test_when_one_rank_cannot_write_every_rank_stops_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"a tokenizer")
    run_ranks(WORKER, 2, [str(tmp_path)], timeout=120)
    said = [(tmp_path / f"rank{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    assert "another rank could not write" in said[0] and "No space left on device" in said[1]
    assert not list(checkpoints_directory(tmp_path).iterdir())
