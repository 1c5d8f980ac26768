"""What the configuration says of sizes and parts, against what the tensors say: they must be of one model."""

from __future__ import annotations

from collections.abc import Sequence

from vha_paddle.sources.upstream.config import UpstreamConfig
from vha_paddle.sources.upstream.heads import Heads
from vha_paddle.sources.upstream.kinds import Kind

_TENSORS = "the tensors"


def check_agreement(config: UpstreamConfig, kind: Kind, heads: Sequence[Heads], slides: Sequence[bool]) -> None:
    """Compare every layer.

    Raises:
        UserError: they differ; the line names the key and both values.
    """
    for layer, (found, slide) in enumerate(zip(heads, slides, strict=True)):
        where = f"the tensors of layer {layer}"
        _check_head_counts(config, kind, found, slide, where)
        values = {
            "num_key_value_heads": found.num_kv,
            "head_dim": found.head_dim,
            "v_head_dim": found.head_dim,
            "vha_postmix_rank": found.rank,
            "vha_q_lora_rank": found.physical_head_dim,
        }
        for key, value in values.items():
            if value is not None:
                config.agree(_of_layer(config, key, slide), value, where)
        config.agree("rotary_dim", found.head_dim, where)
        for key, present in (
            ("vha_enable_premix", found.has_premix),
            ("vha_enable_postmix", found.rank is not None),
            ("use_qk_norm", found.has_qk_norm),
            (kind.gate_key, found.has_gate),
        ):
            config.agree(key, present, where)
        biases = [config.flag(key) for key in ("attention_bias", "use_bias")]
        if any(said is not None for said in biases) and any(biases) != found.has_bias:
            key = "use_bias" if biases[1] else "attention_bias"
            raise config.refusal(key, f"{where} say otherwise; the configuration belongs to another model")


def _check_head_counts(config: UpstreamConfig, kind: Kind, found: Heads, slide: bool, where: str) -> None:
    """`num_attention_heads` counts virtual heads in the core and physical ones in the fork."""
    key = _of_layer(config, "num_attention_heads", slide)
    physical, virtual = found.num_physical, found.num_virtual
    wanted, other = (virtual, physical) if kind.counts == "virtual" else (physical, virtual)
    if wanted != other and config.get(key) == other:
        name = "physical" if kind.counts == "virtual" else "virtual"
        raise config.refusal(
            key,
            f"that is the count of {name} heads in {where}; the configurations of {kind.name} count the {kind.counts} "
            f"ones, {wanted}; write that",
        )
    config.agree(key, wanted, where)


def _of_layer(config: UpstreamConfig, key: str, slide: bool) -> str:
    """The key that holds for a layer: that of sliding layers, where they have one of their own."""
    own = f"swa_{key}"
    return own if slide and config.get(own) is not None else key
