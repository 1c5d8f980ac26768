"""The forward pass of every decoder that folds or has a stock class: layers that differ, windows, gates, experts.

    q = x W_Q + b_Q, Premix if there is one, rms_norm and rope; y = attention(q, k, v), of a window if there is one
    M (gate * y) W_O + b_O  or  (gate * (M y)) W_O + b_O,   gate = sigmoid(x W_G), M = I + B A^T; k, v have biases too
    what is absent is left out
    experts: p = softmax(x W_router), the k largest, divided by their sum or not; sum_e p_e swiglu_e(x)

Which maps, norms, biases, gates and experts a layer has is read from its weights; `LayerSpec` says what weights do not.
Weights have canonical names and are `[in, out]`; experts are `[E, in, out]`. Letters as in `attention.py`; Q physical
head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tests.oracles import ops
from tests.oracles.decoder import EMBEDDING, FINAL_NORM, HEAD, MLP_PARTS

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    window: int | None = None
    gate_after_postmix: bool = False


@dataclass(frozen=True, kw_only=True)
class ForwardSpec:
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    rope_theta: float
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True


def within(weights: Arrays, prefix: str) -> dict[str, np.ndarray]:
    """The weights under a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def attention(x_BSD: np.ndarray, weights: Arrays, layer: LayerSpec, spec: ForwardSpec) -> np.ndarray:
    """The output `[B, S, D]` of one layer; its weights have short names."""
    B, S, _ = x_BSD.shape
    N, K, H = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    bias = {part: weights.get(f"{part}_proj.bias", 0.0) for part in "qkvo"}
    q_BSX = x_BSD @ weights["q_proj.weight"] + bias["q"]
    if "premix" in weights:
        q_BSPQ = q_BSX.reshape(B, S, N // K, -1)
        groups = [q_BSPQ @ weights["premix"][group] for group in range(K)]  # P virtual heads each
        q_BSNH = np.concatenate(groups, axis=2)
    else:
        q_BSNH = q_BSX.reshape(B, S, N, H)
    k_BSKH, v_BSKH = ((x_BSD @ weights[f"{part}_proj.weight"] + bias[part]).reshape(B, S, K, H) for part in "kv")
    angles = ops.rope_angles(S, H, spec.rope_theta)
    if "q_norm.weight" in weights:
        q_BSNH, _ = ops.rms_norm(q_BSNH, weights["q_norm.weight"], spec.rms_norm_eps)
        k_BSKH, _ = ops.rms_norm(k_BSKH, weights["k_norm.weight"], spec.rms_norm_eps)
    y_BSNH, _ = ops.causal_attention(ops.rope(q_BSNH, angles), ops.rope(k_BSKH, angles), v_BSKH, layer.window)

    gate_BSNH = np.ones_like(y_BSNH)
    if "g_proj.weight" in weights:
        gate_BSNH = ops.sigmoid(x_BSD @ weights["g_proj.weight"]).reshape(B, S, N, H)
    mix_NN = np.eye(N)
    if "postmix_a" in weights:
        mix_NN = mix_NN + weights["postmix_b"] @ weights["postmix_a"].T
    if layer.gate_after_postmix:
        y_BSNH = gate_BSNH * np.einsum("mn,bsnh->bsmh", mix_NN, y_BSNH)
    else:
        y_BSNH = np.einsum("mn,bsnh->bsmh", mix_NN, gate_BSNH * y_BSNH)
    return y_BSNH.reshape(B, S, N * H) @ weights["o_proj.weight"] + bias["o"]


def mixture(x_BSD: np.ndarray, weights: Arrays, spec: ForwardSpec) -> np.ndarray:
    """The output of one layer's experts, token by token; its weights have the names after `mlp.`."""
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    scores_TE = x_TD @ weights["gate.weight"]
    p_TE = np.exp(scores_TE - scores_TE.max(axis=-1, keepdims=True))
    p_TE /= p_TE.sum(axis=-1, keepdims=True)
    out_TD = np.zeros_like(x_TD)
    for token, p_E in enumerate(p_TE):
        chosen = np.argsort(-p_E)[: spec.num_experts_per_tok]
        share = p_E[chosen] / (p_E[chosen].sum() if spec.norm_topk_prob else 1.0)
        for expert, factor in zip(chosen, share, strict=True):
            parts = (weights[f"experts.{part}_proj"][expert] for part in ("gate", "up", "down"))
            out_TD[token] += factor * ops.swiglu(x_TD[token], *parts)[0]
    return out_TD.reshape(x_BSD.shape)


def logits(weights: Arrays, tokens_BS: np.ndarray, spec: ForwardSpec) -> np.ndarray:
    """Logits `[B, S, V]`; the head is the embedding where there is no other."""
    x_BSD = weights[EMBEDDING][tokens_BS]
    for index, layer in enumerate(spec.layers):
        block = within(weights, f"model.layers.{index}.")
        normed_BSD, _ = ops.rms_norm(x_BSD, block["input_layernorm.weight"], spec.rms_norm_eps)
        x_BSD = x_BSD + attention(normed_BSD, within(block, "self_attn."), layer, spec)
        normed_BSD, _ = ops.rms_norm(x_BSD, block["post_attention_layernorm.weight"], spec.rms_norm_eps)
        mlp = within(block, "mlp.")
        if spec.num_experts_per_tok:
            x_BSD = x_BSD + mixture(normed_BSD, mlp, spec)
        else:
            x_BSD = x_BSD + ops.swiglu(normed_BSD, *(mlp[part] for part in MLP_PARTS))[0]
    normed_BSD, _ = ops.rms_norm(x_BSD, weights[FINAL_NORM], spec.rms_norm_eps)
    return normed_BSD @ weights[HEAD] if HEAD in weights else normed_BSD @ weights[EMBEDDING].T
