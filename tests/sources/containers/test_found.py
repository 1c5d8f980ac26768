"""Which files of a path are its checkpoint; folders of safetensors files."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.sources.containers.fixtures import sample, stored, write_flex_folder, write_merged, write_pdparams
from vha_paddle.errors import UserError
from vha_paddle.sources.containers import open_container, open_safetensors
from vha_paddle.sources.open import open_source

ROOT = Path(__file__).resolve().parents[3]
ARRAYS = {
    "w": sample(4, 6, dtype=ml_dtypes.bfloat16),
    "v": sample(3, seed=1),
    "u": sample(2, 2, 2, dtype=ml_dtypes.bfloat16, seed=2),
}


def check_equal(path: Path, form: str, seed: int | None = None) -> None:
    container = open_container(path)
    assert container.form == form
    for name, array in (ARRAYS if seed is None else {"w": sample(5, seed=seed)}).items():
        entry, values = container.weights.entries[name], container.weights.read(name)
        assert (entry.dtype, entry.shape) == (array.dtype, array.shape) == (values.dtype, values.shape)
        assert values.tobytes() == array.tobytes()


def refused(path: Path, match: str) -> None:
    with pytest.raises(UserError, match=match):
        open_container(path)


@pytest.mark.parametrize("bfloat16", ["U16", "BF16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_merged_folders_of_old_and_new_writers(tmp_path: Path, bfloat16: str, shards: int) -> None:
    write_merged(tmp_path, ARRAYS, bfloat16, shards)
    check_equal(tmp_path, "safetensors")
    assert len(open_safetensors(tmp_path).files) == shards + 1
    if shards == 1:
        check_equal(tmp_path / "model-00001-of-00001.safetensors", "safetensors")


def test_a_file_of_the_safetensors_library(tmp_path: Path) -> None:
    save_file({name: stored(array) for name, array in ARRAYS.items()}, tmp_path / "anything.safetensors")
    check_equal(tmp_path, "safetensors")
    (tmp_path / "more.safetensors").write_bytes((tmp_path / "anything.safetensors").read_bytes())
    refused(tmp_path, "several .safetensors files, none named model")


def test_model_files_are_told_from_others_beside_them(tmp_path: Path) -> None:
    write_merged(tmp_path, ARRAYS, shards=2)
    save_file({"w": ARRAYS["v"]}, tmp_path / "optimizer.safetensors")
    check_equal(tmp_path, "safetensors")


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_missing_shard_is_named(tmp_path: Path, with_index: bool, shard: int) -> None:
    write_merged(tmp_path, ARRAYS, shards=3)
    name = f"model-0000{shard}-of-00003.safetensors"
    (tmp_path / name).unlink()
    if not with_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, f"{name}: is missing")


def test_files_of_two_checkpoints_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_merged(tmp_path, ARRAYS, shards=2)
    save_file({"v": ARRAYS["v"]}, tmp_path / "model.safetensors")
    refused(tmp_path, "tensor 'v' is in")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 1}}', "[" * 100_000],
    ids=lambda text: text[:20],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write_merged(tmp_path, ARRAYS)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "has no weight_map")


def test_parameter_files(tmp_path: Path) -> None:
    write_pdparams(tmp_path / "model_state.pdparams", ARRAYS)
    check_equal(tmp_path, "pdparams")
    check_equal(tmp_path / "model_state.pdparams", "pdparams")
    write_pdparams(tmp_path / "other.pdparams", ARRAYS)
    check_equal(tmp_path / "other.pdparams", "pdparams")


def write_checkpoint(folder: Path, seed: int) -> None:
    write_flex_folder(folder / "model_state", {"w": sample(5, seed=seed)})
    write_flex_folder(folder / "master_weight", {"w.w_0": sample(5, seed=seed)})


def test_a_flex_checkpoint_is_found_from_each_of_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "checkpoint-3", 1)
    for path in (tmp_path / "checkpoint-3", tmp_path / "checkpoint-3/model_state"):
        check_equal(path, "flex", 1)
        container = open_container(path)
        assert container.path == tmp_path / "checkpoint-3/model_state" and container.notes == ()
        assert container.masters is not None and list(container.masters.entries) == ["w.w_0"]
    monkeypatch.chdir(tmp_path / "checkpoint-3/model_state")
    assert open_container(Path(".")).masters is not None
    masters = open_container(tmp_path / "checkpoint-3/master_weight")
    assert list(masters.weights.entries) == ["w.w_0"] and masters.masters is None


def test_the_newest_checkpoint_of_a_run_is_read(tmp_path: Path) -> None:
    for step in (5, 10, 9):
        write_checkpoint(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-11").mkdir()
    write_flex_folder(tmp_path / "checkpoint-12x/model_state", {"w": sample(5)})
    check_equal(tmp_path, "flex", 10)
    (note,) = open_container(tmp_path).notes
    assert note == f"{tmp_path / 'checkpoint-10'} was read, the newest of 3 checkpoints"


def test_the_final_save_of_a_run_comes_before_its_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint-5", 5)
    write_flex_folder(tmp_path / "model_state", {"w": sample(5, seed=6)})
    check_equal(tmp_path, "flex", 6)
    container = open_container(tmp_path)
    assert container.masters is None and "checkpoint-5 was passed over" in container.notes[0]


def test_masters_of_another_save_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    write_flex_folder(tmp_path / "model_state", {"w": sample(5)}, save_id=1)
    refused(tmp_path, "master_weight: its last save has the id 0, that of model_state/ has 1")


def test_masters_without_metadata_are_not_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    (tmp_path / "master_weight/0.metadata").unlink()
    refused(tmp_path, r"master_weight/0\.metadata: is missing, beside \*_0\.distcp of the last save; copy it$")


@pytest.mark.parametrize("below", [".", "model_state", "checkpoint-7/model_state"])
def test_files_of_ranks_without_metadata_are_named_wherever_they_lie(tmp_path: Path, below: str) -> None:
    write_flex_folder(tmp_path / below, {"w": sample(5)})
    (tmp_path / below / "0.metadata").unlink()
    refused(tmp_path, rf"{re.escape(str(tmp_path / below))}/0\.metadata: is missing, beside \*_0\.distcp")
    with pytest.raises(UserError, match=r"0\.metadata: is missing"):
        open_source(tmp_path)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "no checkpoint")
    refused(tmp_path / "absent", "does not exist")
    (tmp_path / "file.bin").write_bytes(b"x")
    refused(tmp_path / "file.bin", "no checkpoint")
    with pytest.raises(UserError, match=r"has no .safetensors file"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("form", ["distcp", "pdparams", "safetensors"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, form: str) -> None:
    """In a process of its own, which may have three tensors of the forty beside what Python and numpy take."""
    arrays = {f"w{i}": np.zeros((512, 1024), np.float32) for i in range(40)}
    write = {"distcp": write_flex_folder, "safetensors": write_merged}
    if form == "pdparams":
        write_pdparams(tmp_path / "model_state.pdparams", arrays)
    else:
        write[form](tmp_path, arrays)
    program = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from vha_paddle.sources.containers import open_container
        assert "paddle" not in sys.modules
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 20), size + (6 << 20)))
        tensors = open_container(Path(sys.argv[1])).weights
        print(sum(tensors.read(name).nbytes for name in tensors.entries))
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == sum(array.nbytes for array in arrays.values())
