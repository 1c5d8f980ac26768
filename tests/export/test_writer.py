"""All or nothing: what is left on disk when an export is refused, fails or is killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, Exported, small_recipe
from vha_paddle.errors import RunError, UserError
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.plan import PlannedTensor, plan_export
from vha_paddle.export.tokenizer import TokenizerExport
from vha_paddle.export.verify import Verification
from vha_paddle.export.writer import output_directory, split_into_shards, write_hf_model

ROOT = Path(__file__).resolve().parents[2]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def verification(relative: float) -> Verification:
    return Verification(
        num_tokens=8,
        max_abs_difference=relative,
        mean_abs_difference=relative / 2,
        scale=1.0,
        relative=relative,
        top1_agreement=0.75,
        bound=1e-5,
    )


def tensor(name: str, *shape: int) -> PlannedTensor:
    return PlannedTensor(name, (name,), shape, "float32")


def test_an_existing_output_is_refused(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists; name another, or add --overwrite"):
        export_checkpoint(exported.checkpoint, tmp_path, "float32")
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_overwriting_what_is_no_export_is_refused(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds no fold_report\.json"):
        export_checkpoint(exported.checkpoint, tmp_path, "float32", overwrite=True)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_or_a_link_in_the_place_of_the_output_is_refused(exported: Exported, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(exported.directory)
    with pytest.raises(UserError, match="is a file or a link"):
        export_checkpoint(exported.checkpoint, out, "float32", overwrite=True)


def test_an_empty_directory_is_filled(exported: Exported, tmp_path: Path) -> None:
    export_checkpoint(exported.checkpoint, tmp_path, "float32")
    assert (tmp_path / "model.safetensors").is_file()


def test_overwriting_replaces_the_export_and_leaves_nothing_beside_it(exported: Exported, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(exported.checkpoint, out, "float32", max_shard_bytes=20_000)
    export_checkpoint(exported.checkpoint, out, "float32", overwrite=True)
    assert contents(out) == contents(exported.directory)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_earlier_export_stays_until_the_new_one_is_verified(exported: Exported, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(exported.checkpoint, out, "bfloat16")
    before = contents(out)

    def verify(checkpoint: Path, directory: Path) -> Verification:
        assert contents(out) == before
        return verification(2e-5)

    with pytest.raises(RunError, match="verification failed"):
        export_checkpoint(exported.checkpoint, out, "float32", overwrite=True, verify=verify)
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_earlier_export_comes_back_when_the_exchange_fails(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_checkpoint(exported.checkpoint, out, "float32")
    before, replace = contents(out), os.replace

    def failing(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "input/output error")
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="input/output error"):
        patch.setattr(os, "replace", failing)
        with output_directory(out, overwrite=True) as directory:
            (directory / "new").write_text("new")
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_verification_sees_the_finished_files_before_they_have_their_name(exported: Exported, tmp_path: Path) -> None:
    out, seen = tmp_path / "out", []

    def verify(checkpoint: Path, directory: Path) -> Verification:
        assert checkpoint == exported.checkpoint and not out.exists()
        seen.append(contents(directory))
        return verification(9e-6)

    report = export_checkpoint(exported.checkpoint, out, "float32", verify=verify)
    assert seen[0].items() <= contents(out).items()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= seen[0].keys()
    assert report["verification"] == verification(9e-6).figures()
    assert json.loads((out / "fold_report.json").read_text())["verification"]["relative"] == 9e-6
    assert "9.000e-06" in (out / "README.md").read_text()


def test_nothing_is_left_when_verification_exceeds_its_bound(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"in float32: logits differ by 2\.00e-05 of the largest.*bound is 1\.0e-05"):
        export_checkpoint(exported.checkpoint, tmp_path / "out", "float32", verify=lambda *paths: verification(2e-5))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_nothing(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match="cannot be written .*No space left on device"):
        export_checkpoint(exported.checkpoint, tmp_path / "out", "float32")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error_without_traceback(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        export_checkpoint(exported.checkpoint, tmp_path / "file" / "out", "float32")


def test_a_kill_while_writing_leaves_no_directory_of_that_name(exported: Exported, tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from vha_paddle.export.fold_export import export_checkpoint

def progress(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint, out = map(Path, sys.argv[1:])
export_checkpoint(checkpoint, out, "float32", progress=progress)
"""
    command = [sys.executable, "-c", program, str(exported.checkpoint), str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, check=False)
    assert result.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and left.name.endswith(".tmp")


def test_progress_counts_every_byte(exported: Exported, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = export_checkpoint(
        exported.checkpoint, tmp_path / "out", "float32", progress=lambda *call: calls.append(call)
    )
    assert len(calls) == report["tensors"]
    assert calls[-1] == (report["bytes"], report["bytes"])


def test_shards_are_filled_in_order_and_only_a_large_tensor_exceeds_the_limit() -> None:
    planned = [tensor("a", 10), tensor("b", 10), tensor("c", 100), tensor("d", 5), tensor("e", 5)]
    names = {file: [each.name for each in shard] for file, shard in split_into_shards(planned, 80).items()}
    assert names == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }


def test_the_index_names_the_file_of_every_tensor(exported: Exported, tmp_path: Path) -> None:
    report = export_checkpoint(exported.checkpoint, tmp_path / "out", "float32", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": report["bytes"]}
    assert len(index["weight_map"]) == report["tensors"]
    assert set(index["weight_map"].values()) == {p.name for p in (tmp_path / "out").glob("*.safetensors")}


@pytest.mark.parametrize("fault", ["missing", "twice", "extra", "wrong name", "wrong shape", "wrong dtype"])
def test_a_stream_that_is_not_the_plan_is_refused(exported: Exported, tmp_path: Path, fault: str) -> None:
    planned = [tensor("a", 2, 3), tensor("b", 4)]
    a, b = ("a", np.zeros((2, 3), np.float32)), ("b", np.zeros(4, np.float32))
    streams = {
        "missing": [a],
        "twice": [a, a],
        "extra": [a, b, b],
        "wrong name": [a, ("c", b[1])],
        "wrong shape": [("a", np.zeros((3, 2), np.float32)), b],
        "wrong dtype": [a, ("b", np.zeros(4, np.float64))],
    }
    tokenizer = TokenizerExport(exported.checkpoint / "tokenizer.model")
    with pytest.raises(RunError, match="planned"):
        write_hf_model(tmp_path, exported.recipe.model, planned, iter(streams[fault]), tokenizer)


def test_the_plan_names_what_is_folded_into_each_tensor() -> None:
    planned = {each.name: each for each in plan_export(small_recipe(SMALL_VHA).model, "bfloat16")}
    prefix = "model.layers.1.self_attn."
    query, output = planned[f"{prefix}q_proj.weight"], planned[f"{prefix}o_proj.weight"]
    assert query.sources == (f"{prefix}q_proj.weight", f"{prefix}premix")
    assert output.sources == (f"{prefix}o_proj.weight", f"{prefix}postmix_a", f"{prefix}postmix_b")
    assert (query.shape, query.num_bytes, output.shape) == ((48, 20), 48 * 20 * 2, (20, 48))
    assert planned["model.norm.weight"].sources == ("model.norm.weight",)
    assert not any(name.endswith(("premix", "postmix_a", "postmix_b")) for name in planned)
