"""FP8 weights in blocks of 128 x 128, as DeepSeek-V3, Qwen3's FP8 releases and transformers' `fp8` have them.

    s = max |W| / 448 of a block          in float32, and not below its smallest normal number
    W8 = round(W / s)                     E4M3, to nearest, ties to even: what is stored is W8, and s as NAME_scale_inv
    W ~ W8 * s

The matrices of the layers' projections are stored so: embedding, output projection, norms, biases and routers are
bfloat16, for a router that is rounded sends tokens elsewhere. The quotient is of the fold's own values, which no other
dtype has rounded before.

ONLY MATRICES OF WHOLE BLOCKS, or of less than one: transformers 5, where it takes the scales in, divides a matrix into
as many equal parts as it has scales, so that 160 rows with 2 scales would be halved at 80 without a word. And vLLM
joins some projections, of which it takes all in FP8 or none. What is not quantised for one of these reasons is
bfloat16, and config.json names it.

Source: DeepSeek-V3 (arXiv 2412.19437), Section 3.3; the layout is that of the published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from vha_paddle.contiguous import contiguous
from vha_paddle.rounding import rounded

BLOCK = 128
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BESIDE = np.dtype(ml_dtypes.bfloat16)
"""dtype of what is not quantised."""
LARGEST = 448.0  # finite E4M3
RELATIVE_ROUNDING = 2.0**-4
"""Largest rounding of a weight, relative to it; of small ones (below 2^-6 of the block's scale) 2^-10 of the scale."""

_SCALE = "_scale_inv"
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_LAYERS, _ROUTER, _HEAD = "model.layers.", ".mlp.gate.weight", "lm_head"
_JOINED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))

Array = np.ndarray[Any, Any]


def quantised_tensors(tensors: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Which of a directory's tensors are stored in blocks.

    Args:
        tensors: all of them before quantisation: name to shape, as Hugging Face has them.
    """
    return frozenset(
        name
        for name, shape in tensors.items()
        if _is_projection(name, shape) and all(_has_whole_blocks(tensors[each]) for each in _joined(name, tensors))
    )


def broken_edges(tensors: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Sizes for which projections are not stored in blocks; `tensors` as in `quantised_tensors`."""
    projections = [shape for name, shape in tensors.items() if _is_projection(name, shape)]
    return sorted({size for shape in projections for size in shape if not _has_whole_blocks((size,))})


def scale_name(name: str) -> str:
    """What the scales of a quantised tensor are called."""
    return name + _SCALE


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One scale for each block of a matrix."""
    return tuple(math.ceil(size / BLOCK) for size in shape)


def stored_tensors(
    name: str, shape: tuple[int, ...], quantised: frozenset[str]
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """What is stored of a tensor: name to dtype and shape."""
    if name not in quantised:
        return {name: (BESIDE, shape)}
    return {name: (E4M3, shape), scale_name(name): (np.dtype(np.float32), scale_shape(shape))}


def stored_arrays(name: str, array: Array, quantised: frozenset[str]) -> Iterator[tuple[str, Array]]:
    """The values of `stored_tensors`, one after the other."""
    if name not in quantised:
        yield name, rounded(array, BESIDE)
        return
    values, scales = quantise(contiguous(array))
    yield name, values
    yield scale_name(name), scales


def quantise(weight_OI: Array) -> tuple[Array, Array]:
    """A matrix as E4M3 and the float32 scales of its blocks."""
    quantised = np.empty(weight_OI.shape, E4M3)
    scales = np.empty(scale_shape(weight_OI.shape), np.float32)
    starts = np.arange(0, weight_OI.shape[1], BLOCK)
    for index, first in enumerate(range(0, len(weight_OI), BLOCK)):
        stripe = weight_OI[first : first + BLOCK].astype(np.result_type(weight_OI, np.float32), copy=False)
        largest = np.maximum.reduceat(np.abs(stripe).max(axis=0), starts)
        scales[index] = np.maximum(largest / LARGEST, _SMALLEST_SCALE)
        quotients = stripe / _of_columns(scales[index], weight_OI.shape[1])
        quantised[first : first + BLOCK] = quotients.astype(np.float32).astype(E4M3)
    return quantised, scales


def dequantise(quantised_OI: Array, scales: Array) -> Array:
    """The matrix that a reader makes of the two, float32."""
    weight_OI = quantised_OI.astype(np.float32)
    for index, row_of_scales in enumerate(scales):
        weight_OI[index * BLOCK : (index + 1) * BLOCK] *= _of_columns(row_of_scales, weight_OI.shape[1])
    return weight_OI


def quantization_config(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The section of config.json; `tensors` as in `quantised_tensors`."""
    quantised = quantised_tensors(tensors)
    others = [name for name, shape in tensors.items() if name.startswith(_LAYERS) and len(shape) == 2]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [
            _HEAD,
            *(name.removesuffix(".weight") for name in others if name not in quantised),
        ],
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


def _is_projection(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.startswith(_LAYERS) and not name.endswith(_ROUTER)


def _has_whole_blocks(shape: tuple[int, ...]) -> bool:
    return all(size % BLOCK == 0 or size < BLOCK for size in shape)


def _joined(name: str, tensors: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The matrix itself, and those that vLLM joins with it."""
    prefix, _, module = name.removesuffix(".weight").rpartition(".")
    group = next((each for each in _JOINED if module in each), (module,))
    return [there for each in group if (there := f"{prefix}.{each}.weight") in tensors]


def _of_columns(scales: Array, num_columns: int) -> Array:
    return np.repeat(scales, BLOCK)[:num_columns]
