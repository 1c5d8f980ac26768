"""A Hugging Face config.json of a Qwen3, Qwen3-MoE or Llama model as our `model` section.

Two generations of the file say the same in other words: transformers 4 has `rope_theta`, `torch_dtype`, `num_experts`,
transformers 5 `rope_parameters`, `dtype`, and `num_local_experts` for the mixture; either may leave out a key that has
its class's default. Both are read, and a file that contradicts itself is refused. So is a value that this decoder has
no form of: the weights would load, and compute something else.

A default is taken only where both generations have the same: `_DEFAULTS`. Keys that say how many bytes or which ids
(`dtype`, `eos_token_id`, …) are no part of the model; the tensors and the tokenizer say them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vha_paddle.config import Model
from vha_paddle.config.check_model import check_model
from vha_paddle.config.model import MAX_LAYERS
from vha_paddle.errors import UserError

CONFIG_FILE = "config.json"

DENSE, MIXTURE, LLAMA = "qwen3", "qwen3_moe", "llama"
ARCHITECTURES = {DENSE: "Qwen3ForCausalLM", MIXTURE: "Qwen3MoeForCausalLM", LLAMA: "LlamaForCausalLM"}

_DEFAULTS: dict[str, dict[str, Any]] = {
    DENSE: {"head_dim": 128, "use_sliding_window": False},
    MIXTURE: {"norm_topk_prob": False, "router_aux_loss_coef": 1e-3},
    LLAMA: {"rope_theta": 10_000.0},
}
_DEFAULTS_OF_ALL: dict[str, Any] = {
    "attention_bias": False,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
COPIED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
)
"""Keys that config.json and the `model` section have alike."""
_EXPERT_KEYS = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")

# What the decoder here has no other form of; a key that is absent or null means the same.
_FIXED: dict[str, dict[str, Any]] = {
    DENSE: {},
    MIXTURE: {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    LLAMA: {"mlp_bias": False},
}
_FIXED_OF_ALL: dict[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
_REMEDIES = {
    "auto_map": "it names code of its own; only transformers' classes are read",
    "quantization_config": "its weights are quantized; take the model's unquantized release",
}
_PLAIN_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


def read_hf_model(directory: Path) -> Model:
    """The model section of a stock directory, exported here or released by others.

    Raises:
        UserError: there is no readable config.json, or it describes something that this decoder does not compute.
    """
    path = directory / CONFIG_FILE
    return hf_model(read_json(path), path)


def hf_model(values: Mapping[str, Any], path: Path) -> Model:
    """The model section of what a config.json holds; `path` is its place, for errors. Raises as `read_hf_model`."""
    values = {key: value for key, value in values.items() if value is not None}
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UserError(
            f"{path}: model_type={_shown(kind)}: must be one of {', '.join(ARCHITECTURES)}; no other can be read"
        )
    _refuse_other_forms(values, kind, path)
    values["rope_theta"] = _rope_theta(values, path)
    values = _DEFAULTS_OF_ALL | _DEFAULTS[kind] | {key: value for key, value in values.items() if value is not None}
    try:
        section = {key: values[key] for key in COPIED} | {
            "rope_theta": values["rope_theta"],
            "attention": _attention(values, kind, path),
        }
        section |= {"experts": _experts(values, path)} if kind == MIXTURE else _dense(values, kind, path)
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; add it as the model was trained") from None
    return _checked(section, path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        UserError: the file is absent, or holds none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a Hugging Face model directory") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object; give a Hugging Face model directory")
    return values


def _refuse_other_forms(values: Mapping[str, Any], kind: str, path: Path) -> None:
    for key, remedy in _REMEDIES.items():
        if values.get(key):
            raise UserError(f"{path}: {key}={_shown(values[key])}: {remedy}")
    architectures = values.get("architectures", [ARCHITECTURES[kind]])
    if architectures != [ARCHITECTURES[kind]]:
        raise UserError(
            f"{path}: architectures={_shown(architectures)}: only {ARCHITECTURES[kind]} has the tensors that are read"
        )
    for key, value in (_FIXED_OF_ALL | _FIXED[kind]).items():
        if values.get(key, value) != value:
            raise UserError(
                f"{path}: {key}={_shown(values[key])}: only {_shown(value)} can be read; the decoder here has no "
                "other form"
            )


def _rope_theta(values: Mapping[str, Any], path: Path) -> Any:
    """RoPE's base out of whichever keys have it; None where none has. Any scaling of positions is refused."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key, {})
        kinds = [rope.get("rope_type", "default"), rope.get("type", "default")] if isinstance(rope, dict) else []
        if kinds != ["default", "default"] or not set(rope) <= _PLAIN_ROPE or rope.get("partial_rotary_factor", 1) != 1:
            raise UserError(
                f"{path}: {key}={_shown(rope)}: only plain RoPE can be read; where the scaling serves longer texts "
                "than the model was trained on, remove it and lower max_position_embeddings to that length"
            )
    stated = {
        "rope_theta": values.get("rope_theta"),
        "rope_parameters.rope_theta": values.get("rope_parameters", {}).get("rope_theta"),
    }
    return _agreed(stated, path)


def _agreed(stated: Mapping[str, Any], path: Path) -> Any:
    """The value that several keys state, each in another generation's word."""
    found = {key: value for key, value in stated.items() if value is not None}
    if any(value != other for value, other in itertools.pairwise(found.values())):
        both = " and ".join(f"{key}={_shown(value)}" for key, value in found.items())
        raise UserError(f"{path}: {both}: must be one value; remove the wrong one")
    return next(iter(found.values()), None)


def _attention(values: Mapping[str, Any], kind: str, path: Path) -> dict[str, Any]:
    heads = _count(values, "num_attention_heads", path)
    kv_heads = values.get("num_key_value_heads") if kind == LLAMA else values["num_key_value_heads"]
    head_dim = values.get("head_dim")
    if head_dim is None:  # Llama and Qwen3-MoE
        head_dim = _count(values, "hidden_size", path) // heads
    return {
        "kind": "grouped",
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "qk_norm": kind != LLAMA,
        "attention_bias": values["attention_bias"],
    }


def _count(values: Mapping[str, Any], key: str, path: Path) -> int:
    """A value that is computed with before the section is checked."""
    value = values[key]
    if type(value) is not int or value < 0 or (value == 0 and key != "max_window_layers"):
        raise UserError(f"{path}: {key}={_shown(value)}: must be a positive integer; correct it")
    return value


def _experts(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    number = _agreed({key: values.get(key) for key in ("num_experts", "num_local_experts")}, path)
    if number is None:
        raise KeyError("num_experts")
    return {"num_experts": number} | {key: values[key] for key in _EXPERT_KEYS}


def _dense(values: Mapping[str, Any], kind: str, path: Path) -> dict[str, Any]:
    window = _sliding_window(values, path) if kind == DENSE else None
    return {"intermediate_size": values["intermediate_size"], "sliding_window": window}


def _sliding_window(values: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """The window, if the layers that have it repeat as `SlidingWindow` says."""
    num_layers = _count(values, "num_hidden_layers", path)
    if num_layers > MAX_LAYERS:
        return None  # `Model` refuses so many, and no list is made of them here
    layers = range(1, num_layers + 1)
    types = values.get("layer_types")
    if not isinstance(types, list | None):
        raise UserError(f"{path}: layer_types={_shown(types)}: must be a list; correct it")
    if types is None and values["use_sliding_window"]:
        first = _count(values, "max_window_layers", path)
        types = ["full" if layer <= first else "sliding" for layer in layers]
    types = ["full"] * len(layers) if types is None else [str(each).removesuffix("_attention") for each in types]
    if types == ["full"] * len(layers):
        return None
    full_every = types.index("full") + 1 if "full" in types else 0
    expected = ["sliding" if full_every and layer % full_every else "full" for layer in layers]
    if not values["use_sliding_window"] or full_every < 2 or types != expected:
        raise UserError(
            f"{path}: layer_types={_shown(types)} with use_sliding_window={_shown(values['use_sliding_window'])}: only "
            "one full layer after equally many sliding ones can be read; no other pattern is computed here"
        )
    return {"window": values["sliding_window"], "full_every": full_every}


def _checked(section: dict[str, Any], path: Path) -> Model:
    try:
        model = Model.model_validate(section)
        check_model(model)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key, value = fault["loc"][-1], fault["input"]
        raise UserError(f"{path}: {key}={_shown(value)}: {fault['msg']}; correct it") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return model


def _shown(value: Any) -> str:
    """A value as the file has it, cut to what fits into a line."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 120 else f"{text[:117]}..."
