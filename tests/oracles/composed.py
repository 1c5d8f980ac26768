"""Dynamically composable multi-head attention (DCFormer, arXiv 2405.08553), forward and backward.

    q, k, v = x W_Q, x W_K, x W_V;  q, k = rope(rms_norm(q)), rope(rms_norm(k))      [B, S, N, H]
    A_n = q_n k_n^T / sqrt(H)                                                        [B, N, S, T]
    W = softmax(mask(compose_pre(A)));  y = compose_post(W) v;  out = flatten(y) W_O

Within a group of M heads, compose takes A to

    A'_n[s, t] = A_n[s, t] + sum_m A_m[s, t] C[m, n]
               + sum_r (sum_m A_m[s, t] a[s, r, m]) b[s, r, n] + A_n[s, t] d[s, n]        from the query's token
               + sum_r (sum_m A_m[s, t] a[t, r, m]) b[t, r, n] + A_n[s, t] d[t, n]        and the key's

with factors and diagonals of its own before (pre) and after (post) softmax and for each side:

    a, b = split(gelu(x W_compose) F),  a = a / rms_m(a),  d = tanh(x W_diagonal)

Index letters: b batch, s query, t key, g group, m and n heads of a group in and out, r rank, c the four uses
(pre query, pre key, post query, post key).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles import ops

PROJECTIONS = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class ComposedSpec:
    num_heads: int
    head_dim: int
    num_groups: int
    rank: int
    eps: float = 1e-6
    theta: float = 1e4

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_groups


def gelu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x Phi(x), Phi the normal distribution function, and its derivative Phi(x) + x phi(x)."""
    distribution = 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
    return x * distribution, distribution + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def forward(
    x_BSD: np.ndarray, weights: Mapping[str, np.ndarray], spec: ComposedSpec
) -> tuple[np.ndarray, dict[str, Any]]:
    """The layer's output `[B, S, D]` and the cache for `backward`."""
    B, S, _ = x_BSD.shape
    N, H, G, M = spec.num_heads, spec.head_dim, spec.num_groups, spec.group_size
    cache: dict[str, Any] = {"x": x_BSD, "weights": weights, "spec": spec}
    q, k, v = ((x_BSD @ weights[f"{name}_proj.weight"]).reshape(B, S, N, H) for name in PROJECTIONS)
    angles = cache["angles"] = ops.rope_angles(S, H, spec.theta)
    q, cache["q_norm"] = ops.rms_norm(q, weights["q_norm.weight"], spec.eps)
    k, cache["k_norm"] = ops.rms_norm(k, weights["k_norm.weight"], spec.eps)
    q, k, v = (x.reshape(B, S, G, M, H) for x in (ops.rope(q, angles), ops.rope(k, angles), v))

    hidden, cache["gelu_slope"] = gelu((x_BSD @ weights["compose_proj.weight"]).reshape(B, S, G, 4, -1))
    factors = np.einsum("bsgci,gcij->bsgcj", hidden, weights["compose_factors"]).reshape(B, S, G, 4, 2, spec.rank, M)
    first, cache["a_norm"] = ops.rms_norm(factors[..., 0, :, :], np.ones(M), spec.eps)
    diagonal = np.tanh((x_BSD @ weights["diagonal_proj.weight"]).reshape(B, S, G, 4, M))
    uses = [(first[:, :, :, c], factors[:, :, :, c, 1], diagonal[:, :, :, c]) for c in range(4)]

    scores = np.einsum("bsgmh,btgmh->bgmst", q, k) / np.sqrt(H)
    composed, cache["pre"] = compose(scores, weights["pre_compose"], uses[0], uses[1])
    composed = np.where(np.tril(np.ones((S, S), bool)), composed, -np.inf)
    probabilities = np.exp(composed - composed.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    mixed, cache["post"] = compose(probabilities, weights["post_compose"], uses[2], uses[3])
    y = np.einsum("bgmst,btgmh->bsgmh", mixed, v).reshape(B, S, N * H)
    cache |= {"q": q, "k": k, "v": v, "hidden": hidden, "diagonal": diagonal}
    cache |= {"probabilities": probabilities, "mixed": mixed, "y": y}
    return y @ weights["o_proj.weight"], cache


def compose(scores: np.ndarray, static: np.ndarray, query: tuple, key: tuple) -> tuple[np.ndarray, tuple]:
    """A' of the module's equation; `query` and `key` hold a, b `[b, s, g, r, m]` and d `[b, s, g, m]` each."""
    total = scores + np.einsum("bgmst,gmn->bgnst", scores, static)
    inner = []
    for at, (a, b, d) in (("s", query), ("t", key)):
        inner.append(np.einsum(f"bgmst,b{at}grm->bgrst", scores, a))
        total = total + np.einsum(f"bgrst,b{at}grn->bgnst", inner[-1], b)
        total = total + np.einsum(f"bgnst,b{at}gn->bgnst", scores, d)
    return total, (scores, static, query, key, inner)


def compose_backward(dtotal: np.ndarray, cache: tuple) -> tuple[np.ndarray, np.ndarray, list[tuple]]:
    """Gives dscores, dstatic, and (da, db, dd) for the query's and the key's side."""
    scores, static, query, key, inner = cache
    dscores = dtotal + np.einsum("bgnst,gmn->bgmst", dtotal, static)
    dstatic = np.einsum("bgmst,bgnst->gmn", scores, dtotal)
    sides = []
    for at, (a, b, d), h in zip("st", (query, key), inner, strict=True):
        dh = np.einsum(f"bgnst,b{at}grn->bgrst", dtotal, b)
        da = np.einsum(f"bgmst,bgrst->b{at}grm", scores, dh)
        db = np.einsum(f"bgrst,bgnst->b{at}grn", h, dtotal)
        dd = np.einsum(f"bgnst,bgnst->b{at}gn", scores, dtotal)
        dscores = dscores + np.einsum(f"bgrst,b{at}grm->bgmst", dh, a)
        dscores = dscores + np.einsum(f"bgnst,b{at}gn->bgnst", dtotal, d)
        sides.append((da, db, dd))
    return dscores, dstatic, sides


def backward(dout_BSD: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The gradients of the layer's input and of each of its weights."""
    weights, spec, x_BSD = cache["weights"], cache["spec"], cache["x"]
    B, S, _ = x_BSD.shape
    N, H, G, M = spec.num_heads, spec.head_dim, spec.num_groups, spec.group_size
    dweights: dict[str, np.ndarray] = {}

    def linear(name: str, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        dweights[f"{name}.weight"] = np.einsum("bsi,bso->io", x, dy)
        return dy @ weights[f"{name}.weight"].T

    dy = linear("o_proj", cache["y"], dout_BSD).reshape(B, S, G, M, H)
    dv = np.einsum("bgmst,bsgmh->btgmh", cache["mixed"], dy)
    dprobabilities, dweights["post_compose"], post = compose_backward(
        np.einsum("bsgmh,btgmh->bgmst", dy, cache["v"]), cache["post"]
    )
    p = cache["probabilities"]
    dcomposed = p * (dprobabilities - np.sum(p * dprobabilities, axis=-1, keepdims=True))
    dscores, dweights["pre_compose"], pre = compose_backward(dcomposed, cache["pre"])
    dscores = dscores / np.sqrt(H)
    dq = np.einsum("bgmst,btgmh->bsgmh", dscores, cache["k"]).reshape(B, S, N, H)
    dk = np.einsum("bgmst,bsgmh->btgmh", dscores, cache["q"]).reshape(B, S, N, H)
    dq, dweights["q_norm.weight"] = ops.rms_norm_backward(ops.rope(dq, -cache["angles"]), cache["q_norm"])
    dk, dweights["k_norm.weight"] = ops.rms_norm_backward(ops.rope(dk, -cache["angles"]), cache["k_norm"])

    da, db, dd = (np.stack(parts, axis=3) for parts in zip(*pre, *post, strict=True))
    da, _ = ops.rms_norm_backward(da, cache["a_norm"])
    dfactors = np.stack([da, db], axis=4).reshape(B, S, G, 4, -1)
    dweights["compose_factors"] = np.einsum("bsgci,bsgcj->gcij", cache["hidden"], dfactors)
    dhidden = np.einsum("bsgcj,gcij->bsgci", dfactors, weights["compose_factors"]) * cache["gelu_slope"]
    dx_BSD = linear("compose_proj", x_BSD, dhidden.reshape(B, S, -1))
    dx_BSD += linear("diagonal_proj", x_BSD, (dd * (1.0 - cache["diagonal"] ** 2)).reshape(B, S, -1))
    for name, dheads in zip(PROJECTIONS, (dq, dk, dv), strict=True):
        dx_BSD += linear(f"{name}_proj", x_BSD, dheads.reshape(B, S, -1))
    return dx_BSD, dweights
