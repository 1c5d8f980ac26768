"""Several ranks writing one checkpoint, each a `Writing` in this process: rank 0 completes it when all have written."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, STATE, small_recipe
from vha_paddle.checkpoint import writing
from vha_paddle.checkpoint.layout import MANIFEST_FILE, open_checkpoint, sha256_of
from vha_paddle.checkpoint.logical import Cut
from vha_paddle.checkpoint.writing import CommonFiles, OwnTensor, Writing

WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)


class Ranks:
    """A checkpoint in the making: rank r of n writes its rows of one tensor, some ranks nothing."""

    def __init__(self, directory: Path, num_ranks: int, idle: tuple[int, ...] = ()) -> None:
        self.temporary, self.final = directory / ".step-00000007.tmp", directory / "step-00000007"
        self.temporary.mkdir()
        (directory / "tokenizer.model").write_bytes(b"a tokenizer")
        common = CommonFiles(small_recipe(SMALL_VHA), directory / "tokenizer.model", STATE)
        writers = [rank for rank in range(num_ranks) if rank not in idle]
        height = 4 // len(writers)
        self.all: list[Writing] = []
        for rank in range(num_ranks):
            tensors: dict[str, OwnTensor] = {}
            if rank in writers:
                start = writers.index(rank) * height
                rows = WEIGHT[start : start + height]
                cut = Cut((4, 2), (4, 2), (start, 0), (start + height, 2))
                tensors["w"] = OwnTensor((rows.dtype, rows.shape), cut, lambda rows=rows: rows)
            contents: Any = {"model": tensors, "optimizer": tensors}
            self.all.append(Writing(self.temporary, self.final, rank, num_ranks, contents, common))


def test_the_checkpoint_appears_when_the_last_rank_has_written(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4)
    for rank in (0, 2, 1):
        ranks.all[rank].start(asynchronous=True)
        ranks.all[rank].wait_for_files()
        assert not ranks.final.exists()
    ranks.all[3].start(asynchronous=True)
    for each in ranks.all:
        each.wait()
        assert each.file_error is None and each.completion_error is None
    assert np.array_equal(open_checkpoint(ranks.final).model_tensors().array("w"), WEIGHT)
    assert not ranks.temporary.exists()


def test_the_manifest_lists_what_the_ranks_wrote_and_no_marker_is_left(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, idle=(1,))
    for each in ranks.all[::-1]:
        each.start(asynchronous=False)
    ranks.all[0].wait()
    names = [f"{content}-{rank:05d}-of-00003.safetensors" for content in ("model", "optimizer") for rank in (0, 2)]
    names += ["recipe.yaml", "state.json", "tokenizer.model"]
    assert sorted(path.name for path in ranks.final.iterdir()) == sorted([*names, MANIFEST_FILE])
    listed = json.loads((ranks.final / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]
    assert list(listed) == sorted(names)
    for name, record in listed.items():
        path = ranks.final / name
        assert record == {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def test_rank_0_reads_no_file_of_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[str] = []

    def recording(path: Path) -> Any:
        digested.append(path.name)
        return record_of(path)

    record_of = writing.record_of
    monkeypatch.setattr(writing, "record_of", recording)
    ranks = Ranks(tmp_path, 2)
    for each in ranks.all[::-1]:
        each.start(asynchronous=False)
    ranks.all[0].wait()
    assert digested == ["recipe.yaml", "tokenizer.model", "state.json"]


def test_a_rank_that_fails_says_so_and_the_checkpoint_is_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writing.write_own_tensors

    def full_on_rank_1(path: Path, tensors: Any) -> Any:
        if "00001-of" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(writing, "write_own_tensors", full_on_rank_1)
    ranks = Ranks(tmp_path, 2)
    for each in ranks.all:
        each.start(asynchronous=True)
    for each in ranks.all:
        each.wait()
    assert [each.file_error is None for each in ranks.all] == [True, False]
    assert str(ranks.all[0].completion_error) == "rank 1: No space left on device"
    assert not ranks.final.exists()


def test_rank_0_stops_waiting_when_the_save_is_abandoned(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.all[0].start(asynchronous=True)
    ranks.all[0].abandon()
    assert str(ranks.all[0].completion_error) == "rank 1 has not written its files"
    assert not ranks.final.exists()


def test_rank_0_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MARKER_SECONDS", 0.0)
    ranks = Ranks(tmp_path, 2)
    ranks.all[0].start(asynchronous=True)
    ranks.all[0].wait()
    assert str(ranks.all[0].completion_error) == "rank 1 has not written its files"


def test_a_thread_that_writes_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.all[0].start(asynchronous=True)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint")
    assert thread.daemon
    ranks.all[0].abandon()


def test_a_checkpoint_that_is_replaced_is_gone(tmp_path: Path) -> None:
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000007" / "old").write_bytes(b"")
    (tmp_path / ".new.tmp").mkdir()
    writing.put_in_place(tmp_path / ".new.tmp", tmp_path / "step-00000007")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert not list((tmp_path / "step-00000007").iterdir())
