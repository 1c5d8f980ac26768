"""What the installed Paddle writes is read bit-equal, and what the fixtures write is what Paddle writes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle import distributed as dist

from tests.distributed.launch import run_ranks
from tests.sources.containers import fixtures
from tests.sources.containers.fixtures import BFLOAT16, sample, write_flex_folder, write_pdparams
from tests.sources.containers.paddle_worker import RANKS, layout
from vha_paddle.sources.containers import StoredTensors, open_distcp, open_pdparams

ARRAYS = {
    "matrix": sample(30, 7),
    "half": sample(9, 40, dtype=ml_dtypes.bfloat16),
    "scalar": np.float32(1.25).reshape(()),
    "empty": np.empty((0, 3), np.float32),
    "double": sample(3, dtype=np.float64),
    "float16": sample(2, 2, dtype=np.float16),
    "integers": np.arange(-3, 3),
    "large": sample(300, 200),
}


def as_tensor(array: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(fixtures.stored(array))


def check_equal(stored: StoredTensors, arrays: dict[str, np.ndarray]) -> None:
    assert set(stored.entries) == set(arrays)
    for name, array in arrays.items():
        entry, values = stored.entries[name], stored.read(name)
        assert (entry.dtype, entry.shape) == (array.dtype, array.shape) == (values.dtype, values.shape), name
        assert values.tobytes() == array.tobytes() and values.flags.c_contiguous and values.flags.writeable, name


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_state_dict_of_paddle_is_read_bit_equal(tmp_path: Path, protocol: int) -> None:
    paddle.save({name: as_tensor(array) for name, array in ARRAYS.items()}, str(tmp_path / "a"), protocol=protocol)
    check_equal(open_pdparams(tmp_path / "a"), ARRAYS)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_paddle_reads_a_state_dict_of_the_fixtures(tmp_path: Path, protocol: int) -> None:
    write_pdparams(tmp_path / "a", ARRAYS, protocol)
    loaded = paddle.load(str(tmp_path / "a"), return_numpy=True)
    for name, array in ARRAYS.items():
        assert loaded[name].tobytes() == array.tobytes()


def test_a_flex_folder_of_paddle_is_read_bit_equal(tmp_path: Path) -> None:
    arrays = {name: array for name, array in ARRAYS.items() if array.size}  # it leaves out a tensor without elements
    dist.save_state_dict({name: as_tensor(array) for name, array in arrays.items()}, str(tmp_path))
    check_equal(open_distcp(tmp_path), arrays)


def test_a_nested_state_of_paddle_is_read_by_its_joined_names(tmp_path: Path) -> None:
    dist.save_state_dict({"model": {"a": as_tensor(ARRAYS["matrix"])}, "b": as_tensor(ARRAYS["half"])}, str(tmp_path))
    check_equal(open_distcp(tmp_path), {"model.a": ARRAYS["matrix"], "b": ARRAYS["half"]})


@pytest.mark.parametrize("copies", ["one", "replicas"])
def test_a_flex_folder_of_two_ranks_is_read_bit_equal(tmp_path: Path, copies: str) -> None:
    worker = Path(__file__).parent / "paddle_worker.py"
    run_ranks(worker, RANKS, [str(tmp_path), copies], timeout=120)
    assert {path.name for path in tmp_path.iterdir()} == {"0_0.distcp", "1_0.distcp", "0.metadata"}
    check_equal(open_distcp(tmp_path), {name: array for name, (array, _) in layout().items()})


def test_paddle_merges_a_folder_of_the_fixtures_to_the_same_values(tmp_path: Path) -> None:
    arrays = {name: ARRAYS[name] for name in ("matrix", "half", "large")}
    parts = {
        "matrix": fixtures.cut(arrays["matrix"], 0, 2),
        "half": fixtures.cut(arrays["half"], 1, 2),
        "large": fixtures.whole(arrays["large"], 1),
    }
    write_flex_folder(tmp_path, arrays, parts)
    from paddle.distributed.flex_checkpoint.dcp.load_state_dict import load_merged_state_dict

    merged = load_merged_state_dict(str(tmp_path))
    for name, array in arrays.items():
        assert fixtures.stored(array).tobytes() == np.asarray(merged[name]).tobytes()
    check_equal(open_distcp(tmp_path), arrays)


def test_a_tensor_cut_as_paddle_cuts_those_above_one_gibibyte(tmp_path: Path) -> None:
    """The threshold is fixed in Paddle; the entries are the same for a small tensor, and Paddle joins them too."""
    array = sample(5, 4)
    flat = array.reshape(-1)
    slices = {"big@@.0": flat[:7], "big@@.1": flat[7:14], "big@@.2": flat[14:]}
    cut = {"big": {"OriginShape": array.shape, "slices": list(slices)}}
    write_pdparams(tmp_path / "a", {"matrix": ARRAYS["matrix"]}, 3, **slices, **{"UnpackBigParamInfor@@": cut})
    assert paddle.load(str(tmp_path / "a"), return_numpy=True)["big"].tobytes() == array.tobytes()
    check_equal(open_pdparams(tmp_path / "a"), {"matrix": ARRAYS["matrix"], "big": array})


def test_bfloat16_is_what_paddle_calls_it() -> None:
    assert str(as_tensor(ARRAYS["half"]).dtype) == "paddle.bfloat16" and ARRAYS["half"].dtype == BFLOAT16
