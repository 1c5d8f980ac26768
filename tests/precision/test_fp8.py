"""Rounding in tiles against the table of E4M3's numbers, and that table against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest

from tests.ops.conftest import dtype, threads  # noqa: F401
from tests.oracles.fp8 import TILE, VALUES, Tiles, e4m3, quantized, scale_of
from vha_paddle.precision.fp8 import quantize_blocks, quantize_rows

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
TILES: tuple[Tiles, ...] = ("along rows", "down columns", "blocks")


def rounded(x: np.ndarray, tiles: Tiles) -> np.ndarray:
    tensor = paddle.to_tensor(np.ascontiguousarray(x))
    if tiles == "blocks":
        return quantize_blocks(tensor).numpy()
    return quantize_rows(tensor, axis=1 if tiles == "along rows" else 0).numpy()


def with_448(values: np.ndarray) -> np.ndarray:
    """The values in rows of 127 behind 448, which makes the scale of every row 1."""
    rows = np.resize(values, (-(-len(values) // (TILE - 1)), TILE - 1))
    return np.concatenate([np.full((len(rows), 1), 448, values.dtype), rows], axis=1)


def random_values(dtype: str) -> np.ndarray:  # noqa: F811
    """Of every magnitude that E4M3 has, and some between its numbers."""
    rng = np.random.default_rng(0)
    ties = (VALUES[:-1] + VALUES[1:]) / 2
    values = np.concatenate(
        [
            rng.uniform(-448, 448, 100_000),
            rng.choice([-1, 1], 100_000) * 2.0 ** rng.uniform(-14, 8.8, 100_000),
            ties,
            -ties,
            np.nextafter(ties.astype(dtype), np.array(0, dtype)),
            np.nextafter(ties.astype(dtype), np.array(448, dtype)),
        ]
    )
    return values.astype(dtype)


def test_the_table_holds_the_numbers_of_e4m3() -> None:
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.array_equal(VALUES, codes)


@pytest.mark.parametrize("values", [EVERY_BF16[np.abs(EVERY_BF16) <= 448], "random"], ids=["every bf16", "random"])
def test_rounding_is_that_of_e4m3(values: np.ndarray | str, dtype: str) -> None:  # noqa: F811
    x = with_448(random_values(dtype) if isinstance(values, str) else values.astype(dtype))
    result = rounded(x, "along rows")
    assert np.array_equal(result, e4m3(x))
    if dtype == "float32":  # ml_dtypes rounds float64 twice
        assert np.array_equal(result, x.astype(ml_dtypes.float8_e4m3fn).astype(dtype))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 128), (128, 3), (130, 300), (257, 129), (512, 256)], ids=str)
def test_every_tile_has_its_own_scale(shape: tuple[int, int], tiles: Tiles, dtype: str, threads: int) -> None:  # noqa: F811
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(shape) * np.exp(6 * rng.standard_normal(shape))).astype(dtype)
    x[:, ::7] = 0
    assert np.array_equal(rounded(x, tiles), quantized(x, tiles))


@pytest.mark.parametrize("largest", [448.0, 449.0, 224.0, 224.5, 1.75, 2.0**-100, 2.0**-112, 1e-44, 1e30])
def test_the_scale_is_the_smallest_power_of_two_that_leaves_room(largest: float) -> None:
    x = (np.linspace(-1, 1, TILE) ** 7 * largest).astype(np.float32)[None]  # of many magnitudes
    scale = max(scale_of(x), 2.0**-117)  # the steps of a smaller one would be below float32's normal numbers
    assert np.array_equal(rounded(x, "along rows"), e4m3(x / np.float64(scale)) * scale)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf, 2e30, -3e38])
@pytest.mark.parametrize("tiles", TILES)
def test_a_value_without_a_rounding_spoils_its_tile_and_no_other(fault: float, tiles: Tiles) -> None:
    x = np.random.default_rng(2).standard_normal((200, 200)).astype(np.float32)
    expected = quantized(x, tiles)
    x[150, 140] = fault
    spoiled = {"along rows": np.s_[150, 128:], "down columns": np.s_[128:, 140], "blocks": np.s_[128:, 128:]}[tiles]
    expected[spoiled] = np.nan
    assert np.array_equal(rounded(x, tiles), expected, equal_nan=True)


def test_zeros_stay_and_no_rows_are_no_rows() -> None:
    assert not rounded(np.zeros((3, 200), np.float32), "along rows").any()
    for tiles in TILES:
        assert rounded(np.zeros((0, 200), np.float32), tiles).shape == (0, 200)


@pytest.mark.parametrize("tiles", TILES)
def test_what_is_rounded_is_not_rounded_again(tiles: Tiles) -> None:
    once = rounded(np.random.default_rng(3).standard_normal((200, 200)), tiles)
    assert np.array_equal(rounded(once, tiles), once)
