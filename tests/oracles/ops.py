"""Forward and hand-derived backward of the decoder's elementary operations.

Each `x(...)` returns its output and what `x_backward(doutput, cache)` needs; `d` before a name is the
gradient of the loss with respect to it. Letters: B batch, S and T query and key position, N query heads,
K key/value heads, G = N/K heads per group, H head dim, V width of a value head, or vocabulary.
"""

from __future__ import annotations

import numpy as np

IGNORED_LABEL = -100  # a position that no loss is taken at


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> tuple[np.ndarray, tuple]:
    """y = gain * x / sqrt(mean(x^2) + eps) over the last axis."""
    inverse_rms = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normalized = x * inverse_rms
    return gain * normalized, (normalized, inverse_rms, gain)


def rms_norm_backward(dy: np.ndarray, cache: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Gives dx and dgain. With r = (mean(x^2) + eps)^(-1/2): dr/dx_j = -r^3 x_j / H, so
    dx = r (dn - n mean(dn n)) where n = r x and dn = gain dy.
    """
    normalized, inverse_rms, gain = cache
    dnormalized = dy * gain
    projection = np.mean(dnormalized * normalized, axis=-1, keepdims=True)
    dgain = (dy * normalized).reshape(-1, gain.size).sum(axis=0)
    return inverse_rms * (dnormalized - normalized * projection), dgain


def rope_angles(length: int, head_dim: int, theta: float) -> np.ndarray:
    """Angles `[S, H/2]`: position s times theta^(-2j/H) for the pair (j, j + H/2)."""
    frequencies = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    return np.arange(length)[:, None] * frequencies


def rope(x_BSNH: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotate each pair (x_j, x_{j+H/2}) by its angle; backward is the same with the angles negated."""
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = np.split(x_BSNH, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(
    q_BSNH: np.ndarray,
    k_BSKH: np.ndarray,
    v_BSKV: np.ndarray,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[np.ndarray, tuple]:
    """softmax(scale q k^T) v for keys not after the query; query head n reads key/value head n // G.

    With a window W, query i sees the keys i - W < j <= i. The scale is 1 / sqrt(H) unless given.
    """
    B, S, N, H = q_BSNH.shape
    K = k_BSKH.shape[2]
    scale = 1.0 / np.sqrt(H) if scale is None else scale
    q_BSKGH = q_BSNH.reshape(B, S, K, N // K, H)
    scores = scale * np.einsum("bskgh,btkh->bkgst", q_BSKGH, k_BSKH)
    age_ST = np.arange(S)[:, None] - np.arange(S)  # of a key, as the query sees it
    seen_ST = age_ST >= 0 if window is None else (age_ST >= 0) & (age_ST < window)
    scores = np.where(seen_ST, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    y_BSKGV = np.einsum("bkgst,btkv->bskgv", weights, v_BSKV)
    return y_BSKGV.reshape(B, S, N, -1), (q_BSKGH, k_BSKH, v_BSKV, weights, scale)


def causal_attention_backward(dy_BSNV: np.ndarray, cache: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives dq, dk, dv. For p = softmax(s): ds = p (dp - sum_t p dp)."""
    q_BSKGH, k_BSKH, v_BSKV, weights, scale = cache
    B, S, K, G, H = q_BSKGH.shape
    dy_BSKGV = dy_BSNV.reshape(B, S, K, G, -1)
    dv_BSKV = np.einsum("bkgst,bskgv->btkv", weights, dy_BSKGV)
    dweights = np.einsum("bskgv,btkv->bkgst", dy_BSKGV, v_BSKV)
    dscores = weights * (dweights - np.sum(weights * dweights, axis=-1, keepdims=True))
    dscores *= scale
    dq_BSKGH = np.einsum("bkgst,btkh->bskgh", dscores, k_BSKH)
    dk_BSKH = np.einsum("bkgst,bskgh->btkh", dscores, q_BSKGH)
    return dq_BSKGH.reshape(B, S, K * G, H), dk_BSKH, dv_BSKV


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def silu_slope(x: np.ndarray) -> np.ndarray:
    """The derivative of silu. With s = sigmoid(x): s (1 + x (1 - s))."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, tuple]:
    """(silu(x W_gate) * (x W_up)) W_down."""
    z, u = x @ gate, x @ up
    activated = silu(z)
    return (activated * u) @ down, (x, z, u, activated, gate, up, down)


def swiglu_backward(dy: np.ndarray, cache: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Gives dx, dW_gate, dW_up, dW_down."""
    x, z, u, activated, gate, up, down = cache
    dproduct = dy @ down.T
    dz = dproduct * u * silu_slope(z)
    du = dproduct * activated
    ddown = np.einsum("bsf,bsd->fd", activated * u, dy)
    dgate, dup = np.einsum("bsd,bsf->df", x, dz), np.einsum("bsd,bsf->df", x, du)
    return dz @ gate.T + du @ up.T, dgate, dup, ddown


def embedding_backward(dx_BSD: np.ndarray, tokens_BS: np.ndarray, vocab_size: int) -> np.ndarray:
    """Gives dE `[V, D]`: a token's row receives the gradient of each of its occurrences."""
    dembedding = np.zeros((vocab_size, dx_BSD.shape[-1]))
    np.add.at(dembedding, tokens_BS, dx_BSD)
    return dembedding


def cross_entropy(logits_BSV: np.ndarray, labels_BS: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean of -log softmax(logits)[label] over the positions with a label, and its gradient dlogits.

    For a position with a label, d(loss)/d(logits) = (softmax - onehot) / count.
    """
    counted = labels_BS != IGNORED_LABEL
    shifted = logits_BSV - logits_BSV.max(axis=-1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    onehot = np.arange(logits_BSV.shape[-1]) == labels_BS[..., None]
    count = counted.sum()
    loss = -log_softmax[onehot].sum() / count
    return float(loss), (np.exp(log_softmax) - onehot) * counted[..., None] / count
