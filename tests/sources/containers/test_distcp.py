"""Flex folders: pieces in their places, copies, saves side by side, and what is missing or contradicts itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.sources.containers.fixtures import (
    OLD_MODULE,
    Arrays,
    LocalTensorIndex,
    LocalTensorMetadata,
    Metadata,
    Part,
    cut,
    flattened,
    flattened_box,
    sample,
    write_flex_folder,
    write_metadata,
    write_pdparams,
)
from vha_paddle.errors import UserError
from vha_paddle.sources.containers import open_distcp
from vha_paddle.sources.containers.metadata import Piece
from vha_paddle.sources.containers.pieces import chosen

MATRIX = sample(6, 8, dtype=ml_dtypes.bfloat16, seed=1)
CUBE = sample(3, 4, 5, seed=2)


def check_equal(folder: Path, arrays: Arrays) -> None:
    tensors = open_distcp(folder)
    assert list(tensors.entries) == list(arrays)
    for name, array in arrays.items():
        values, entry = tensors.read(name), tensors.entries[name]
        assert (entry.dtype, entry.shape) == (array.dtype, array.shape) == (values.dtype, values.shape)
        assert values.tobytes() == array.tobytes() and values.flags.c_contiguous


def refused(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        open_distcp(folder)
    assert "\n" not in str(error.value)


def grid(array: np.ndarray) -> list[Part]:
    """Four boxes of a matrix in four ranks' files."""
    rows, columns = array.shape[0] // 2, array.shape[1] // 2
    return [Part(2 * i + j, (i * rows, j * columns), (rows, columns)) for i in range(2) for j in range(2)]


@pytest.mark.parametrize("module_is_old", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        cut(MATRIX, 0, 3),
        cut(MATRIX, 1, 4),
        cut(MATRIX, 1, 2)[::-1],
        grid(MATRIX),
        flattened(MATRIX, [48]),
        flattened(MATRIX, [5, 5, 29, 48]),
        flattened(MATRIX, [13, 48], ranks=[1, 0]),
        flattened_box(cut(MATRIX, 1, 2)[0], [7, 24], [0, 1]) + flattened_box(cut(MATRIX, 1, 2)[1], [1, 24], [2, 3]),
        flattened_box(cut(MATRIX, 0, 2)[0], [9, 18, 24], [0, 1, 2]) + [replace(cut(MATRIX, 0, 2)[1], rank=3)],
    ],
    ids=["rows", "columns", "swapped", "grid", "flat", "flat and empty", "ranks", "flat columns", "flat and whole"],
)
def test_the_pieces_of_a_matrix_come_to_their_places(tmp_path: Path, parts: list[Part], module_is_old: bool) -> None:
    kwargs = {"module": OLD_MODULE} if module_is_old else {}
    write_flex_folder(tmp_path, {"w": MATRIX}, {"w": parts}, **kwargs)
    check_equal(tmp_path, {"w": MATRIX})


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("first", [1, 4, 7])
def test_a_range_may_end_inside_a_row_of_a_box_of_three_axes(tmp_path: Path, axis: int, first: int) -> None:
    array = sample(4, 4, 6, seed=axis)
    left, right = cut(array, axis, 2)
    size = left.of(array).size
    parts = flattened_box(left, [first, size], [0, 1]) + flattened_box(right, [size - first, size], [2, 3])
    write_flex_folder(tmp_path, {"premix": array}, {"premix": parts})
    check_equal(tmp_path, {"premix": array})


def test_scalars_and_tensors_without_elements(tmp_path: Path) -> None:
    arrays = {"scalar": np.array(2.5, np.float32), "none": np.empty((0, 4), np.float32), "one": sample(1)}
    write_flex_folder(tmp_path, arrays)
    check_equal(tmp_path, arrays)


def test_copies_may_lie_in_any_file_and_the_first_counts(tmp_path: Path) -> None:
    copies = [Part(2, (0, 0), MATRIX.shape, replica=0), Part(0, (0, 0), MATRIX.shape, replica=1)]
    write_flex_folder(tmp_path, {"w": MATRIX, "v": CUBE}, {"w": copies})
    check_equal(tmp_path, {"w": MATRIX, "v": CUBE})


def test_the_highest_save_counts(tmp_path: Path) -> None:
    for save_id, seed in ((2, 1), (10, 2), (9, 3)):
        array = sample(4, seed=seed)
        write_flex_folder(tmp_path, {"w": array}, save_id=save_id)
    tensors = open_distcp(tmp_path)
    assert tensors.save_id == 10 and tensors.read("w").tobytes() == sample(4, seed=2).tobytes()
    assert [path.name for path in tensors.files] == ["0_10.distcp", "10.metadata"]


def test_a_last_save_without_metadata_is_not_passed_over(tmp_path: Path) -> None:
    write_flex_folder(tmp_path, {"w": CUBE}, save_id=1)
    write_flex_folder(tmp_path, {"w": CUBE}, save_id=2)
    (tmp_path / "2.metadata").unlink()
    refused(tmp_path, "2.metadata: is missing")
    (tmp_path / "0_2.distcp").unlink()
    check_equal(tmp_path, {"w": CUBE})


def test_a_missing_or_short_file_is_named(tmp_path: Path) -> None:
    write_flex_folder(tmp_path, {"w": MATRIX, "v": CUBE}, {"w": cut(MATRIX, 0, 3)}, save_id=4)
    raw = (tmp_path / "1_4.distcp").read_bytes()
    (tmp_path / "1_4.distcp").write_bytes(raw[:-30])
    refused(tmp_path, "1_4.distcp: truncated or damaged")
    (tmp_path / "1_4.distcp").unlink()
    refused(tmp_path, r"1_4.distcp: is missing, 4.metadata refers to it")
    (tmp_path / "1_4.distcp").mkdir()
    refused(tmp_path, "1_4.distcp: not a file")


def test_a_file_that_became_shorter_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    array = sample(1000)
    write_flex_folder(tmp_path, {"w": array})
    tensors = open_distcp(tmp_path)
    (tmp_path / "0_0.distcp").write_bytes((tmp_path / "0_0.distcp").read_bytes()[:500])
    with pytest.raises(UserError, match="became shorter"):
        tensors.read("w")


def test_files_of_another_save_than_the_metadata_are_refused(tmp_path: Path) -> None:
    write_flex_folder(tmp_path, {"w": MATRIX}, {"w": cut(MATRIX, 0, 2)})
    path = tmp_path / "0_0.distcp"
    for arrays, match in (
        ({"w": MATRIX}, "has shape \\[6, 8\\], the metadata says \\[3, 8\\]"),
        ({"w": CUBE.reshape(-1)[:24].reshape(3, 8)}, "is stored as float32, the metadata says bfloat16"),
        ({}, "tensor 'w' is missing"),
        ({"w": MATRIX[:3], "new": CUBE}, "holds 'new', which 0.metadata does not know"),
    ):
        write_pdparams(path, arrays)
        refused(tmp_path, match)
    write_pdparams(path, {"w": MATRIX[:3]}, more=[1, 2])
    refused(tmp_path, "entry 'more' is not a tensor")
    write_pdparams(path, {"w": MATRIX[:3]})
    check_equal(tmp_path, {"w": MATRIX})


@pytest.mark.parametrize(
    "parts",
    [
        cut(MATRIX, 0, 3)[:2],
        cut(MATRIX, 0, 3)[1:],
        [*cut(MATRIX, 0, 3)[:2], Part(2, (3, 0), (2, 8))],
        [*cut(MATRIX, 0, 2), Part(2, (0, 0), MATRIX.shape)],
        [*cut(MATRIX, 0, 2), cut(MATRIX, 1, 4)[3]],
        flattened(MATRIX, [20, 47]),
        [Part(0, (0, 0), (6, 8), (0, 20)), Part(1, (0, 0), (6, 8), (21, 48))],
        [Part(0, (0, 0), (6, 8), (0, 20)), Part(1, (0, 0), (6, 8), (19, 48))],
        [Part(0, (0, 0), (6, 8), (1, 48))],
    ],
    ids=["last", "first", "overlap", "box and whole", "mixed", "short", "gap", "common", "late"],
)
def test_pieces_that_are_not_the_whole_are_refused(tmp_path: Path, parts: list[Part]) -> None:
    write_flex_folder(tmp_path, {"w": MATRIX, "v": CUBE}, {"w": parts})
    refused(tmp_path, "0.metadata: the pieces of 'w' are not the whole of it")


def test_a_gap_that_an_overlap_makes_up_for_is_found() -> None:
    def pieces(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Piece]:
        return [Piece(offset, shape, None, f"{i}_0.distcp") for i, (offset, shape) in enumerate(boxes)]

    assert chosen((4, 4), pieces(((0, 0), (4, 2)), ((0, 2), (4, 2)))) is not None
    assert chosen((4, 4), pieces(((0, 0), (4, 2)), ((0, 1), (4, 2)))) is None
    assert chosen((4, 4), pieces(((0, 0), (4, 2)), ((0, 3), (4, 2)))) is None
    assert chosen((4,), pieces(((0, 0), (4, 1)))) is None


W = LocalTensorMetadata((0, 0), (6, 8), "bfloat16", (6, 8))
INDEX = LocalTensorIndex("w", (0, 0), local_shape=(6, 8))


@pytest.mark.parametrize(
    ("described", "stored", "match"),
    [
        ({"w": [W]}, {}, "'w' that is in no file"),
        ({"w": []}, {}, "state_dict_metadata"),
        ({"w": W}, {INDEX: "0_0.distcp"}, "state_dict_metadata"),
        ({1: [W]}, {INDEX: "0_0.distcp"}, "state_dict_metadata"),
        ([], {INDEX: "0_0.distcp"}, "state_dict_metadata"),
        ({"w": [INDEX]}, {INDEX: "0_0.distcp"}, "where a LocalTensorMetadata belongs"),
        ({"w": [W]}, {W: "0_0.distcp"}, "where a LocalTensorIndex belongs"),
        ({"w": [W]}, [INDEX], "storage_metadata"),
        ({"w": [W]}, {replace(INDEX, tensor_key="v"): "0_0.distcp"}, "not described"),
        ({"w": [W]}, {replace(INDEX, local_shape=(6, 4)): "0_0.distcp"}, "not described"),
        ({"w": [W]}, {replace(INDEX, global_offset=(0, 1)): "0_0.distcp"}, "not described"),
        ({"w": [W]}, {INDEX: "0_0.distcp", replace(INDEX, replica_id=1): "0_0.distcp"}, "two pieces of 'w' in"),
        ({"w": [W, replace(W, dtype="float32")]}, {INDEX: "0_0.distcp"}, "two descriptions of one piece"),
        ({"w": [replace(W, dtype="float8_e4m3fn")]}, {INDEX: "0_0.distcp"}, "dtype 'float8_e4m3fn'"),
        ({"w": [replace(W, dtype=1)]}, {INDEX: "0_0.distcp"}, "dtype no text"),
        ({"w": [replace(W, global_shape=(2**40, 2**40))]}, {INDEX: "0_0.distcp"}, "a shape that no array can have"),
        ({"w": [replace(W, global_shape=(6, -8))]}, {INDEX: "0_0.distcp"}, "a shape or offset"),
        ({"w": [replace(W, local_shape=(6,))]}, {INDEX: "0_0.distcp"}, "that is none"),
        ({"w": [replace(W, is_flattened=True)]}, {INDEX: "0_0.distcp"}, "that is none"),
        ({"w": [replace(W, is_flattened=True, flattened_range=(0, 49))]}, {INDEX: "0_0.distcp"}, "a range"),
        ({"w": [replace(W, is_flattened=True, flattened_range=(5, 4))]}, {INDEX: "0_0.distcp"}, "a range"),
        ({"w": [W]}, {INDEX: "../0_0.distcp"}, "not named RANK_ID.distcp"),
        ({"w": [W]}, {INDEX: "0_0.safetensors"}, "not named RANK_ID.distcp"),
        ({"w": [W]}, {INDEX: None}, "not named RANK_ID.distcp"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(tmp_path: Path, described: Any, stored: Any, match: str) -> None:
    write_flex_folder(tmp_path, {"w": MATRIX})
    write_metadata(tmp_path / "0.metadata", Metadata(described, stored, {}))
    refused(tmp_path, match)


def test_a_shape_beyond_the_files_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    huge = replace(W, global_shape=(2**20, 2**30))
    write_flex_folder(tmp_path, {"w": MATRIX})
    write_metadata(tmp_path / "0.metadata", Metadata({"w": [huge]}, {INDEX: "0_0.distcp"}, {}))
    refused(tmp_path, "not the whole of it")


def test_metadata_of_the_first_version_is_read(tmp_path: Path) -> None:
    """Without dtype, whole shape and local shape of an index, as Paddle first had the classes."""
    write_flex_folder(tmp_path, {"w": MATRIX, "v": CUBE}, {"w": cut(MATRIX, 1, 2)})

    def described(offset: tuple[int, ...], shape: tuple[int, ...]) -> LocalTensorMetadata:
        record = LocalTensorMetadata(offset, shape, "")
        for field in ("dtype", "global_shape", "is_flattened", "flattened_range"):
            record.__dict__.pop(field)
        return record

    def index(name: str, offset: tuple[int, ...]) -> LocalTensorIndex:
        record = LocalTensorIndex(name, offset)
        for field in ("is_flattened", "flattened_range", "replica_id", "local_shape"):
            record.__dict__.pop(field)
        return record

    state = {"w": [described((0, 0), (6, 4)), described((0, 4), (6, 4))], "v": [described((0, 0, 0), (3, 4, 5))]}
    storage = {
        index("w", (0, 0)): "0_0.distcp",
        index("w", (0, 4)): "1_0.distcp",
        index("v", (0, 0, 0)): "0_0.distcp",
    }
    write_metadata(tmp_path / "0.metadata", Metadata(state, storage, {}), OLD_MODULE)
    check_equal(tmp_path, {"w": MATRIX, "v": CUBE})
