"""The weights that a decoder step reads: once for the whole batch."""

from __future__ import annotations

from vha_paddle.config import Model
from vha_paddle.counts.dtypes import BYTES, Dtype
from vha_paddle.counts.parameters import parameters


def weights_read(served: Model, batch: int, dtype: Dtype) -> float:
    """Bytes of the layers, the head, the experts that are reached, and a row of the embedding for each sequence."""
    whole = parameters(served)
    head = whole.embedding if served.tie_word_embeddings else whole.lm_head
    dense = whole.non_embedding - whole.experts + head + batch * served.hidden_size
    return BYTES[dtype] * (dense + _experts_reached(served, batch) * whole.experts)


def _experts_reached(model: Model, batch: int) -> float:
    """Share of the experts that at least one of `batch` tokens is sent to, if all are equally likely."""
    if model.experts is None:
        return 0.0
    return 1 - (1 - model.experts.num_experts_per_tok / model.experts.num_experts) ** batch
