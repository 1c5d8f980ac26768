"""Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434), forward and backward, keys and values expanded.

    q = x W_Q, or rms_norm(x W_QA) W_QB                [B, S, N, A + R]: content, rotary
    c, r = split(x W_KVA);  c = rms_norm(c)            [B, S, C] and one rotary key [B, S, R]
    k_n, v_n = split(c W_KVB)                          [B, S, N, A] and [B, S, N, V]
    y_n = causal_attention([q_n ; rope(q_n^R)], [k_n ; rope(r)], v_n), scaled by 1 / sqrt(A + R)
    out = flatten(y) W_O

Letters: B batch, S sequence, D hidden, N heads, A content width, R rotary width, V value width, C latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles import ops


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    num_heads: int
    latent: int
    content: int
    rotary: int
    value: int
    query_latent: bool
    """Whether the queries are made from a latent of their own."""
    eps: float = 1e-6
    theta: float = 1e4


def forward(
    x_BSD: np.ndarray, weights: Mapping[str, np.ndarray], spec: LatentSpec
) -> tuple[np.ndarray, dict[str, Any]]:
    """The layer's output `[B, S, D]` and the cache for `backward`."""
    B, S, _ = x_BSD.shape
    N, A, R, C = spec.num_heads, spec.content, spec.rotary, spec.latent
    cache: dict[str, Any] = {"x": x_BSD, "weights": weights, "spec": spec}
    if spec.query_latent:
        cache["q_latent"], cache["q_norm"] = ops.rms_norm(
            x_BSD @ weights["q_a_proj.weight"], weights["q_a_layernorm.weight"], spec.eps
        )
        q = cache["q_latent"] @ weights["q_b_proj.weight"]
    else:
        q = x_BSD @ weights["q_proj.weight"]
    q_BSNH = q.reshape(B, S, N, A + R)
    down = x_BSD @ weights["kv_a_proj_with_mqa.weight"]
    c_BSC, cache["kv_norm"] = ops.rms_norm(down[..., :C], weights["kv_a_layernorm.weight"], spec.eps)
    expanded = (c_BSC @ weights["kv_b_proj.weight"]).reshape(B, S, N, A + spec.value)
    angles = ops.rope_angles(S, R, spec.theta)
    r_BS1R = ops.rope(down[..., C:].reshape(B, S, 1, R), angles)
    q_BSNH = np.concatenate([q_BSNH[..., :A], ops.rope(q_BSNH[..., A:], angles)], axis=-1)
    k_BSNH = np.concatenate([expanded[..., :A], np.repeat(r_BS1R, N, axis=2)], axis=-1)
    y_BSNV, cache["core"] = ops.causal_attention(q_BSNH, k_BSNH, expanded[..., A:])
    cache |= {"latent": c_BSC, "angles": angles, "y": y_BSNV.reshape(B, S, -1)}
    return cache["y"] @ weights["o_proj.weight"], cache


def backward(dout_BSD: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The gradients of the layer's input and of each of its weights."""
    weights, spec, x_BSD, angles = cache["weights"], cache["spec"], cache["x"], cache["angles"]
    B, S, _ = x_BSD.shape
    N, A, R = spec.num_heads, spec.content, spec.rotary
    dweights: dict[str, np.ndarray] = {}

    def linear(name: str, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        dweights[f"{name}.weight"] = np.einsum("bsi,bso->io", x, dy)
        return dy @ weights[f"{name}.weight"].T

    dy_BSNV = linear("o_proj", cache["y"], dout_BSD).reshape(B, S, N, spec.value)
    dq_BSNH, dk_BSNH, dv_BSNV = ops.causal_attention_backward(dy_BSNV, cache["core"])
    dr_BS1R = ops.rope(dk_BSNH[..., A:].sum(axis=2, keepdims=True), -angles)
    dexpanded = np.concatenate([dk_BSNH[..., :A], dv_BSNV], axis=-1).reshape(B, S, -1)
    dc_BSC = linear("kv_b_proj", cache["latent"], dexpanded)
    dc_BSC, dweights["kv_a_layernorm.weight"] = ops.rms_norm_backward(dc_BSC, cache["kv_norm"])
    ddown = np.concatenate([dc_BSC, dr_BS1R.reshape(B, S, R)], axis=-1)
    dx_BSD = linear("kv_a_proj_with_mqa", x_BSD, ddown)
    dq_BSNH = np.concatenate([dq_BSNH[..., :A], ops.rope(dq_BSNH[..., A:], -angles)], axis=-1)
    dq = dq_BSNH.reshape(B, S, -1)
    if not spec.query_latent:
        return dx_BSD + linear("q_proj", x_BSD, dq), dweights
    dlatent, dweights["q_a_layernorm.weight"] = ops.rms_norm_backward(
        linear("q_b_proj", cache["q_latent"], dq), cache["q_norm"]
    )
    return dx_BSD + linear("q_a_proj", x_BSD, dlatent), dweights
