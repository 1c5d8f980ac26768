"""Grouped-query attention and Virtual Head Attention with QK-norm and RoPE, forward and backward.

    q = x W_Q                                        [B, S, P, H], or [B, S, N, H] without Premix
    q_{g,i} = q_i W_premix[g],   n = g*P + i         [B, S, N, H]
    q, k = rope(rms_norm(q)), rope(rms_norm(k))
    y = causal_attention(q, k, v)                    head n reads key/value head n // (N/K)
    y' = M y,   M = I + B A^T                        over the head axis
    out = flatten(y') W_O

Written from arXiv 2610.17959. Letters: B batch, S sequence, D hidden, P physical heads, K key/value heads
(groups), N = P*K query heads, H head dim, R postmix rank (r in an einsum).
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

    q_BSPH = (x_BSD @ weights["q_proj.weight"]).reshape(B, S, P, H)
    k_BSKH = (x_BSD @ weights["k_proj.weight"]).reshape(B, S, K, H)
    v_BSKH = (x_BSD @ weights["v_proj.weight"]).reshape(B, S, K, H)
    cache["q_physical"] = q_BSPH

    if spec.premix:
        q_BSKPH = np.einsum("bspi,kij->bskpj", q_BSPH, weights["premix"])
        q_BSNH = q_BSKPH.reshape(B, S, N, H)
    else:
        q_BSNH = q_BSPH

    q_BSNH, cache["q_norm"] = ops.rms_norm(q_BSNH, weights["q_norm.weight"], spec.rms_norm_eps)
    k_BSKH, cache["k_norm"] = ops.rms_norm(k_BSKH, weights["k_norm.weight"], spec.rms_norm_eps)
    angles = cache["angles"] = ops.rope_angles(S, H, spec.rope_theta)
    q_BSNH, k_BSKH = ops.rope(q_BSNH, angles), ops.rope(k_BSKH, angles)

    y_BSNH, cache["core"] = ops.causal_attention(q_BSNH, k_BSKH, v_BSKH)
    cache["y"] = y_BSNH

    if spec.postmix_rank:
        M = np.eye(N) + np.einsum("mr,nr->mn", weights["postmix_b"], weights["postmix_a"])
        y_BSNH = np.einsum("mn,bsnh->bsmh", M, y_BSNH)
        cache["M"] = M
    cache["y_mixed"] = y_BSNH
    return y_BSNH.reshape(B, S, N * H) @ weights["o_proj.weight"], cache


def attention_backward(dout_BSD: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The gradients of the layer's input and of each of its weights."""
    weights, spec, x_BSD = cache["weights"], cache["spec"], cache["x"]
    B, S, D = x_BSD.shape
    N, K, H = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    dweights: dict[str, np.ndarray] = {}

    y_mixed_BSX = cache["y_mixed"].reshape(B, S, N * H)
    dweights["o_proj.weight"] = np.einsum("bsx,bsd->xd", y_mixed_BSX, dout_BSD)
    dy_BSNH = (dout_BSD @ weights["o_proj.weight"].T).reshape(B, S, N, H)

    if spec.postmix_rank:
        dM = np.einsum("bsmh,bsnh->mn", dy_BSNH, cache["y"])
        dweights["postmix_b"] = np.einsum("mn,nr->mr", dM, weights["postmix_a"])
        dweights["postmix_a"] = np.einsum("mn,mr->nr", dM, weights["postmix_b"])
        dy_BSNH = np.einsum("mn,bsmh->bsnh", cache["M"], dy_BSNH)

    dq_BSNH, dk_BSKH, dv_BSKH = ops.causal_attention_backward(dy_BSNH, cache["core"])
    dq_BSNH, dk_BSKH = ops.rope(dq_BSNH, -cache["angles"]), ops.rope(dk_BSKH, -cache["angles"])
    dq_BSNH, dweights["q_norm.weight"] = ops.rms_norm_backward(dq_BSNH, cache["q_norm"])
    dk_BSKH, dweights["k_norm.weight"] = ops.rms_norm_backward(dk_BSKH, cache["k_norm"])

    if spec.premix:
        dq_BSKPH = dq_BSNH.reshape(B, S, K, N // K, H)
        dweights["premix"] = np.einsum("bspi,bskpj->kij", cache["q_physical"], dq_BSKPH)
        dq_BSPH = np.einsum("bskpj,kij->bspi", dq_BSKPH, weights["premix"])
    else:
        dq_BSPH = dq_BSNH

    dx_BSD = np.zeros_like(x_BSD)
    for name, dheads in (("q", dq_BSPH), ("k", dk_BSKH), ("v", dv_BSKH)):
        dprojected_BSX = dheads.reshape(B, S, -1)
        dweights[f"{name}_proj.weight"] = np.einsum("bsd,bsx->dx", x_BSD, dprojected_BSX)
        dx_BSD = dx_BSD + dprojected_BSX @ weights[f"{name}_proj.weight"].T
    return dx_BSD, dweights
