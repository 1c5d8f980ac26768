"""Models of the upstream programs with weights of trained size, and the configurations that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.sources.upstream.oracle import Array, Attention, Upstream

CORE = Attention(physical=3, kv=2, head_dim=6, rank=2)
FORK = Attention(physical=4, kv=2, head_dim=6, rank=3)

MODELS: dict[str, Upstream] = {
    "core": Upstream(form="core", attention=(CORE,) * 2),
    "core_untied": Upstream(form="core", attention=(CORE,) * 2, tied=False),
    "core_narrow_queries": Upstream(
        form="core", attention=(Attention(physical=3, kv=2, head_dim=6, physical_dim=4, rank=2),) * 2
    ),
    "core_wide_queries": Upstream(
        form="core", attention=(Attention(physical=3, kv=2, head_dim=6, physical_dim=8, rank=9),) * 2
    ),
    "core_biases": Upstream(
        form="core", attention=(Attention(physical=3, kv=2, head_dim=6, rank=2, bias=True),) * 2, value_scale=0.612
    ),
    "core_all_biases": Upstream(
        form="core",
        attention=(Attention(physical=3, kv=2, head_dim=6, rank=2, bias=True, output_bias=True, norm="none"),) * 2,
    ),
    "core_no_norm": Upstream(
        form="core", attention=(Attention(physical=3, kv=2, head_dim=6, rank=2, norm="none"),) * 2
    ),
    "core_one_group": Upstream(form="core", attention=(Attention(physical=3, kv=1, head_dim=6, rank=2),) * 2),
    "core_mixture": Upstream(form="core", attention=(CORE,) * 2, experts=4, intermediate=10, tied=False),
    "core_mixture_shared": Upstream(
        form="core", attention=(CORE,) * 2, experts=3, intermediate=12, shared=8, norm_topk=False
    ),
    "core_windows": Upstream(
        form="core",
        attention=(*(Attention(physical=2, kv=3, head_dim=4, rank=1, window=3),) * 2, CORE) * 2,
    ),
    "core_windows_alike": Upstream(
        form="core", attention=(Attention(physical=3, kv=2, head_dim=6, rank=2, window=3), CORE) * 2
    ),
    "fork": Upstream(form="fork", attention=(FORK,) * 2),
    "fork_no_premix": Upstream(
        form="fork", attention=(Attention(physical=8, kv=2, head_dim=6, rank=2, premix=False),) * 2
    ),
    "fork_no_postmix": Upstream(form="fork", attention=(Attention(physical=4, kv=2, head_dim=6),) * 2, tied=False),
    "fork_gate": Upstream(form="fork", attention=(Attention(physical=4, kv=2, head_dim=6, rank=3, gate="before"),) * 2),
    "fork_gate_no_premix": Upstream(
        form="fork", attention=(Attention(physical=4, kv=2, head_dim=6, rank=2, premix=False, gate="before"),) * 2
    ),
    "fork_biases": Upstream(form="fork", attention=(Attention(physical=4, kv=2, head_dim=6, rank=3, bias=True),) * 2),
}
"""All of these fold. The options that go with a model: `OPTIONS`."""

GATED_AFTER = {
    "core": Upstream(form="core", attention=(Attention(physical=3, kv=2, head_dim=6, rank=2, gate="after"),) * 2),
    "fork": Upstream(form="fork", attention=(Attention(physical=4, kv=2, head_dim=6, rank=3, gate="after"),) * 2),
}
NORM_FIRST = Upstream(form="fork", attention=(Attention(physical=4, kv=2, head_dim=6, rank=3, norm="before"),) * 2)


def options(model: Upstream) -> dict[str, Any]:
    """What has to be stated when it is opened."""
    first, found = model.attention[0], {}
    if model.form == "fork" and first.premix and first.norm != "none":
        found["norm_order"] = "premix-norm" if first.norm == "after" else "norm-premix"
    if model.form == "fork" and first.gate != "none":
        found["gate_order"] = "gate-postmix" if first.gate == "before" else "postmix-gate"
    return found


def weights(model: Upstream, seed: int = 0) -> dict[str, Array]:
    """Every tensor by its name in a training checkpoint, without `model.`; float64."""
    generator = np.random.default_rng(seed)

    def linear(*shape: int) -> Array:
        return generator.standard_normal(shape) / np.sqrt(shape[-2])

    def gain(size: int) -> Array:
        return np.exp(0.3 * generator.standard_normal(size))

    D, found = model.hidden, {}
    found["embedding.embed_tokens.weight"] = generator.standard_normal((model.vocab, D))
    for index, attention in enumerate(model.attention):
        layer = f"layers.{index}."
        found[layer + "input_layernorm.weight"] = gain(D)
        found |= {f"{layer}self_attn.{name}": w for name, w in _attention(model, attention, generator).items()}
        found[layer + "post_attention_layernorm.weight"] = gain(D)
        widths = {"mlp.": model.intermediate}
        if model.experts:
            found[layer + "mlp.gate.weight"] = generator.standard_normal((model.experts, D)) / np.sqrt(D)
            widths = {f"mlp.experts.{expert}.": model.intermediate for expert in range(model.experts)}
            widths |= {"mlp.shared_experts.": model.shared} if model.shared else {}
        for prefix, F in widths.items():
            found[f"{layer}{prefix}up_gate_proj.weight"] = linear(D, 2 * F)
            found[f"{layer}{prefix}down_proj.weight"] = linear(F, D)
    found["norm.weight"] = gain(D)
    if not model.tied:
        found["lm_head.weight"] = generator.standard_normal((model.vocab, D)) / np.sqrt(D)
    return found


def _attention(model: Upstream, attention: Attention, generator: np.random.Generator) -> dict[str, Array]:
    D, N, P, K = model.hidden, attention.heads, attention.physical, attention.kv
    H, Q = attention.head_dim, attention.width
    found, has_gate = {}, attention.gate != "none"
    widths = {"q_proj": P * Q, "k_proj": K * H, "v_proj": K * H} | ({"gate_proj": N * H} if has_gate else {})
    if model.form == "fork":
        widths = {"qkv_proj": (P + 2 * K + (N if has_gate else 0)) * H}
    for name, width in widths.items():
        found[f"{name}.weight"] = generator.standard_normal((D, width)) / np.sqrt(D)
        if attention.bias and name != "gate_proj":
            found[f"{name}.bias"] = generator.standard_normal(width)
    if attention.premix:
        found["vha_premix_weight"] = np.eye(Q, H) + generator.standard_normal((K, Q, H)) * 1.5 / np.sqrt(H)
    if attention.rank is not None:
        for name in ("vha_postmix_U", "vha_postmix_V"):
            found[name] = generator.standard_normal((N, attention.rank)) * (N * attention.rank) ** -0.25
    if attention.norm != "none":
        found |= {f"{name}_norm.weight": np.exp(0.3 * generator.standard_normal(H)) for name in "qk"}
    found["o_proj.weight"] = generator.standard_normal((N * H, D)) / np.sqrt(N * H)
    if attention.output_bias:
        found["o_proj.bias"] = generator.standard_normal(D)
    return found


def config(model: Upstream) -> dict[str, Any]:
    """The configuration that a training had."""
    full = next((a for a in reversed(model.attention) if a.window is None), model.attention[-1])
    values: dict[str, Any] = {
        "rms_norm_eps": model.eps,
        "rope_theta": model.theta,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": 128,
        "initializer_range": 0.01,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": len(model.attention),
        "num_attention_heads": full.heads if model.form == "core" else full.physical,
        "num_key_value_heads": full.kv,
        "head_dim": full.head_dim,
        "vha_postmix_rank": full.rank,
        "use_qk_norm": full.norm != "none",
        "attention_bias": full.bias,
        "hidden_act": "silu",
    }
    if model.form == "core":
        values |= {"use_vha_attention": True, "vha_q_lora_rank": full.width, "gated_attention": full.gate != "none"}
    else:
        values |= {
            "attn_type": "vha",
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vha_enable_premix": full.premix,
            "vha_enable_postmix": full.rank is not None,
        }
    if model.value_scale != 1.0:
        values["attention_value_scale"] = model.value_scale
    return values | _feed_forward(model) | _windows(model)


def _feed_forward(model: Upstream) -> dict[str, Any]:
    if not model.experts:
        return {"intermediate_size": model.intermediate}
    return {
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.intermediate,
        "norm_topk_prob": model.norm_topk,
        "scoring_func": "softmax",
        "n_shared_experts": 1 if model.shared else 0,
    }


def _windows(model: Upstream) -> dict[str, Any]:
    sliding = next((a for a in model.attention if a.window is not None), None)
    if sliding is None:
        return {}
    return {
        "sliding_window": sliding.window,
        "window_attn_skip_freq": [int(a.window is not None) for a in model.attention],
        "add_swa_attention_sink_bias": False,
        "swa_num_attention_heads": sliding.heads,
        "swa_num_key_value_heads": sliding.kv,
        "swa_head_dim": sliding.head_dim,
        "swa_vha_q_lora_rank": sliding.width,
        "swa_vha_postmix_rank": sliding.rank,
    }


def exported(tensors: Mapping[str, Array], model: Upstream) -> dict[str, Array]:
    """What the unfolded export in Hugging Face's layout makes of a core checkpoint's tensors."""
    found: dict[str, Array] = {}
    for name, tensor in tensors.items():
        in_mixture = model.experts and ".mlp." in name
        new = name.replace(".mlp.", ".block_sparse_moe.") if in_mixture else name
        new = "model." + new.replace("embedding.", "") if new != "lm_head.weight" else new
        gate, up, down = ("w1", "w3", "w2") if in_mixture else ("gate_proj", "up_proj", "down_proj")
        if name.endswith("up_gate_proj.weight"):
            half = tensor.shape[1] // 2
            found[new.replace("up_gate_proj", gate)] = tensor[:, :half].T
            found[new.replace("up_gate_proj", up)] = tensor[:, half:].T
        elif name.endswith("_proj.weight"):
            found[new.replace("down_proj", down)] = tensor.T
        else:
            found[new] = tensor
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}
