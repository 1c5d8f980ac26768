"""What an export will write, known before anything is computed: every tensor, its sources, its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from vha_paddle.config import Model, VirtualHeadAttention
from vha_paddle.export.config import ExportDtype
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX, DecoderShape, expected_tensors, to_hf

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
    """As Hugging Face's Qwen3 calls it."""
    sources: tuple[str, ...]
    """The checkpoint's tensors that it is made of; more than one where something is folded into it."""
    shape: tuple[int, ...]
    """On disk there: linear weights are [out, in]."""
    dtype: ExportDtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


def decoder_shape(model: Model) -> DecoderShape:
    """The names and shapes of the recipe's model as it was trained."""
    attention = model.attention
    rank = attention.postmix_rank if isinstance(attention, VirtualHeadAttention) else 0
    return DecoderShape(
        kind=attention.kind,
        num_hidden_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        premix=isinstance(attention, VirtualHeadAttention),
        postmix_rank=rank,
        tie_word_embeddings=model.tie_word_embeddings,
    )


def plan_export(shape: DecoderShape, dtype: ExportDtype) -> list[PlannedTensor]:
    """Every tensor of the exported model, in the order in which it is written.

    Args:
        shape: the checkpoint's model, folded or not.
    """
    trained = expected_tensors(shape)
    planned = []
    for name, canonical_shape in expected_tensors(shape.folded()).items():
        layer, _, short_name = name.rpartition(".self_attn.")
        maps = (f"{layer}.self_attn.{each}" for each in _FOLDED_INTO.get(short_name, ()))
        # Elements of no bytes: `to_hf` alone knows the orientation there, and this asks it at no cost.
        hf_name, stand_in = to_hf(name, np.empty(canonical_shape, "V0"))
        sources = (name, *(each for each in maps if each in trained))
        planned.append(PlannedTensor(hf_name, sources, stand_in.shape, dtype))
    return planned


def describe_plan(planned: Sequence[PlannedTensor]) -> str:
    """The plan to read: one line per tensor with what it is made of, and the total."""
    lines = [
        f"{tensor.name} {list(tensor.shape)} {tensor.num_bytes:,} bytes <- {' + '.join(tensor.sources)}"
        for tensor in planned
    ]
    total = sum(tensor.num_bytes for tensor in planned)
    return "\n".join([*lines, f"{len(planned)} tensors, {total:,} bytes in {planned[0].dtype}"])
