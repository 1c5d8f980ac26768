"""What PaddleFleet's core and its research fork compute, in float64 numpy, on the tensors as they store them.

Written from a description of those programs; imports nothing of vha_paddle. Names are those of a training checkpoint
without `model.`; linear weights are `[in, out]`. Each layer:

    core    q = x W_q + b_q, P heads of Q channels; q[k * P + p] = q_p W_premix[k]; norm of q and k; v times a factor;
            half-split RoPE; causal attention, virtual head n on key/value head n // P; y' = y + V (U^T y) over the
            heads; y' times sigmoid(x W_gate); W_o
    fork    qkv is one weight, by key/value group: P/K query heads, their gates, the key, the value; the norm before
            Premix in one generation and after it in another, the gate before Postmix

Letters: B batch, S sequence, D hidden, P physical heads, K key/value heads, N virtual heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class Attention:
    physical: int
    kv: int
    head_dim: int
    physical_dim: int | None = None
    rank: int | None = None
    premix: bool = True
    norm: Literal["after", "before", "none"] = "after"
    """Of queries, as seen from Premix."""
    gate: Literal["none", "before", "after"] = "none"
    """As seen from Postmix."""
    bias: bool = False
    output_bias: bool = False
    window: int | None = None

    @property
    def heads(self) -> int:
        return self.physical * self.kv if self.premix else self.physical

    @property
    def width(self) -> int:
        return self.physical_dim or self.head_dim


@dataclass(frozen=True, kw_only=True)
class Upstream:
    form: Literal["core", "fork"]
    attention: tuple[Attention, ...]
    """Of each layer."""
    hidden: int = 24
    vocab: int = 40
    intermediate: int = 20
    experts: int = 0
    top_k: int = 2
    norm_topk: bool = True
    shared: int = 0
    tied: bool = True
    eps: float = 1e-2
    theta: float = 100.0
    value_scale: float = 1.0


def logits(tensors: Tensors, model: Upstream, tokens_BS: Array) -> Array:
    """`[B, S, V]`."""
    x = tensors["embedding.embed_tokens.weight"][tokens_BS]
    for index, attention in enumerate(model.attention):
        layer = f"layers.{index}."
        normed = rms_norm(x, tensors[layer + "input_layernorm.weight"], model.eps)
        x = x + attend(normed, _below(tensors, layer + "self_attn."), attention, model)
        normed = rms_norm(x, tensors[layer + "post_attention_layernorm.weight"], model.eps)
        x = x + (mixture if model.experts else swiglu)(normed, _below(tensors, layer + "mlp."), model)
    x = rms_norm(x, tensors["norm.weight"], model.eps)
    head = "embedding.embed_tokens.weight" if model.tied else "lm_head.weight"
    return x @ tensors[head].T


def attend(x: Array, tensors: Tensors, attention: Attention, model: Upstream) -> Array:
    """The attention layer's output."""
    B, S, _ = x.shape
    N, K, H = attention.heads, attention.kv, attention.head_dim
    q, gate, k, v = (_fork_projections if model.form == "fork" else _core_projections)(x, tensors, attention)
    v = v * model.value_scale
    if attention.norm == "before":
        q = rms_norm(q, tensors["q_norm.weight"], model.eps)
    if attention.premix:
        q = np.concatenate([q @ tensors["vha_premix_weight"][group] for group in range(K)], axis=2)
    if attention.norm == "after":
        q = rms_norm(q, tensors["q_norm.weight"], model.eps)
    if attention.norm != "none":
        k = rms_norm(k, tensors["k_norm.weight"], model.eps)
    q, k = rope(q, model.theta), rope(k, model.theta)
    y = np.empty((B, S, N, H))
    for n in range(N):
        group = n // (N // K)
        scores = q[:, :, n] @ k[:, :, group].swapaxes(1, 2) / np.sqrt(H)
        y[:, :, n] = softmax(np.where(_seen(S, attention.window), scores, -np.inf)) @ v[:, :, group]
    if attention.gate == "before":
        y = y * sigmoid(gate)
    if attention.rank is not None:
        mixed = np.einsum("nr,bsnh->bsrh", tensors["vha_postmix_U"], y)
        y = y + np.einsum("nr,bsrh->bsnh", tensors["vha_postmix_V"], mixed)
    if attention.gate == "after":
        y = y * sigmoid(gate)
    out = y.reshape(B, S, N * H) @ tensors["o_proj.weight"]
    return out + tensors["o_proj.bias"] if attention.output_bias else out


def _core_projections(x: Array, tensors: Tensors, attention: Attention) -> tuple[Array, Array | None, Array, Array]:
    B, S, _ = x.shape

    def heads(name: str, width: int) -> Array:
        projected = x @ tensors[f"{name}_proj.weight"]
        if attention.bias:
            projected = projected + tensors[f"{name}_proj.bias"]
        return projected.reshape(B, S, -1, width)

    H = attention.head_dim
    gate = (x @ tensors["gate_proj.weight"]).reshape(B, S, -1, H) if attention.gate != "none" else None
    return heads("q", attention.width), gate, heads("k", H), heads("v", H)


def _fork_projections(x: Array, tensors: Tensors, attention: Attention) -> tuple[Array, Array | None, Array, Array]:
    """One product; group after group its query heads, gate heads, key head and value head."""
    B, S, _ = x.shape
    fused = x @ tensors["qkv_proj.weight"]
    if attention.bias:
        fused = fused + tensors["qkv_proj.bias"]
    heads = list(np.moveaxis(fused.reshape(B, S, -1, attention.head_dim), 2, 0))
    q, gate, k, v = [], [], [], []
    for _ in range(attention.kv):
        q += [heads.pop(0) for _ in range(attention.physical // attention.kv)]
        if attention.gate != "none":
            gate += [heads.pop(0) for _ in range(attention.heads // attention.kv)]
        k.append(heads.pop(0))
        v.append(heads.pop(0))
    assert not heads
    return np.stack(q, 2), np.stack(gate, 2) if gate else None, np.stack(k, 2), np.stack(v, 2)


def swiglu(x: Array, tensors: Tensors, model: Upstream) -> Array:
    """Columns of the fused weight are gate, then up."""
    gate, up = np.split(x @ tensors["up_gate_proj.weight"], 2, axis=-1)
    return (gate * sigmoid(gate) * up) @ tensors["down_proj.weight"]


def mixture(x: Array, tensors: Tensors, model: Upstream) -> Array:
    """Softmax over all experts, the largest few, their weights made to sum to 1 if so asked; every token by itself."""
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape[:2]):
        token = x[index]
        weights = softmax(token @ tensors["gate.weight"].T)
        chosen = np.argsort(-weights)[: model.top_k]
        total = weights[chosen].sum() if model.norm_topk else 1.0
        for expert in chosen:
            value = swiglu(token, _below(tensors, f"experts.{expert}."), model)
            out[index] += weights[expert] / total * value
    if model.shared:
        out = out + swiglu(x, _below(tensors, "shared_experts."), model)
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x: Array, theta: float) -> Array:
    """Channels j and j + H/2 turn together."""
    S, H = x.shape[1], x.shape[-1]
    turned = np.empty_like(x)
    for position in range(S):
        for j in range(H // 2):
            angle = position * theta ** (-2 * j / H)
            first, second = x[:, position, :, j], x[:, position, :, j + H // 2]
            turned[:, position, :, j] = first * np.cos(angle) - second * np.sin(angle)
            turned[:, position, :, j + H // 2] = second * np.cos(angle) + first * np.sin(angle)
    return turned


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _seen(S: int, window: int | None) -> Array:
    query, key = np.arange(S)[:, None], np.arange(S)[None]
    return (key <= query) & (query - key < (window or S))


def _below(tensors: Tensors, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
