"""Multi-matrix factorization attention (arXiv 2412.19255) in the form of Step3, forward and backward.

q = rms_norm(x W_QA) W_QB                      [B, S, N, C]
k = x W_K,  v = x W_V                          [B, S, 1, C]: one head for all queries
y = causal_attention(rope(q), rope(k), v),  out = flatten(y) W_O
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles import ops


@dataclass(frozen=True, kw_only=True)
class FactorizedSpec:
    num_heads: int
    head_dim: int
    eps: float = 1e-6
    theta: float = 1e4


def forward(
    x_BSD: np.ndarray, weights: Mapping[str, np.ndarray], spec: FactorizedSpec
) -> tuple[np.ndarray, dict[str, Any]]:
    """The layer's output `[B, S, D]` and the cache for `backward`."""
    B, S, _ = x_BSD.shape
    latent, norm = ops.rms_norm(x_BSD @ weights["q_a_proj.weight"], weights["q_a_layernorm.weight"], spec.eps)
    angles = ops.rope_angles(S, spec.head_dim, spec.theta)
    q_BSNC = ops.rope((latent @ weights["q_b_proj.weight"]).reshape(B, S, spec.num_heads, spec.head_dim), angles)
    k_BS1C = ops.rope((x_BSD @ weights["k_proj.weight"])[:, :, None], angles)
    y_BSNC, core = ops.causal_attention(q_BSNC, k_BS1C, (x_BSD @ weights["v_proj.weight"])[:, :, None])
    y = y_BSNC.reshape(B, S, -1)
    cache = {"x": x_BSD, "weights": weights, "spec": spec, "latent": latent, "norm": norm}
    return y @ weights["o_proj.weight"], cache | {"angles": angles, "core": core, "y": y}


def backward(dout_BSD: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The gradients of the layer's input and of each of its weights."""
    weights, spec, x_BSD, angles = cache["weights"], cache["spec"], cache["x"], cache["angles"]
    B, S, _ = x_BSD.shape
    dweights: dict[str, np.ndarray] = {}

    def linear(name: str, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        dweights[f"{name}.weight"] = np.einsum("bsi,bso->io", x, dy)
        return dy @ weights[f"{name}.weight"].T

    dy_BSNC = linear("o_proj", cache["y"], dout_BSD).reshape(B, S, spec.num_heads, spec.head_dim)
    dq_BSNC, dk_BS1C, dv_BS1C = ops.causal_attention_backward(dy_BSNC, cache["core"])
    dlatent = linear("q_b_proj", cache["latent"], ops.rope(dq_BSNC, -angles).reshape(B, S, -1))
    dlatent, dweights["q_a_layernorm.weight"] = ops.rms_norm_backward(dlatent, cache["norm"])
    dx_BSD = linear("q_a_proj", x_BSD, dlatent)
    dx_BSD += linear("k_proj", x_BSD, ops.rope(dk_BS1C, -angles)[:, :, 0])
    return dx_BSD + linear("v_proj", x_BSD, dv_BS1C[:, :, 0]), dweights
