"""What an export will write, known before anything is computed: every tensor, its sources, its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from vha_paddle.config import Model
from vha_paddle.counts import folded
from vha_paddle.export.config import ExportDtype
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX, expected_tensors, hf_tensors

NUMPY_DTYPES: dict[ExportDtype, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

_FOLDED_INTO = {"q_proj.weight": (PREMIX,), "o_proj.weight": (POSTMIX_A, POSTMIX_B)}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the exported model."""

    name: str
    """As Hugging Face's Qwen3 or Qwen3-MoE calls it."""
    sources: tuple[str, ...]
    """The checkpoint's tensors that it is made of; more than one where something is folded into it. An expert's is
    the one that holds all experts of the layer."""
    shape: tuple[int, ...]
    """On disk there: linear weights are [out, in]."""
    dtype: ExportDtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


def plan_export(model: Model, dtype: ExportDtype) -> list[PlannedTensor]:
    """Every tensor of the exported model, in the order in which it is written.

    Args:
        model: the checkpoint's, as it was trained.
    """
    trained = expected_tensors(model)
    planned = []
    for name, shape in expected_tensors(folded(model)).items():
        layer, _, short_name = name.rpartition(".self_attn.")
        maps = (f"{layer}.self_attn.{each}" for each in _FOLDED_INTO.get(short_name, ()))
        sources = (name, *(each for each in maps if each in trained))
        planned += [
            PlannedTensor(hf_name, sources, hf_shape, dtype) for hf_name, hf_shape in hf_tensors(name, shape).items()
        ]
    return planned


def describe_plan(planned: Sequence[PlannedTensor]) -> str:
    """The plan to read: one line per tensor with what it is made of, and the total."""
    lines = [
        f"{tensor.name} {list(tensor.shape)} {tensor.num_bytes:,} bytes <- {' + '.join(tensor.sources)}"
        for tensor in planned
    ]
    total = sum(tensor.num_bytes for tensor in planned)
    return "\n".join([*lines, f"{len(planned)} tensors, {total:,} bytes in {planned[0].dtype}"])
