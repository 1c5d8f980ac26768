"""A model described by command-line flags, as `tools/calculate.py` takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vha_paddle.counts.shapes import VOCAB_SIZE, model_section
from vha_paddle.errors import UserError

FLAGS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "intermediate-size": "intermediate_size",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
    "heads": "attention.num_attention_heads",
    "kv-heads": "attention.num_key_value_heads",
    "head-dim": "attention.head_dim",
    "premix": "attention.premix",
    "postmix": "attention.postmix",
    "postmix-rank": "attention.postmix_rank",
    "physical-head-dim": "attention.physical_head_dim",
    "premix-init": "attention.premix_init",
    "output-gate": "attention.output_gate",
    "kv-lora-rank": "attention.kv_lora_rank",
    "q-lora-rank": "attention.q_lora_rank",
    "qk-nope-head-dim": "attention.qk_nope_head_dim",
    "qk-rope-head-dim": "attention.qk_rope_head_dim",
    "v-head-dim": "attention.v_head_dim",
    "groups": "attention.num_groups",
    "compose-rank": "attention.compose_rank",
    "experts": "experts.num_experts",
    "experts-per-token": "experts.num_experts_per_tok",
    "expert-size": "experts.moe_intermediate_size",
    "shared-expert-size": "experts.shared_expert_intermediate_size",
    "window": "sliding_window.window",
    "full-every": "sliding_window.full_every",
}
"""Each flag, and the key of the `model` section that it sets."""


def value_of(text: str) -> int | bool | str:
    """What is typed behind a flag: a number, true or false, or a word."""
    if text.lstrip("-").isdigit():
        return int(text)
    return {"true": True, "false": False}.get(text, text)


def tokens_of(flag: str, text: str) -> int:
    """A number of tokens, as in `32768` or `32K` (of 1024).

    Raises:
        UserError: it is none.
    """
    number = re.fullmatch(r"([0-9]+)([Kk]?)", text)
    if number is None:
        raise UserError(f"--{flag} {text}: must be a number of tokens such as 32768 or 32K")
    return int(number[1]) * (1024 if number[2] else 1)


def described(
    typed: Mapping[str, Any], *, kind: str | None = None, shape: str = "", attention: str = ""
) -> dict[str, Any]:
    """The `model` section of a kind or of a named shape, with the keys of the `typed` flags set.

    Raises:
        UserError: a shape or an attention without that name.
    """
    if kind is None:
        model = model_section(shape, attention)
    else:
        model = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": True, "attention": {"kind": kind}}
    for flag, value in typed.items():
        section, _, key = FLAGS[flag].rpartition(".")
        if section:
            model[section] = model.get(section, {}) | {key: value}
        else:
            model[key] = value
    return model
