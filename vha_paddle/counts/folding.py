"""The model that is served: a VHA layer after its fold, as far as it folds.

    what is there                         Premix    Postmix    what is left
    linear maps, no gate or gate before   folds     folds      grouped attention of N heads (gated, if it was)
    gate after Postmix                    folds     stays      Postmix alone: premix=none
    SiLU in Premix                        stays     folds      Premix alone: postmix=none
    SiLU in Postmix                       folds     stays      Postmix alone: premix=none

Every other kind is served as it is trained.
"""

from __future__ import annotations

from typing import Any

from vha_paddle.config import Attention, GroupedAttention, Model, VirtualHeadAttention


def folded(model: Model) -> Model:
    """The model that is served: every VHA layer folded as far as it folds; a model without VHA is itself."""
    updates: dict[str, Any] = {"attention": folded_attention(model.attention)}
    sliding = model.sliding_window
    if sliding is not None and sliding.attention is not None:
        updates["sliding_window"] = sliding.model_copy(update={"attention": folded_attention(sliding.attention)})
    return model.model_copy(update=updates)


def folded_attention(attention: Attention) -> Attention:
    """One layer's attention as it is served."""
    if not isinstance(attention, VirtualHeadAttention):
        return attention
    stays = what_stays(attention)
    if not stays:
        return GroupedAttention(
            kind="grouped",
            num_attention_heads=attention.num_attention_heads,
            num_key_value_heads=attention.num_key_value_heads,
            head_dim=attention.head_dim,
            qk_norm=attention.qk_norm,
            attention_bias=attention.attention_bias,
            output_gate=attention.output_gate != "none",
        )
    left = attention.model_dump()
    if "premix" not in stays:
        _reset(left, "premix", "physical_head_dim", "premix_init", "premix_init_noise")
    if "postmix" not in stays:
        _reset(left, "postmix", "postmix_rank", "postmix_init_std", "postmix_space")
    return VirtualHeadAttention.model_validate(left)


def what_stays(attention: VirtualHeadAttention) -> dict[str, str]:
    """The maps that do not fold, each with the reason."""
    stays = {}
    if attention.premix == "silu":
        stays["premix"] = "SiLU lies between Premix and the attention core"
    if attention.postmix == "silu":
        stays["postmix"] = "SiLU lies between Postmix's two factors"
    elif attention.postmix == "linear" and attention.output_gate == "after_postmix":
        stays["postmix"] = "the gate lies between Postmix and W_O"
    return stays


def _reset(values: dict[str, Any], map_name: str, *keys: str) -> None:
    """Take a map away, and give the keys that describe it their defaults."""
    values[map_name] = "none"
    for key in keys:
        values[key] = VirtualHeadAttention.model_fields[key].default
