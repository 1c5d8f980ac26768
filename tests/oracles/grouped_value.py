"""Grouped value attention (arXiv 2609.13285), forward and backward, with the content keys written out.

q = x W_Q                                          [B, S, N, H + R]: content, rotary
v = x W_V                                          [B, S, K, H]
k_n = [v_g M_n ; rope(x W_R)],  g = n // (N / K)   [B, S, N, H + R]
y_n = causal_attention([q_n ; rope(q_n^R)], k_n, v_g), scaled by 1 / sqrt(H + R)
out = flatten(y) W_O
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles import ops


@dataclass(frozen=True, kw_only=True)
class GroupedValueSpec:
    num_heads: int
    num_value_heads: int
    head_dim: int
    rotary: int
    theta: float = 1e4


def forward(
    x_BSD: np.ndarray, weights: Mapping[str, np.ndarray], spec: GroupedValueSpec
) -> tuple[np.ndarray, dict[str, Any]]:
    """The layer's output `[B, S, D]` and the cache for `backward`."""
    B, S, _ = x_BSD.shape
    N, K, H, R = spec.num_heads, spec.num_value_heads, spec.head_dim, spec.rotary
    angles = ops.rope_angles(S, R, spec.theta)
    q = (x_BSD @ weights["q_proj.weight"]).reshape(B, S, N, H + R)
    q_BSNE = np.concatenate([q[..., :H], ops.rope(q[..., H:], angles)], axis=-1)
    v_BSNH = np.repeat((x_BSD @ weights["v_proj.weight"]).reshape(B, S, K, H), N // K, axis=2)
    r_BS1R = ops.rope((x_BSD @ weights["k_rope_proj.weight"])[:, :, None], angles)
    content = np.einsum("bsni,nij->bsnj", v_BSNH, weights["key_map"])
    k_BSNE = np.concatenate([content, np.repeat(r_BS1R, N, axis=2)], axis=-1)
    y_BSNH, core = ops.causal_attention(q_BSNE, k_BSNE, v_BSNH)
    y = y_BSNH.reshape(B, S, N * H)
    cache = {"x": x_BSD, "weights": weights, "spec": spec, "angles": angles, "v": v_BSNH, "core": core, "y": y}
    return y @ weights["o_proj.weight"], cache


def backward(dout_BSD: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The gradients of the layer's input and of each of its weights."""
    weights, spec, x_BSD, angles = cache["weights"], cache["spec"], cache["x"], cache["angles"]
    B, S, _ = x_BSD.shape
    N, K, H = spec.num_heads, spec.num_value_heads, spec.head_dim
    dweights: dict[str, np.ndarray] = {}

    def linear(name: str, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        dweights[f"{name}.weight"] = np.einsum("bsi,bso->io", x, dy)
        return dy @ weights[f"{name}.weight"].T

    dy_BSNH = linear("o_proj", cache["y"], dout_BSD).reshape(B, S, N, H)
    dq_BSNE, dk_BSNE, dv_BSNH = ops.causal_attention_backward(dy_BSNH, cache["core"])
    dweights["key_map"] = np.einsum("bsni,bsnj->nij", cache["v"], dk_BSNE[..., :H])
    dv_BSNH = dv_BSNH + np.einsum("bsnj,nij->bsni", dk_BSNE[..., :H], weights["key_map"])
    dv_BSKH = dv_BSNH.reshape(B, S, K, N // K, H).sum(axis=3)
    dr_BSR = ops.rope(dk_BSNE[..., H:].sum(axis=2, keepdims=True), -angles)[:, :, 0]
    dq_BSNE = np.concatenate([dq_BSNE[..., :H], ops.rope(dq_BSNE[..., H:], -angles)], axis=-1)
    dx_BSD = linear("q_proj", x_BSD, dq_BSNE.reshape(B, S, -1))
    dx_BSD += linear("v_proj", x_BSD, dv_BSKH.reshape(B, S, -1))
    return dx_BSD + linear("k_rope_proj", x_BSD, dr_BSR), dweights
