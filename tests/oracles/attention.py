"""Grouped-query attention and Virtual Head Attention with QK-norm and RoPE, forward and backward.

    q = x W_Q + b_Q                                  [B, S, P, Q], or [B, S, N, H] without Premix
    q_{g,i} = q_i W_premix[g],   n = g*P + i         [B, S, N, H]; with SiLU: silu of this
    q, k = rope(rms_norm(q)), rope(rms_norm(k))
    y = causal_attention(q, k, v)                    head n reads key/value head n // (N/K); or through a window
    y = y * sigmoid(x W_gate)                        with a gate before Postmix
    y' = y + B z,   z = A^T y                        over the head axis; with SiLU: y + B silu(z)
    y' = y' * sigmoid(x W_gate)                      with a gate after Postmix
    out = flatten(y') W_O + b_O

k and v are x W_K + b_K and x W_V + b_V. The biases may be absent, and so may the two norms.
Written from arXiv 2610.17959. Letters: B batch, S sequence, D hidden, P physical heads, Q their width, K key/value
heads (groups), N = P*K query heads, H head dim, R postmix rank (r in an einsum).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.oracles import ops
from tests.oracles.spec import OracleSpec


def attention_forward(
    x_BSD: np.ndarray, weights: Mapping[str, np.ndarray], spec: OracleSpec
) -> tuple[np.ndarray, dict[str, Any]]:
    """The layer's output `[B, S, D]` and the cache for `attention_backward`. Weights have short names."""
    B, S, D = x_BSD.shape
    N, K, H, P = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.num_projected_heads
    cache: dict[str, Any] = {"x": x_BSD, "weights": weights, "spec": spec}

    biases = {part: weights[f"{part}_proj.bias"] if spec.attention_bias else 0.0 for part in "qkvo"}
    q_BSPQ = (x_BSD @ weights["q_proj.weight"] + biases["q"]).reshape(B, S, P, spec.projected_head_dim)
    k_BSKH = (x_BSD @ weights["k_proj.weight"] + biases["k"]).reshape(B, S, K, H)
    v_BSKH = (x_BSD @ weights["v_proj.weight"] + biases["v"]).reshape(B, S, K, H)
    cache["q_physical"] = q_BSPQ

    q_BSNH = q_BSPQ
    if spec.premix:
        q_BSKPH = np.einsum("bspi,kij->bskpj", q_BSPQ, weights["premix"])
        q_BSNH = cache["premixed"] = q_BSKPH.reshape(B, S, N, H)
        if spec.premix_silu:
            q_BSNH = ops.silu(q_BSNH)

    if spec.qk_norm:
        q_BSNH, cache["q_norm"] = ops.rms_norm(q_BSNH, weights["q_norm.weight"], spec.rms_norm_eps)
        k_BSKH, cache["k_norm"] = ops.rms_norm(k_BSKH, weights["k_norm.weight"], spec.rms_norm_eps)
    angles = cache["angles"] = ops.rope_angles(S, H, spec.rope_theta)
    q_BSNH, k_BSKH = ops.rope(q_BSNH, angles), ops.rope(k_BSKH, angles)
    y_BSNH, cache["core"] = ops.causal_attention(q_BSNH, k_BSKH, v_BSKH, spec.window)

    if spec.gate != "none":
        cache["gate"] = ops.sigmoid(x_BSD @ weights["g_proj.weight"]).reshape(B, S, N, H)
    if spec.gate == "before_postmix":
        y_BSNH, cache["ungated"] = y_BSNH * cache["gate"], y_BSNH
    if spec.postmix_rank:
        z_BSRH = np.einsum("nr,bsnh->bsrh", weights["postmix_a"], y_BSNH)
        activated_BSRH = ops.silu(z_BSRH) if spec.postmix_silu else z_BSRH
        cache |= {"y": y_BSNH, "z": z_BSRH, "activated": activated_BSRH}
        y_BSNH = y_BSNH + np.einsum("nr,bsrh->bsnh", weights["postmix_b"], activated_BSRH)
    if spec.gate == "after_postmix":
        y_BSNH, cache["ungated"] = y_BSNH * cache["gate"], y_BSNH
    cache["heads"] = y_BSNH
    return y_BSNH.reshape(B, S, N * H) @ weights["o_proj.weight"] + biases["o"], cache


def attention_backward(dout_BSD: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The gradients of the layer's input and of each of its weights."""
    weights, spec, x_BSD = cache["weights"], cache["spec"], cache["x"]
    B, S, D = x_BSD.shape
    N, K, H = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    dweights: dict[str, np.ndarray] = {}
    dprojected: dict[str, np.ndarray] = {}

    heads_BSX = cache["heads"].reshape(B, S, N * H)
    dweights["o_proj.weight"] = np.einsum("bsx,bsd->xd", heads_BSX, dout_BSD)
    if spec.attention_bias:
        dweights["o_proj.bias"] = dout_BSD.sum(axis=(0, 1))
    dy_BSNH = (dout_BSD @ weights["o_proj.weight"].T).reshape(B, S, N, H)

    if spec.gate == "after_postmix":
        dy_BSNH, dprojected["g"] = _gate_backward(dy_BSNH, cache)
    if spec.postmix_rank:
        dweights["postmix_b"] = np.einsum("bsnh,bsrh->nr", dy_BSNH, cache["activated"])
        dz_BSRH = np.einsum("nr,bsnh->bsrh", weights["postmix_b"], dy_BSNH)
        if spec.postmix_silu:
            dz_BSRH = dz_BSRH * ops.silu_slope(cache["z"])
        dweights["postmix_a"] = np.einsum("bsnh,bsrh->nr", cache["y"], dz_BSRH)
        dy_BSNH = dy_BSNH + np.einsum("nr,bsrh->bsnh", weights["postmix_a"], dz_BSRH)
    if spec.gate == "before_postmix":
        dy_BSNH, dprojected["g"] = _gate_backward(dy_BSNH, cache)

    dq_BSNH, dk_BSKH, dprojected["v"] = ops.causal_attention_backward(dy_BSNH, cache["core"])
    dq_BSNH, dk_BSKH = ops.rope(dq_BSNH, -cache["angles"]), ops.rope(dk_BSKH, -cache["angles"])
    if spec.qk_norm:
        dq_BSNH, dweights["q_norm.weight"] = ops.rms_norm_backward(dq_BSNH, cache["q_norm"])
        dk_BSKH, dweights["k_norm.weight"] = ops.rms_norm_backward(dk_BSKH, cache["k_norm"])

    dprojected["k"], dprojected["q"] = dk_BSKH, dq_BSNH
    if spec.premix:
        if spec.premix_silu:
            dq_BSNH = dq_BSNH * ops.silu_slope(cache["premixed"])
        dq_BSKPH = dq_BSNH.reshape(B, S, K, N // K, H)
        dweights["premix"] = np.einsum("bspi,bskpj->kij", cache["q_physical"], dq_BSKPH)
        dprojected["q"] = np.einsum("bskpj,kij->bspi", dq_BSKPH, weights["premix"])

    dx_BSD = np.zeros_like(x_BSD)
    for name, dheads in dprojected.items():
        dprojected_BSX = dheads.reshape(B, S, -1)
        dweights[f"{name}_proj.weight"] = np.einsum("bsd,bsx->dx", x_BSD, dprojected_BSX)
        if spec.attention_bias and name != "g":
            dweights[f"{name}_proj.bias"] = dprojected_BSX.sum(axis=(0, 1))
        dx_BSD = dx_BSD + dprojected_BSX @ weights[f"{name}_proj.weight"].T
    return dx_BSD, dweights


def _gate_backward(dgated_BSNH: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """For y * s with s = sigmoid(x W_gate): dy = s dgated, and d(x W_gate) = s (1 - s) y dgated."""
    s = cache["gate"]
    return s * dgated_BSNH, s * (1.0 - s) * cache["ungated"] * dgated_BSNH
