"""Rules of the `model` section. Each breach names the key, the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from vha_paddle.config.attention import (
    Attention,
    ComposedAttention,
    GroupedAttention,
    GroupedValueAttention,
    VirtualHeadAttention,
)
from vha_paddle.config.model import MixtureOfExperts, Model
from vha_paddle.errors import UserError

_MOST_EXPERTS = 1 << 17  # of all layers: their tensors are listed by name, as many as a file claims


def check_model(model: Model) -> None:
    """Raise `UserError` for the first rule that the section breaks."""
    for section, attention in model.attention_sections.items():
        check_attention(attention, section)
    _check_sliding_window(model)
    if (model.intermediate_size is None) == (model.experts is None):
        state = "null" if model.experts is None else str(model.intermediate_size)
        raise UserError(
            f"model.intermediate_size={state}: a model has either intermediate_size (an MLP in every layer) or "
            "experts (a mixture in every layer); give one of the two"
        )
    if model.experts is not None:
        if model.num_hidden_layers * model.experts.num_experts > _MOST_EXPERTS:
            raise UserError(
                f"model.experts.num_experts={model.experts.num_experts}: times model.num_hidden_layers="
                f"{model.num_hidden_layers} it must not exceed {_MOST_EXPERTS}; use fewer"
            )
        _check_experts(model.experts)


def check_attention(attention: Attention, where: str) -> None:
    """Raise `UserError` for the first rule that an attention section breaks; `where` is what errors call it."""
    if attention.rope_dim % 2:
        key = "head_dim" if "head_dim" in type(attention).model_fields else "qk_rope_head_dim"
        key = "qk_rope_head_dim" if "qk_rope_head_dim" in type(attention).model_fields else key
        raise UserError(
            f"{where}.{key}={attention.rope_dim}: RoPE turns pairs of channels, so it must be even; "
            f"use {attention.rope_dim + 1}"
        )
    if isinstance(attention, GroupedAttention | VirtualHeadAttention | GroupedValueAttention):
        heads, groups = attention.num_attention_heads, attention.num_key_value_heads
        if heads % groups:
            raise UserError(
                f"{where}.num_attention_heads={heads}: must be a multiple of {where}.num_key_value_heads={groups}; "
                f"use {multiples(heads, groups)}"
            )
    if isinstance(attention, ComposedAttention) and attention.num_attention_heads % attention.num_groups:
        raise UserError(
            f"{where}.num_groups={attention.num_groups}: must divide {where}.num_attention_heads="
            f"{attention.num_attention_heads}; use a divisor"
        )
    if isinstance(attention, VirtualHeadAttention):
        for rule in _broken_map_rules(attention, where):
            raise UserError(rule)


def _broken_map_rules(attention: VirtualHeadAttention, where: str) -> Iterator[str]:
    """Keys of VHA that contradict each other or would have no effect."""
    if attention.premix == "none" and attention.postmix == "none":
        yield f"{where}.premix=none: with postmix=none nothing of VHA is left; use kind=grouped"
    yield from _broken_premix_rules(attention, where)
    if attention.postmix == "none":
        for setting in _changed(attention, "postmix_rank", "postmix_init_std", "postmix_space"):
            yield f"{where}.{setting}: has no effect with postmix=none; remove the key"
        if attention.output_gate == "after_postmix":
            yield f"{where}.output_gate=after_postmix: there is no Postmix with postmix=none; use before_postmix"
    elif attention.postmix_rank is None:
        yield (
            f"{where}.postmix_rank=null: required with postmix={attention.postmix}; the paper uses "
            f"num_attention_heads / 4, {max(1, attention.num_attention_heads // 4)}"
        )
    if attention.postmix_space == "weight" and attention.postmix == "silu":
        yield f"{where}.postmix_space=weight: SiLU lies between Postmix's factors (postmix=silu); use activation"
    if attention.postmix_space == "weight" and attention.output_gate == "after_postmix":
        yield f"{where}.postmix_space=weight: a gate lies between (output_gate=after_postmix); use activation"


def _broken_premix_rules(attention: VirtualHeadAttention, where: str) -> Iterator[str]:
    if attention.premix == "none":
        for setting in _changed(attention, "physical_head_dim", "premix_init", "premix_init_noise"):
            yield f"{where}.{setting}: has no effect with premix=none; remove the key"
    elif attention.projected_head_dim != attention.head_dim and attention.premix_init != "orthogonal":
        yield (
            f"{where}.premix_init={attention.premix_init}: there is no identity between physical_head_dim="
            f"{attention.physical_head_dim} and head_dim={attention.head_dim}; use orthogonal"
        )
    if attention.premix_init == "orthogonal":
        for setting in _changed(attention, "premix_init_noise"):
            yield f"{where}.{setting}: has no effect with premix_init=orthogonal; remove the key"


def _changed(attention: VirtualHeadAttention, *keys: str) -> list[str]:
    """Those of `keys` that do not have their default value, as `key=value`."""
    values, defaults = attention.model_dump(), VirtualHeadAttention.model_fields
    return [f"{key}={values[key]}" for key in keys if values[key] != defaults[key].default]


def _check_sliding_window(model: Model) -> None:
    sliding = model.sliding_window
    if sliding is None:
        return
    if not isinstance(model.attention, GroupedAttention | VirtualHeadAttention):
        raise UserError(
            f"model.sliding_window: is for attention of kind grouped or vha, and model.attention.kind="
            f"{model.attention.kind}; remove the section"
        )
    if sliding.full_every > model.num_hidden_layers:
        raise UserError(
            f"model.sliding_window.full_every={sliding.full_every}: exceeds model.num_hidden_layers="
            f"{model.num_hidden_layers}, so that no layer would see all of the sequence; lower it"
        )


def _check_experts(experts: MixtureOfExperts) -> None:
    if experts.num_experts_per_tok > experts.num_experts:
        raise UserError(
            f"model.experts.num_experts_per_tok={experts.num_experts_per_tok}: exceeds "
            f"model.experts.num_experts={experts.num_experts}; lower it"
        )
    if experts.router_bias_update_rate and experts.num_experts_per_tok == experts.num_experts:
        raise UserError(
            f"model.experts.router_bias_update_rate={experts.router_bias_update_rate}: has no effect where every token "
            f"is sent to all experts (num_experts_per_tok={experts.num_experts_per_tok}); remove the key"
        )
    all_fit = experts.num_experts / experts.num_experts_per_tok  # a token goes to an expert once
    if experts.capacity_factor is not None and experts.capacity_factor >= all_fit:
        raise UserError(
            f"model.experts.capacity_factor={experts.capacity_factor}: has no effect from num_experts / "
            f"num_experts_per_tok = {all_fit:g} on, where an expert takes a whole sequence; use less or remove the key"
        )


def multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on either side of `value`, to use in its place."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
