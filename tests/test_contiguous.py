"""Against numpy's own copies, over shapes around the tiles, dtypes of every size and views of every kind."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from vha_paddle.contiguous import contiguous, transposed

SIZES = (0, 1, 2, 127, 128, 129, 256, 300, 513)
DTYPES = (np.int8, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.float64, np.complex128)


def values(shape: tuple[int, ...], dtype: Any = np.uint16) -> np.ndarray:
    """Distinct in their places, whatever the dtype."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def same(result: np.ndarray, expected: np.ndarray) -> None:
    assert result.flags.c_contiguous
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert result.tobytes() == expected.tobytes()  # in C order, of whatever lies otherwise


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("columns", SIZES)
def test_every_shape(rows: int, columns: int) -> None:
    matrix = values((rows, columns))
    same(transposed(matrix), matrix.T)
    same(contiguous(matrix), matrix)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype(dtype: Any) -> None:
    matrix = values((130, 259), dtype)
    same(transposed(matrix), matrix.T)


@pytest.mark.parametrize(
    "view",
    [
        lambda matrix: matrix.T[5:200],
        lambda matrix: matrix.T[:, 3:90],
        lambda matrix: matrix.T[::2],
        lambda matrix: matrix.T[:, ::-1],
        lambda matrix: matrix[:, ::3],
        lambda matrix: matrix[0],
        lambda matrix: matrix[3, 4],
        lambda matrix: matrix.reshape(3, 100, 300).transpose(2, 0, 1),
        lambda matrix: np.broadcast_to(matrix[:, :1], (300, 4)).T,
    ],
)
def test_every_view(view: Any) -> None:
    seen = np.asarray(view(values((300, 300))))
    same(contiguous(seen), seen)


def test_what_is_in_order_is_not_copied() -> None:
    matrix = values((4, 5))
    assert contiguous(matrix) is matrix
