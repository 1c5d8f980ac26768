"""A mixture of experts as in Qwen3-MoE, forward and hand-derived backward: every expert runs on every token.

    l = x W_gate,  p = softmax(l)                      chosen: the k largest of p + bias
    w_e = p_e / sum of the chosen p, or p_e            0 for the others, and for what exceeds the capacity
    y = sum_e w_e swiglu_e(x)  +  swiglu_shared(x)
    added to the loss:  aux E sum_e f_e mean(p_e)  +  z mean(logsumexp(l)^2)          f is given

Letters: B batch, S sequence, D hidden, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles import ops

PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The constants of a mixture; a shared expert is there if its weights are."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0
    bias_rate: float = 0.0
    capacity_factor: float | None = None


@dataclass
class RouterMemory:
    """What one router knows from the step before, and the copies it sends to each expert in this one."""

    share_E: np.ndarray
    bias_E: np.ndarray
    counts_E: np.ndarray

    @classmethod
    def fresh(cls, spec: MoESpec) -> RouterMemory:
        E = spec.num_experts
        return cls(np.full(E, 1 / E), np.zeros(E), np.zeros(E, np.int64))

    def after_step(self, spec: MoESpec) -> RouterMemory:
        """f is the share of each expert; the bias of those above the mean falls, and the biases' mean is taken off."""
        direction = np.where(self.counts_E > self.counts_E.mean(), -1.0, np.where(
            self.counts_E < self.counts_E.mean(), 1.0, 0.0))  # fmt: skip
        bias = self.bias_E + spec.bias_rate * direction
        return RouterMemory(self.counts_E / self.counts_E.sum(), bias - bias.mean(), np.zeros_like(self.counts_E))


def moe_forward(
    x_BSD: np.ndarray, weights: Mapping[str, np.ndarray], spec: MoESpec, memory: RouterMemory
) -> tuple[np.ndarray, dict[str, Any]]:
    """The layer's output and the cache for `moe_backward`; sets `memory.counts_E`. Weights have short names."""
    E, k = spec.num_experts, spec.num_experts_per_tok
    l_BSE = x_BSD @ weights["gate.weight"]
    lse_BS1 = np.log(np.exp(l_BSE).sum(-1, keepdims=True))
    p_BSE = np.exp(l_BSE - lse_BS1)
    ranks_BSE = np.argsort(np.argsort(-(p_BSE + memory.bias_E), axis=-1), axis=-1)
    chosen_BSE = ranks_BSE < k
    memory.counts_E = chosen_BSE.sum((0, 1))
    total_BS1 = (p_BSE * chosen_BSE).sum(-1, keepdims=True) if spec.norm_topk_prob else np.ones_like(lse_BS1)
    kept_BSE = chosen_BSE
    if spec.capacity_factor is not None:
        capacity = math.ceil(spec.capacity_factor * x_BSD.shape[1] * k / E)
        kept_BSE = chosen_BSE & (np.cumsum(chosen_BSE, axis=1) <= capacity)
    w_BSE = p_BSE / total_BS1 * kept_BSE

    y_BSD, outputs, caches = np.zeros_like(x_BSD), [], []
    for e in range(E):
        output, cache = ops.swiglu(x_BSD, *(weights[f"experts.{part}"][e] for part in PARTS))
        y_BSD = y_BSD + w_BSE[..., e : e + 1] * output
        outputs.append(output)
        caches.append(cache)
    shared = None
    if "shared_expert.gate_proj.weight" in weights:
        output, shared = ops.swiglu(x_BSD, *(weights[f"shared_expert.{part}.weight"] for part in PARTS))
        y_BSD = y_BSD + output
    cache = {
        "x": x_BSD, "gate": weights["gate.weight"], "p": p_BSE, "lse": lse_BS1, "chosen": chosen_BSE, "kept": kept_BSE,
        "total": total_BS1, "w": w_BSE, "outputs": outputs, "experts": caches, "shared": shared, "spec": spec,
        "share": memory.share_E,
    }  # fmt: skip
    return y_BSD, cache


def balance_losses(cache: Mapping[str, Any]) -> tuple[float, float]:
    """The two losses of a layer, with their coefficients."""
    spec: MoESpec = cache["spec"]
    aux = spec.aux_coefficient * spec.num_experts * (cache["share"] * cache["p"].mean((0, 1))).sum()
    return float(aux), float(spec.z_coefficient * np.square(cache["lse"]).mean())


def moe_backward(dy_BSD: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Gradients of the input and the weights, those of the balancing losses included.

    With n = sum of the chosen p: dp_j of a chosen j is (dw_j - sum_i dw_i p_i / n) / n, the sum over the kept.
    """
    spec: MoESpec = cache["spec"]
    p_BSE, chosen_BSE, kept_BSE, total_BS1 = (cache[name] for name in ("p", "chosen", "kept", "total"))
    num_tokens = p_BSE.shape[0] * p_BSE.shape[1]
    grads: dict[str, np.ndarray] = {}
    dx_BSD, stacked = np.zeros_like(cache["x"]), []
    for e, expert in enumerate(cache["experts"]):
        dx, *dweights = ops.swiglu_backward(cache["w"][..., e : e + 1] * dy_BSD, expert)
        dx_BSD += dx
        stacked.append(dweights)
    for part, gradients in zip(PARTS, zip(*stacked, strict=True), strict=True):
        grads[f"experts.{part}"] = np.stack(gradients)
    if cache["shared"] is not None:
        dx, *dweights = ops.swiglu_backward(dy_BSD, cache["shared"])
        dx_BSD += dx
        grads |= {f"shared_expert.{part}.weight": grad for part, grad in zip(PARTS, dweights, strict=True)}

    dw_BSE = np.stack([(dy_BSD * output).sum(-1) for output in cache["outputs"]], axis=-1) * kept_BSE
    dp_BSE = dw_BSE / total_BS1
    if spec.norm_topk_prob:
        dp_BSE = dp_BSE - chosen_BSE * (dw_BSE * p_BSE).sum(-1, keepdims=True) / total_BS1**2
    dp_BSE = dp_BSE + spec.aux_coefficient * spec.num_experts * cache["share"] / num_tokens
    dl_BSE = p_BSE * (dp_BSE - (p_BSE * dp_BSE).sum(-1, keepdims=True))
    dl_BSE = dl_BSE + spec.z_coefficient * 2 * cache["lse"] * p_BSE / num_tokens
    grads["gate.weight"] = np.einsum("bsd,bse->de", cache["x"], dl_BSE)
    return dx_BSD + dl_BSE @ cache["gate"].T, grads
