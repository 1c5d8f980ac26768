"""Which stock Hugging Face class computes a model once it is folded, and why some models have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vha_paddle.config import Attention, GroupedAttention, MixtureOfExperts, Model, VirtualHeadAttention
from vha_paddle.counts import folded
from vha_paddle.errors import UserError


@dataclass(frozen=True)
class StockClass:
    """A class of transformers, as config.json names it."""

    architecture: str
    model_type: str


DENSE = StockClass("Qwen3ForCausalLM", "qwen3")
MIXTURE = StockClass("Qwen3MoeForCausalLM", "qwen3_moe")


def stock_class(model: Model, source: str) -> StockClass:
    """The class that serves the recipe's model.

    Args:
        model: as it was trained, before the fold.
        source: what an error calls the place that the model came from.

    Raises:
        UserError: there is none; the line names the key, the reason and what does work.
    """
    for obstacle in _obstacles(model):
        raise UserError(f"{source}: {obstacle}; such a checkpoint is used as it is (tools/evaluate.py)")
    return DENSE if model.experts is None else MIXTURE


def served_attention(model: Model) -> GroupedAttention:
    """The attention of every layer of a recipe's model that has a stock class, after the fold."""
    (attention,) = folded(model).attentions
    assert isinstance(attention, GroupedAttention), "anything else has no stock class"
    return attention


def _obstacles(model: Model) -> Iterator[str]:
    sliding = model.sliding_window
    sections = {"model.attention": model.attention}
    if sliding is not None and sliding.attention is not None:
        sections["model.sliding_window.attention"] = sliding.attention
    for where, attention in sections.items():
        yield from _attention_obstacles(attention, where)
    if model.experts is not None:
        yield from _expert_obstacles(model.experts)
        if sliding is not None:
            yield (
                "model.sliding_window with model.experts: Qwen3-MoE has one window for all layers, and here some see "
                "all; a window exports with intermediate_size, experts without a window"
            )
    counts = {where: _heads(attention) for where, attention in sections.items()}
    if len(set(counts.values())) > 1:
        full, other = counts.values()
        yield (
            f"model.sliding_window.attention: sliding layers have {other}, the others {full}, and Qwen3 has one head "
            "count for all layers; give both the same num_attention_heads, num_key_value_heads and head_dim"
        )


def _attention_obstacles(attention: Attention, where: str) -> Iterator[str]:
    if attention.kind == "mla":
        yield f"{where}.kind=mla: has nothing to fold, and an export to DeepSeek's classes is not there yet"
    elif not isinstance(attention, GroupedAttention | VirtualHeadAttention):
        yield f"{where}.kind={attention.kind}: has nothing to fold, and no stock class computes it"
    elif attention.output_gate not in (False, "none"):
        value = str(attention.output_gate).lower()
        yield f"{where}.output_gate={value}: no stock Qwen3 has a gate on the heads' outputs"


def _expert_obstacles(experts: MixtureOfExperts) -> Iterator[str]:
    width = experts.shared_expert_intermediate_size
    if width:
        yield (
            f"model.experts.shared_expert_intermediate_size={width}: Qwen3-MoE has no shared expert, and Qwen2-MoE's "
            "has a gate of its own"
        )
    if experts.router_bias_update_rate:
        yield (
            f"model.experts.router_bias_update_rate={experts.router_bias_update_rate}: experts were chosen with a "
            "bias, which Qwen3-MoE's router does not have"
        )
    if experts.capacity_factor is not None:
        yield (
            f"model.experts.capacity_factor={experts.capacity_factor}: tokens pass by a full expert, and no expert of "
            "Qwen3-MoE is ever full"
        )


def _heads(attention: Attention) -> str:
    """Counts that a fold leaves as they are."""
    assert isinstance(attention, GroupedAttention | VirtualHeadAttention), "anything else is refused before"
    return (
        f"{attention.num_attention_heads} query heads on {attention.num_key_value_heads} KV heads of width "
        f"{attention.head_dim}"
    )
