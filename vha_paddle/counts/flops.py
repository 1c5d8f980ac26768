"""FLOPs per token. Matrix products only, two FLOPs for each multiply-add.

Left out: norms, biases, RoPE, softmax, SiLU, gates, the diagonals of DCMHA's composition, the optimizer.

Every weight is used once per token and costs two FLOPs, apart from

    premix     each [H, H] matrix takes all P physical heads
    postmix    each factor [N, R] meets every channel, so H times; counted in activation space (in weight space the
               same map costs 4 R N H D per forward pass and nothing per token)
    experts    those that the token is sent to
    gains and biases, and the static composition of DCMHA, which acts on scores

Scores take each query over `keys` keys, first with keys and then with values, N heads of widths H_k and H_v:

    kind            H_k                H_v
    grouped, vha    H                  H
    mla             H_nope + H_rope    H_v            expanded: each head has keys and values of its own
    mla, absorbed   C + H_rope         C              a decoder step attends in the latent; W_UK and W_UV then act on
                                                      the query and the output, and cost the same per token
    mfa             C                  C
    gva             H + H_rope         H              the key map acts on the query, so both forms are one
    dcmha           H                  H

DCMHA's composition mixes every score twice, before and after softmax, by an [M, M] matrix of the query's token (the
static one in it) and one of the key's, M = N/G heads of a group: 4 N M FLOPs per key and stage. Four such matrices
of rank R are made of each token, 8 R N M in all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from vha_paddle.config import (
    Attention,
    ComposedAttention,
    GroupedValueAttention,
    LatentAttention,
    Model,
    VirtualHeadAttention,
)
from vha_paddle.counts.folding import folded
from vha_paddle.counts.parameters import active_experts
from vha_paddle.tensors import attention_tensors, mlp_tensors

TRAINING_OVER_FORWARD = 3  # backward takes two products for each of forward's: one by each factor
_ON_SCORES = ("pre_compose", "post_compose")


@dataclass(frozen=True, kw_only=True)
class FlopRule:
    """What a count of FLOPs includes. Conventions differ, so every count names its own."""

    sequence_length: int
    """Tokens S in the sequence: the keys that a token's scores are taken over. Of a decoder step, its context."""
    lm_head: bool = True
    """Count the output projection to the vocabulary."""
    causal: bool = False
    """Count only the scores that the mask keeps, S / 2 keys for a token on average (w - w^2 / 2S with a window w):
    some kernels skip the others. Without it every token counts S keys, or its window's w."""
    folded: bool = False
    """Count the model that is served in place of the one that is trained."""
    absorbed: bool = False
    """Count MLA as a decoder step runs it, in the latent. Training and prefill run it expanded."""


def forward_flops_by_part(model: Model, rule: FlopRule) -> dict[str, int]:
    """FLOPs of a forward pass per token, over all layers, by part."""
    if rule.folded:
        model = folded(model)
    layers = Counter((model.attention_of(layer), model.window_of(layer)) for layer in range(model.num_hidden_layers))
    flops: Counter[str] = Counter()
    for (attention, window), count in layers.items():
        of_layer = attention_flops_by_part(attention, model.hidden_size, rule, window) | _mlp_flops_by_part(model)
        flops.update({part: count * cost for part, cost in of_layer.items()})
    flops["lm_head"] = 2 * model.hidden_size * model.vocab_size if rule.lm_head else 0
    return dict(flops)


def attention_flops_by_part(
    attention: Attention, hidden_size: int, rule: FlopRule, window: int | None = None
) -> dict[str, int]:
    """FLOPs of one layer's attention per token, by part; a query sees the last `window` keys, or all."""
    flops = {
        spec.name.removesuffix(".weight"): 2 * spec.size
        for spec in attention_tensors(attention, hidden_size)
        if len(spec.shape) > 1 and spec.name not in _ON_SCORES
    }
    if isinstance(attention, VirtualHeadAttention):
        factors = flops.pop("postmix_a", 0) + flops.pop("postmix_b", 0)
        flops["premix"] = flops.get("premix", 0) * attention.num_physical_heads
        flops["postmix"] = factors * attention.head_dim
    flops["scores"] = _over_keys(2 * _score_width(attention, rule.absorbed), rule, window)
    if isinstance(attention, ComposedAttention):
        mixed = attention.num_attention_heads**2 // attention.num_groups  # N M
        flops["composition"] = _over_keys(2 * 4 * mixed, rule, window) + 8 * attention.compose_rank * mixed
    return flops


def _score_width(attention: Attention, absorbed: bool) -> int:
    """Multiply-adds that a query of all heads takes with one key and its value."""
    heads = attention.num_attention_heads
    if isinstance(attention, LatentAttention):
        if absorbed:
            return heads * (2 * attention.kv_lora_rank + attention.qk_rope_head_dim)
        return heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim)
    if isinstance(attention, GroupedValueAttention):
        return heads * (2 * attention.head_dim + attention.qk_rope_head_dim)
    return heads * 2 * attention.head_dim


def _over_keys(flops_per_key: int, rule: FlopRule, window: int | None) -> int:
    """FLOPs per token of what a query does with each key it sees."""
    length = rule.sequence_length
    keys = min(length, window or length)
    if not rule.causal:
        return flops_per_key * keys
    return flops_per_key * (2 * length * keys - keys * keys) // (2 * length)  # the area below the mask, over S


def _mlp_flops_by_part(model: Model) -> dict[str, int]:
    if model.experts is None:
        return {"mlp": 2 * sum(spec.size for spec in mlp_tensors(model))}
    flops = {"router": 0, "experts": 0, "shared_expert": 0}
    for spec in mlp_tensors(model):
        if spec.is_expert:
            flops["experts"] += 2 * active_experts(model, spec.size)
        else:
            flops["router" if spec.name == "gate.weight" else "shared_expert"] += 2 * spec.size
    return flops


def forward_flops(model: Model, rule: FlopRule) -> int:
    return sum(forward_flops_by_part(model, rule).values())


def training_flops(model: Model, rule: FlopRule) -> int:
    """FLOPs per token of forward and backward: nothing recomputed, the optimizer left out."""
    return TRAINING_OVER_FORWARD * forward_flops(model, rule)
