"""What `tools/calculate.py` prints about one model: plain values by name, with units in the names."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

from vha_paddle.config import Model, Recipe, VirtualHeadAttention
from vha_paddle.counts.cache import cache_bytes, kv_cache_bytes
from vha_paddle.counts.dtypes import BYTES
from vha_paddle.counts.flops import FlopRule, forward_flops, forward_flops_by_part, training_flops
from vha_paddle.counts.folding import folded, what_stays
from vha_paddle.counts.parameters import active_parameters, attention_parameters, mlp_parameters, parameters

Values = dict[str, int | float | str | bool]


def cache(recipe: Recipe) -> Values:
    """KV cache as served, and its size for one sequence of `data.sequence_length` tokens."""
    model, context = folded(recipe.model), recipe.data.sequence_length
    values: Values = {}
    for name, (attention, window, layers) in _layer_groups(model).items():
        values[f"{name}layers"] = layers
        if window is not None:
            values[f"{name}window_tokens"] = window
        for dtype in BYTES:
            values[f"{name}{dtype}_bytes_per_token_per_layer"] = kv_cache_bytes(attention, dtype)
    for dtype in BYTES:
        per_token = (kv_cache_bytes(model.attention_of(layer), dtype) for layer in range(model.num_hidden_layers))
        values[f"{dtype}_bytes_per_token"] = sum(per_token)
        values[f"{dtype}_bytes_at_{context}_tokens"] = cache_bytes(model, context, dtype)
    return values


def params(recipe: Recipe) -> Values:
    """Parameters by tensor, in total, of one rank, of one token, and as served."""
    model, degrees = recipe.model, recipe.parallel
    whole = parameters(model)
    values: Values = {}
    for name, (attention, _, layers) in _layer_groups(model).items():
        values[f"{name}layers"] = layers
        tensors = attention_parameters(attention, model.hidden_size)
        values |= {f"{name}attention_per_layer.{tensor}": size for tensor, size in tensors.items()}
        values[f"{name}attention_per_layer"] = sum(tensors.values())
    values |= {f"mlp_per_layer.{tensor}": size for tensor, size in mlp_parameters(model).items()}
    values |= {"embedding": whole.embedding, "attention": whole.attention, "mlp": whole.mlp}
    values |= {"experts": whole.experts, "final_norm": whole.final_norm, "lm_head": whole.lm_head}
    values |= {"non_embedding": whole.non_embedding, "total": whole.total}
    values["active_per_token"] = active_parameters(model)
    values["total_on_one_rank"] = parameters(model, degrees.tensor, degrees.expert).total
    served = folded(model)
    values["total_served_folded"] = parameters(served).total
    values["active_per_token_served_folded"] = active_parameters(served)
    return values


def flops(recipe: Recipe, rule: FlopRule) -> Values:
    """FLOPs per token: a forward pass by part under one rule, and the totals under every rule."""
    model = recipe.model
    values: Values = {f"forward.{part}": count for part, count in forward_flops_by_part(model, rule).items()}
    values["forward"] = forward_flops(model, rule)
    if not rule.folded:
        values["training"] = training_flops(model, rule)
    for lm_head, causal in itertools.product((True, False), (False, True)):
        other = replace(rule, lm_head=lm_head, causal=causal, folded=False)
        name = f"{'with' if lm_head else 'without'}_lm_head_{'causal' if causal else 'full'}_scores"
        values[f"training.{name}"] = training_flops(model, other)
        values[f"folded_forward.{name}"] = forward_flops(model, replace(other, folded=True))
    return values


def fold(recipe: Recipe, rule: FlopRule) -> Values:
    """What the fold takes away, what it costs, and what stays behind."""
    model, served = recipe.model, folded(recipe.model)
    values: Values = {}
    for name, (attention, _, layers) in _layer_groups(model).items():
        values[f"{name}layers"] = layers
        values[f"{name}kind"] = attention.kind
        if isinstance(attention, VirtualHeadAttention):
            stays = what_stays(attention)
            for part in ("premix", "postmix"):
                is_there = getattr(attention, part) != "none"
                values[f"{name}{part}"] = f"stays: {stays[part]}" if part in stays else "folds" if is_there else "none"
        else:
            values[f"{name}fold"] = "nothing to fold: it is served as it is trained"
    for label, one in (("trained", model), ("served", served)):
        layer = attention_parameters(one.attention, one.hidden_size)
        values[f"{label}.kind"] = one.attention.kind
        values[f"{label}.query_weights_per_layer"] = query_weights(one)
        values[f"{label}.attention_per_layer"] = sum(layer.values())
        values[f"{label}.parameters"] = parameters(one).total
        values[f"{label}.forward_flops_per_token"] = forward_flops(one, rule)
        values[f"{label}.cache_bfloat16_bytes_per_token_per_layer"] = kv_cache_bytes(one.attention, "bfloat16")
    return values


def query_weights(model: Model) -> int:
    """Weights per layer that make the queries: projections and Premix, a bias apart."""
    layer = attention_parameters(model.attention, model.hidden_size)
    makes_queries = ("premix", "q_proj", "q_a_proj", "q_b_proj")
    return sum(size for tensor, size in layer.items() if tensor in makes_queries)


def _layer_groups(model: Model) -> dict[str, tuple[Any, int | None, int]]:
    """The different layers: attention, window and number; the prefix of their names is empty where all are alike."""
    layers = Counter((model.attention_of(layer), model.window_of(layer)) for layer in range(model.num_hidden_layers))
    if len(layers) == 1:
        return {"": (*next(iter(layers)), model.num_hidden_layers)}
    return {
        f"{'full' if window is None else 'sliding'}.": (attention, window, count)
        for (attention, window), count in layers.items()
    }
