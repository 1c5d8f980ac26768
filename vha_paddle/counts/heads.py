"""How many heads of a layer a tensor-parallel rank holds.

kind             projected    query    key and value
grouped, gva     N/t          N/t      K/t; 1 where t > K
vha              P/t          N/t      K: every one is needed for each physical head
mla, dcmha       N/t          N/t      N/t
mfa              N/t          N/t      1
"""

from __future__ import annotations

from dataclasses import dataclass

from vha_paddle.config import (
    Attention,
    FactorizedAttention,
    GroupedAttention,
    GroupedValueAttention,
    VirtualHeadAttention,
)


@dataclass(frozen=True, kw_only=True)
class HeadsPerRank:
    """Heads of one layer that a tensor-parallel rank computes."""

    projected: int
    """Heads that W_Q makes: physical ones under Premix."""
    query: int
    """Heads that attend: virtual ones under VHA."""
    key_value: int


def heads_per_rank(attention: Attention, tensor: int = 1) -> HeadsPerRank:
    """The split over `tensor` ranks, a degree that the recipe's rules allow."""
    query = attention.num_attention_heads // tensor
    if isinstance(attention, VirtualHeadAttention):
        projected = attention.num_projected_heads // tensor
        return HeadsPerRank(projected=projected, query=query, key_value=attention.num_key_value_heads)
    if isinstance(attention, GroupedAttention | GroupedValueAttention):
        return HeadsPerRank(projected=query, query=query, key_value=max(1, attention.num_key_value_heads // tensor))
    key_value = 1 if isinstance(attention, FactorizedAttention) else query
    return HeadsPerRank(projected=query, query=query, key_value=key_value)
