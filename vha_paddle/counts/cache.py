"""What a decoder keeps of each token of context.

    kind        values per token and layer
    grouped     2 K H                    keys and values of K heads
    vha         2 K H                    the same before and after the fold
    mla         C + H_rope               the latent, and one rotary key
    mfa         2 C                      one key and one value head
    gva         K H + H_rope             values, and one rotary key; content keys are made of the values
    dcmha       2 N H + 2 N (2R + 1)     keys and values, and the key's factors of the composition before and after
                                         softmax: they are made from its token, which is gone when it is read

A layer with a sliding window keeps the last `window` tokens only.
"""

from __future__ import annotations

from vha_paddle.config import (
    Attention,
    ComposedAttention,
    GroupedValueAttention,
    LatentAttention,
    Model,
)
from vha_paddle.counts.dtypes import BYTES, Dtype
from vha_paddle.counts.heads import heads_per_rank


def kv_cache_values(attention: Attention, tensor: int = 1) -> int:
    """Values that a layer keeps per token of context, of the heads of one of `tensor` ranks."""
    heads = heads_per_rank(attention, tensor).key_value
    if isinstance(attention, LatentAttention):
        return attention.kv_lora_rank + attention.qk_rope_head_dim
    if isinstance(attention, GroupedValueAttention):
        return heads * attention.head_dim + attention.qk_rope_head_dim
    if isinstance(attention, ComposedAttention):
        return 2 * heads * (attention.head_dim + 2 * attention.compose_rank + 1)
    return 2 * heads * attention.head_dim


def kv_cache_bytes(attention: Attention, dtype: Dtype) -> int:
    """Bytes that a layer keeps per token of context."""
    return kv_cache_values(attention) * BYTES[dtype]


def cache_bytes(model: Model, context: int, dtype: Dtype) -> int:
    """Bytes that all layers keep for one sequence of `context` tokens."""
    return sum(
        kv_cache_bytes(model.attention_of(layer), dtype) * min(context, model.window_of(layer) or context)
        for layer in range(model.num_hidden_layers)
    )
