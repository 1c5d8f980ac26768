"""Stock directories written with the safetensors library, and what transformers and the numpy oracles make of them."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import forward_spec
from tests.oracles import forward, latent, ops
from tests.oracles.moe import MoESpec, RouterMemory, moe_forward
from vha_paddle.config import LatentAttention, Model
from vha_paddle.export.config import SpecialTokens, hf_config
from vha_paddle.export.stock import Target, stock_target
from vha_paddle.fold import convert_state
from vha_paddle.names import to_hf

SPECIAL = SpecialTokens(eos_id=2, pad_id=3, vocab_size=320)
Arrays = Mapping[str, np.ndarray]


def hf_arrays(model: Model, weights: Arrays, target: Target) -> dict[str, np.ndarray]:
    """The tensors of a directory, float32."""
    state = convert_state(weights, model, target.model, np.float32, "test")
    # contiguous: safetensors' own writer writes a view as it lies, without a word
    return {
        there: np.ascontiguousarray(array) for name, ours in state for there, array in to_hf(name, ours, target.naming)
    }


def write_stock(directory: Path, model: Model, weights: Arrays) -> Target:
    """Write a float32 directory of the model's stock class."""
    target = stock_target(model, "test")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(target, "float32", SPECIAL)))
    save_file(hf_arrays(model, weights, target), directory / "model.safetensors", {"format": "pt"})
    return target


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """Refuse every warning and every line that transformers logs as one."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert records == []


def their_model(directory: Path) -> Any:
    """transformers' own model, after refusing every warning and every key that does not fit."""
    with silently():
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, output_loading_info=True, torch_dtype="auto", attn_implementation="eager"
        )
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model


def their_logits(directory: Path, tokens_BS: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return their_model(directory)(torch.tensor(tokens_BS)).logits.double().numpy()


def oracle_logits(model: Model, weights: Arrays, tokens_BS: np.ndarray) -> np.ndarray:
    """Of the model as it was trained, float64."""
    exact = {name: array.astype(np.float64) for name, array in weights.items()}
    if not isinstance(model.attention, LatentAttention):
        return forward.logits(exact, tokens_BS, forward_spec(model))
    return _latent_logits(model, model.attention, exact, tokens_BS)


def _latent_logits(model: Model, attention: LatentAttention, weights: Arrays, tokens_BS: np.ndarray) -> np.ndarray:
    spec = latent.LatentSpec(
        num_heads=attention.num_attention_heads,
        latent=attention.kv_lora_rank,
        content=attention.qk_nope_head_dim,
        rotary=attention.qk_rope_head_dim,
        value=attention.v_head_dim,
        query_latent=attention.q_lora_rank is not None,
        eps=model.rms_norm_eps,
        theta=model.rope_theta,
    )
    x_BSD = weights["model.embed_tokens.weight"][tokens_BS]
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}

        def part(module: str, own: Arrays = own) -> dict[str, np.ndarray]:
            return {
                name.removeprefix(f"{module}."): array for name, array in own.items() if name.startswith(f"{module}.")
            }

        normed, _ = ops.rms_norm(x_BSD, own["input_layernorm.weight"], model.rms_norm_eps)
        x_BSD = x_BSD + latent.forward(normed, part("self_attn"), spec)[0]
        normed, _ = ops.rms_norm(x_BSD, own["post_attention_layernorm.weight"], model.rms_norm_eps)
        if model.experts is None:
            mlp = part("mlp")
            names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
            x_BSD = x_BSD + ops.swiglu(normed, *(mlp[name] for name in names))[0]
        else:
            experts = MoESpec(
                num_experts=model.experts.num_experts,
                num_experts_per_tok=model.experts.num_experts_per_tok,
                norm_topk_prob=model.experts.norm_topk_prob,
            )
            x_BSD = x_BSD + moe_forward(normed, part("mlp"), experts, RouterMemory.fresh(experts))[0]
    normed, _ = ops.rms_norm(x_BSD, weights["model.norm.weight"], model.rms_norm_eps)
    head = weights["model.embed_tokens.weight"].T if model.tie_word_embeddings else weights["lm_head.weight"]
    return normed @ head
