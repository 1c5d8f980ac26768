"""From the weights of a grouped model to those of a virtual head one, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vha_paddle.checkpoint.logical import LogicalTensors
from vha_paddle.config import Attention, GroupedAttention, Model, VirtualHeadAttention
from vha_paddle.counts import folded_attention
from vha_paddle.errors import UserError
from vha_paddle.fold import fold_premix
from vha_paddle.maps import premix_figures
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX, account, check_shape, expected_tensors
from vha_paddle.parallel.init import Normal, generator_for
from vha_paddle.warm_start.factorise import OutputMoments, factor_queries, fit_postmix, pool_heads

Weights = dict[str, np.ndarray]
"""Canonical name to array."""

Figures = dict[int, dict[str, Any]]
"""Layer to what was measured while it was made."""

# A difference in these changes neither a tensor nor what the model computes from it.
_FREE_KEYS = {"attention", "hidden_dropout", "initializer_range", "max_position_embeddings"}


def layers_to_convert(source: Model, target: Model) -> list[int]:
    """The layers whose grouped attention becomes virtual head attention; all others are the same in both.

    Raises:
        UserError: the models differ in more than that, or the head counts do not fit.
    """
    ours, theirs = (_compared(model) for model in (target, source))
    for key, value in ours.items():
        if value != theirs[key]:
            raise UserError(f"model.{key}={value}: the source has {theirs[key]}, and it is copied; use that")
    pairs = [(source.attention_of(layer), target.attention_of(layer)) for layer in range(target.num_hidden_layers)]
    layers = [layer for layer, (before, after) in enumerate(pairs) if before != after]
    for layer in layers:
        _check_pair(*pairs[layer])
    if not layers:
        raise UserError("model.attention: the source has the same; name the source as run.start_from of the recipe")
    return layers


def _compared(model: Model) -> dict[str, Any]:
    values = model.model_dump(mode="json", exclude=_FREE_KEYS)
    if values["sliding_window"] is not None:
        del values["sliding_window"]["attention"]
    return values


def _check_pair(source: Attention, target: Attention) -> None:
    if not isinstance(source, GroupedAttention):
        raise UserError(f"the source has attention of kind {source.kind}; a warm start takes grouped attention only")
    if not isinstance(target, VirtualHeadAttention):
        raise UserError(f"model.attention.kind={target.kind}: a warm start makes virtual heads; use vha")
    plain = folded_attention(target)
    if not isinstance(plain, GroupedAttention):
        raise UserError(
            "model.attention: a map that does not fold has no grouped counterpart to start from; use linear"
        )
    if target.projected_head_dim != target.head_dim:
        raise UserError(
            f"model.attention.physical_head_dim={target.physical_head_dim}: a warm start makes physical heads of "
            f"head_dim={target.head_dim}; remove the key"
        )
    if plain.output_gate != source.output_gate:
        theirs = "a gate: use before_postmix" if source.output_gate else "no gate: use none"
        raise UserError(f"model.attention.output_gate={target.output_gate}: the source has {theirs}")
    for key in ("num_attention_heads", "head_dim"):
        mine, theirs = plain.model_dump()[key], source.model_dump()[key]
        if mine != theirs:
            raise UserError(
                f"model.attention.{key}={mine}: the source has {theirs}, and virtual heads are its; use that"
            )
    for key in ("qk_norm", "attention_bias"):
        mine, theirs = (str(section.model_dump()[key]).lower() for section in (plain, source))
        if mine != theirs:
            raise UserError(f"model.attention.{key}={mine}: the source has {theirs}, and it is kept; use that")
    if source.num_key_value_heads % target.num_key_value_heads:
        raise UserError(
            f"model.attention.num_key_value_heads={target.num_key_value_heads}: must divide the "
            f"{source.num_key_value_heads} of the source, which are pooled; use a divisor"
        )


def read_weights(tensors: LogicalTensors, model: Model) -> Weights:
    """Every tensor of a checkpoint in float32.

    Raises:
        UserError: they are not exactly the model's, or a value is not finite.
    """
    expected, source = expected_tensors(model), str(tensors.path)
    account(tensors, expected, source)
    weights = {}
    for name, shape in expected.items():
        check_shape(name, tensors.entries[name].shape, shape, source)
        weights[name] = tensors.array(name).astype(np.float32)
        if not np.isfinite(weights[name]).all():
            raise UserError(f"{source}: {name} holds values that are not finite; use an earlier checkpoint")
    return weights


def convert(
    source: Mapping[str, np.ndarray],
    target: Model,
    layers: Sequence[int],
    seed: int,
    moments: Mapping[int, np.ndarray] | None,
) -> tuple[Weights, Figures]:
    """Pool key/value heads and factor query heads; Postmix is the identity, as in a fresh model of this seed.

    Args:
        moments: of each layer's inputs (`input_moments`), to fit the queries where the data are; None fits the
            weights.

    Returns:
        The target's weights, and of each converted layer `query_error` and `premix_distance`.
    """
    weights = dict(source)
    figures: Figures = {layer: {} for layer in layers}
    D = target.hidden_size
    for layer in layers:
        attention, prefix = _vha(target, layer), f"model.layers.{layer}.self_attn."
        K, H = attention.num_key_value_heads, attention.head_dim
        for part in ("k_proj", "v_proj"):
            weights |= _projection(prefix + part, pool_heads(_rows(source, prefix + part), H, K), D)
        if attention.premix != "none":
            q_proj = f"{prefix}q_proj"
            factors = factor_queries(_rows(source, q_proj), K, H, None if moments is None else moments[layer])
            weights |= _projection(q_proj, factors.q_proj_DX, D) | {prefix + PREMIX: factors.premix_KHH}
            figures[layer]["query_error"] = factors.error
            figures[layer]["premix_distance"] = premix_figures(factors.premix_KHH)["premix_distance"]
        if attention.postmix != "none":
            weights[prefix + POSTMIX_A] = _fresh_a(attention, seed, prefix)
            weights[prefix + POSTMIX_B] = np.zeros_like(weights[prefix + POSTMIX_A])
    return {name: weights[name].astype(np.float32) for name in expected_tensors(target)}, figures


def folded_layers(weights: Mapping[str, np.ndarray], target: Model, layers: Sequence[int]) -> Weights:
    """The attention of converted layers without Postmix and with Premix folded: tensors of a grouped model."""
    result = {}
    for layer in layers:
        prefix = f"model.layers.{layer}.self_attn."
        for name, array in weights.items():
            if name.startswith(prefix) and name.removeprefix(prefix) not in (PREMIX, POSTMIX_A, POSTMIX_B):
                result[name] = _exact(array)
        if prefix + PREMIX in weights:
            q_proj = f"{prefix}q_proj"
            virtual = fold_premix(_rows(weights, q_proj), weights[prefix + PREMIX])
            result |= _projection(q_proj, virtual, target.hidden_size)
    return result


def with_postmix(
    weights: Weights, target: Model, seed: int, moments: Mapping[int, OutputMoments]
) -> tuple[Weights, Figures]:
    """Fit the Postmix of each layer in `moments`; returns new weights, and `output_error` before and after it."""
    weights, figures = dict(weights), {}
    for layer, sums in moments.items():
        attention, prefix = _vha(target, layer), f"model.layers.{layer}.self_attn."
        assert attention.postmix_rank is not None, "checked with the recipe"
        o_proj = _exact(weights[f"{prefix}o_proj.weight"])
        factors = fit_postmix(sums, o_proj, attention.postmix_rank, _fresh_a(attention, seed, prefix))
        weights[prefix + POSTMIX_A] = factors.a_NR.astype(np.float32)
        weights[prefix + POSTMIX_B] = factors.b_NR.astype(np.float32)
        figures[layer] = {"output_error_without_postmix": factors.error_before, "output_error": factors.error}
    return weights, figures


def _vha(model: Model, layer: int) -> VirtualHeadAttention:
    attention = model.attention_of(layer)
    assert isinstance(attention, VirtualHeadAttention), "checked in layers_to_convert"
    return attention


def _fresh_a(attention: VirtualHeadAttention, seed: int, prefix: str) -> np.ndarray:
    """A as a fresh model of this seed has it."""
    assert attention.postmix_rank is not None, "checked with the recipe"
    shape = (attention.num_attention_heads, attention.postmix_rank)
    return Normal(attention.postmix_init_std).draw(generator_for(seed, prefix + POSTMIX_A), shape)


def _rows(weights: Mapping[str, np.ndarray], projection: str) -> np.ndarray:
    """A projection's weight, and under it its bias where it has one: the weights of an input that is always 1."""
    weight, bias = weights[f"{projection}.weight"], weights.get(f"{projection}.bias")
    return _exact(weight if bias is None else np.concatenate([weight, bias[None]]))


def _projection(name: str, rows: np.ndarray, hidden_size: int) -> Weights:
    """The tensors of a projection from what `_rows` made of them."""
    weight, biases = rows[:hidden_size], rows[hidden_size:]
    return {f"{name}.weight": weight} | {f"{name}.bias": bias for bias in biases}


def _exact(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)
