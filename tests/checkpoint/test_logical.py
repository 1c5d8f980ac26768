"""Parts of tensors in several files: together they are the logical tensors, or they are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from vha_paddle.checkpoint.logical import Cut, LogicalTensors, cuts_metadata
from vha_paddle.errors import UserError
from vha_paddle.parallel.placement import Placement, Seat
from vha_paddle.tensor_file import read_tensors, write_tensors

# K = 2 groups, P = 4 physical heads, H = 3, D = 5: o_proj is cut on P, so a rank's rows are not contiguous
PLACEMENTS = {
    "q_proj": Placement.split((5, 12), axis=1),
    "o_proj": Placement.split((24, 5), axis=1, view=(2, 4, 3, 5)),
    "embedding": Placement.split((8, 5), axis=0),
    "norm": Placement.replicated((5,), partial_gradient=True),
    "experts": Placement.experts((4, 3, 8), axis=2),
}
NAMES = list(PLACEMENTS)


def logical(name: str, dtype: Any = np.float32) -> np.ndarray:
    shape = PLACEMENTS[name].shape
    return np.random.default_rng(NAMES.index(name)).standard_normal(shape).astype(dtype)


def heads_of_rank(rank: int, degree: int) -> np.ndarray:
    """o_proj's part, written out: rows (g * 4 + i) * 3 + h for this rank's heads i."""
    heads = range(rank * 4 // degree, (rank + 1) * 4 // degree)
    rows = [(g * 4 + i) * 3 + h for g in range(2) for i in heads for h in range(3)]
    return logical("o_proj")[rows]


def write(path: Path, parts: Mapping[str, tuple[np.ndarray, Cut | None]]) -> Path:
    specs = {name: (array.dtype, array.shape) for name, (array, _) in parts.items()}
    metadata = cuts_metadata({name: cut for name, (_, cut) in parts.items()})
    write_tensors(path, specs, (array for array, _ in parts.values()), metadata)
    return path


def write_ranks(directory: Path, degree: int, dtype: Any = np.float32, expert_degree: int = 1) -> LogicalTensors:
    """The files that tensor ranks write, of the first expert rank all they hold; what is whole is in the first."""
    for expert in range(expert_degree):
        for rank in range(degree):
            seat, parts = Seat(rank, degree, expert, expert_degree), {}
            for name, placement in PLACEMENTS.items():
                is_own = (rank == 0 or placement.axis is not None) and (expert == 0 or placement.by_expert)
                if is_own:
                    part = placement.slice_of(logical(name, dtype), seat)
                    parts[name] = (np.ascontiguousarray(part), Cut.of(placement, seat))
            write(directory / f"rank{expert * degree + rank}", parts)
    return opened(directory)


def opened(directory: Path) -> LogicalTensors:
    return LogicalTensors(directory, [read_tensors(path) for path in sorted(directory.iterdir())])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_parts_of_any_degree_make_the_logical_tensor(tmp_path: Path, degree: int, dtype: Any) -> None:
    tensors = write_ranks(tmp_path, degree, dtype)
    for name in PLACEMENTS:
        assert tensors.array(name).dtype == dtype
        assert tensors.array(name).tobytes() == logical(name, dtype).tobytes(), name


@pytest.mark.parametrize("stored", [1, 2, 4])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_rank_of_any_degree_gets_its_part(tmp_path: Path, stored: int, degree: int) -> None:
    tensors = write_ranks(tmp_path, stored)
    for rank in range(degree):
        width = 12 // degree
        parts = {name: tensors.part(name, placement, Seat(rank, degree)) for name, placement in PLACEMENTS.items()}
        assert np.array_equal(parts["q_proj"], logical("q_proj")[:, rank * width : (rank + 1) * width])
        assert np.array_equal(parts["o_proj"], heads_of_rank(rank, degree))
        assert np.array_equal(parts["norm"], logical("norm"))


@pytest.mark.parametrize("stored", [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_a_rank_gets_its_experts_whatever_cut_them(
    tmp_path: Path, stored: tuple[int, int], tensor: int, expert: int
) -> None:
    tensors = write_ranks(tmp_path, stored[0], expert_degree=stored[1])
    assert tensors.array("experts").tobytes() == logical("experts").tobytes()
    height, width = 4 // expert, 8 // tensor
    for own in range(expert):
        for rank in range(tensor):
            part = tensors.part("experts", PLACEMENTS["experts"], Seat(rank, tensor, own, expert))
            expected = logical("experts")[own * height : (own + 1) * height, :, rank * width : (rank + 1) * width]
            assert np.array_equal(part, expected)


def test_a_part_is_read_under_another_view_than_it_was_cut(tmp_path: Path) -> None:
    tensors = write_ranks(tmp_path, 2)
    rows = Placement.split((24, 5), axis=0)
    assert np.array_equal(tensors.part("o_proj", rows, Seat(1, 2)), logical("o_proj")[12:])


def test_another_view_may_have_as_many_axes(tmp_path: Path) -> None:
    tensors = write_ranks(tmp_path, 2)
    other = Placement.split((24, 5), axis=1, view=(4, 2, 3, 5))
    assert np.array_equal(tensors.part("o_proj", other, Seat(1, 2)), other.slice_of(logical("o_proj"), Seat(1, 2)))


def test_only_the_files_that_hold_the_part_are_mapped(tmp_path: Path) -> None:
    write_ranks(tmp_path, 4)
    files = [read_tensors(path) for path in sorted(tmp_path.iterdir())]
    LogicalTensors(tmp_path, files).part("o_proj", PLACEMENTS["o_proj"], Seat(1, 2))
    assert ["_bytes" in vars(file) for file in files] == [False, False, True, True]


@pytest.mark.parametrize("degree", [1, 2])
def test_a_tensor_in_one_piece_is_a_view_of_the_disk(tmp_path: Path, degree: int) -> None:
    tensors = write_ranks(tmp_path, degree)
    array = tensors.array("norm")
    assert isinstance(array, np.memmap) and not array.flags.owndata


def test_names_come_in_the_order_of_the_layers(tmp_path: Path) -> None:
    names = ["model.norm", "layers.10.b", "layers.2.b", "layers.2.a", "layers.9.z", "layers.10.a", "lm_head"]
    write(tmp_path / "file", {name: (np.zeros(1), None) for name in names})
    ordered = ["layers.2.a", "layers.2.b", "layers.9.z", "layers.10.a", "layers.10.b", "lm_head", "model.norm"]
    assert list(opened(tmp_path)) == ordered


def test_another_logical_shape_is_refused(tmp_path: Path) -> None:
    tensors = write_ranks(tmp_path, 2)
    with pytest.raises(UserError, match=r"norm has shape \[5\], the model needs \[6\]"):
        tensors.part("norm", Placement.replicated((6,), partial_gradient=False), Seat())


def test_an_absent_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensor lm_head is missing"):
        write_ranks(tmp_path, 2).array("lm_head")


CUT = Cut((4, 2), (4, 2), (0, 0), (2, 2))
HALF = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((HALF, replace(CUT, start=(1, 0), stop=(3, 2))), "parts overlap"),
        ((HALF, CUT), "parts overlap"),
        ((HALF[:1], replace(CUT, start=(3, 0), stop=(4, 2))), "a part is missing before"),
        ((HALF[:1], replace(CUT, start=(2, 0), stop=(3, 2))), "a part is missing after"),
        (None, "a part is missing after"),
        ((np.zeros((4, 1), np.float32), replace(CUT, start=(0, 1), stop=(4, 2))), "parts overlap"),
        ((HALF, Cut((2, 4), (4, 2), (2, 0), (4, 2))), "cut differently"),
        ((HALF, None), "cut differently"),
        ((HALF.astype(np.float64), replace(CUT, start=(2, 0), stop=(4, 2))), "several dtypes"),
    ],
)
def test_parts_that_do_not_cover_the_tensor_once_are_refused(tmp_path: Path, second: Any, words: str) -> None:
    write(tmp_path / "a", {"x": (HALF, CUT)})
    if second is not None:
        write(tmp_path / "b", {"x": second})
    with pytest.raises(UserError, match=f"tensor x.* {words}"):
        opened(tmp_path)


def test_a_cell_that_is_missing_of_a_grid_is_refused(tmp_path: Path) -> None:
    corners = [((0, 0), (2, 1)), ((0, 1), (2, 2)), ((2, 0), (4, 1))]
    for name, (start, stop) in zip("abc", corners, strict=True):
        write(tmp_path / name, {"x": (HALF[:, :1], replace(CUT, start=start, stop=stop))})
    with pytest.raises(UserError, match="tensor x: a part is missing beside the one in c"):
        opened(tmp_path)


def test_a_whole_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, {"x": (HALF, None)})
    with pytest.raises(UserError, match="tensor x is in a and b"):
        opened(tmp_path)


VALID = {"shape": [4, 2], "view": [4, 2], "start": [0, 0], "stop": [2, 2]}


@pytest.mark.parametrize(
    "parts",
    [
        "{",
        "[1]",
        "[" * 100_000,
        '{"x": ' + "9" * 5000 + "}",
        json.dumps({"x": 3}),
        json.dumps({"y": VALID}),
        json.dumps({"x": {"shape": [4, 2]}}),
        *(
            json.dumps({"x": VALID | change})
            for change in (
                {"start": [0]},
                {"start": 0},
                {"start": [0.0, 0]},
                {"start": [2, 0]},
                {"start": [-1, 0]},
                {"stop": [5, 2]},
                {"stop": [1, 2]},
                {"stop": [True, 2]},
                {"stop": [2, 2, 1]},
                {"axis": 0, "start": 0, "stop": 2},  # as versions wrote it that cut one axis
                {"view": [4, 3]},
                {"view": "42"},
                {"shape": [1] * 40 + [4, 2]},
                {"shape": None},
            )
        ),
    ],
)
def test_a_cut_that_is_not_the_tensors_is_refused(tmp_path: Path, parts: str) -> None:
    spec = {"x": (HALF.dtype, HALF.shape)}
    write_tensors(tmp_path / "a", spec, [HALF], {"parts": parts})
    with pytest.raises(UserError, match="a: metadata parts"):
        opened(tmp_path)


def test_a_gigantic_tensor_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    """A file of a few bytes claims to hold one row of 2^70."""
    claim = Cut((2**70, 2), (2**70, 2), (0, 0), (2, 2))
    write(tmp_path / "a", {"x": (HALF, claim)})
    with pytest.raises(UserError, match="a part is missing"):
        opened(tmp_path)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("degree", "expert_degree"), [(1, 1), (2, 1), (4, 2)])
def test_a_tensor_is_read_into_memory_of_its_own(tmp_path: Path, degree: int, expert_degree: int, dtype: Any) -> None:
    """What has been read stays when the files are overwritten, as no mapping of them would."""
    tensors = write_ranks(tmp_path, degree, dtype, expert_degree)
    read = {name: tensors.read(name) for name in NAMES}
    for path in tmp_path.iterdir():
        with open(path, "rb+") as file:
            file.write(bytes(path.stat().st_size))
    for name, array in read.items():
        np.testing.assert_array_equal(array, logical(name, dtype), err_msg=name)
        assert array.flags.writeable


def test_a_tensor_that_is_not_there_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensor absent is missing"):
        write_ranks(tmp_path, 2).read("absent")
