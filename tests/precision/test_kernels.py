"""How Paddle's FP8 kernels are called: which factor, tiled along which axis, padded. No GPU: the kernels are replaced
by their definition, so this shows neither that they exist on a device nor that they are as defined here."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.incubate.nn.functional import fp8

from tests.oracles.fp8 import TILE, Tiles, fp8_linear, quantized, scale_of
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.config.schema import Precision
from vha_paddle.errors import UserError
from vha_paddle.precision.kernels import KERNELS
from vha_paddle.precision.policy import check_fp8

SPREAD = {"1x128": (1, TILE), "128x128": (TILE, TILE)}


def quant(
    x: paddle.Tensor,
    quant_method: str = "1x128",
    input_transpose: bool = False,
    return_transpose_only: bool = False,
    output_scale_transpose: bool = True,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Codes (as numbers) and scales, each of the matrix or of its transpose."""
    assert input_transpose == return_transpose_only, "else there are four results"
    array = x.numpy().T if input_transpose else x.numpy()
    assert all(size % TILE == 0 for size in array.shape)
    height, width = SPREAD[quant_method]
    tiles: Tiles = "along rows" if height == 1 else "blocks"
    blocks = array.reshape(array.shape[0] // height, height, array.shape[1] // width, width)
    scales = np.array([[scale_of(blocks[i, :, j]) for j in range(blocks.shape[2])] for i in range(len(blocks))])
    codes = quantized(array, tiles) / np.kron(scales, np.ones((height, width)))
    assert np.abs(codes).max() <= 448
    return paddle.to_tensor(codes), paddle.to_tensor(scales.T if output_scale_transpose else scales)


def gemm(
    a: paddle.Tensor,
    a_scale: paddle.Tensor,
    b: paddle.Tensor,
    b_scale: paddle.Tensor,
    out_dtype: Any,
    is_a_1d_scaled: bool = True,
    is_b_1d_scaled: bool = True,
) -> paddle.Tensor:
    """A B^T. The scales of tiles lie transposed, those of blocks do not."""

    def decoded(codes: paddle.Tensor, scale: paddle.Tensor, is_1d: bool) -> np.ndarray:
        scales, spread = (scale.numpy().T, (1, TILE)) if is_1d else (scale.numpy(), (TILE, TILE))
        return codes.numpy() * np.kron(scales, np.ones(spread))

    result = decoded(a, a_scale, is_a_1d_scaled) @ decoded(b, b_scale, is_b_1d_scaled).T
    return paddle.to_tensor(result, dtype="float64")


@pytest.mark.parametrize("sizes", [(512, 512, 512), (600, 130, 257), (5, 1024, 640)], ids=str)
def test_the_kernels_get_the_factors_of_the_three_products(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "fp8_quant_blockwise", quant)
    monkeypatch.setattr(fp8, "fp8_gemm_blockwise", gemm)
    rng = np.random.default_rng(0)
    rows, inner, outer = sizes
    x, weight, dy = (
        rng.standard_normal((rows, inner)),
        rng.standard_normal((inner, outer)),
        rng.standard_normal((rows, outer)),
    )
    tensors = {name: paddle.to_tensor(array) for name, array in {"x": x, "weight": weight, "dy": dy}.items()}
    expected = fp8_linear(x, weight, dy)
    results = (
        KERNELS.output(tensors["x"], tensors["weight"]),
        KERNELS.input_gradient(tensors["dy"], tensors["weight"]),
        KERNELS.weight_gradient(tensors["x"], tensors["dy"]),
    )
    for name, result, right in zip(("y", "dx", "dW"), results, expected, strict=True):
        assert_close(result.numpy(), right, FLOAT64, name)


@pytest.mark.parametrize(
    ("capability", "compute", "says"),
    [((8, 0), "bfloat16", "has 8.0; override with precision.fp8=none"), ((9, 0), "float32", "compute=bfloat16 or")],
)
def test_a_gpu_without_the_kernels_is_refused_with_the_override(
    capability: tuple[int, int], compute: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:0")
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(UserError, match="precision.fp8=all: ") as error:
        check_fp8(Precision(compute=compute, fp8="all"))
    assert says in str(error.value)
    check_fp8(Precision(compute=compute))


def test_a_gpu_with_the_kernels_and_a_cpu_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fp8(Precision(fp8="all"))
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:0")
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda: (9, 0))
    check_fp8(Precision(compute="bfloat16", fp8="all"))
