"""Causal softmax attention with grouped KV heads.

    y_n = softmax(q_n k_g^T / sqrt(H), keys up to the query's own) v_g        g = n // (N / K)

The CPU form folds the G = N / K query heads of a KV head into the rows of its matrix products, row r = s * G + i,
so keys and values are never repeated, and goes through the queries in blocks: a block that ends at position e
needs the keys before e only, which skips most of the upper triangle in the products and in the softmax. Each
thread has its own KV heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from vha_paddle.ops.backend import for_each_share, gradients_wanted, host_view, on_gpu, only_wanted

_BLOCK_ROWS = 256  # rows of one product: queries of a block times G
_MASKED = -1e30  # finite, so that a masked score minus the row's maximum is never inf - inf
# Probabilities are kept for backward up to this many (256 MB in float32 for a layer), then computed again.
_MAX_KEPT_PROBABILITIES = 1 << 26


def _blocks(S: int, G: int) -> list[tuple[int, int]]:
    """The query blocks [start, stop) of a sequence."""
    step = max(1, _BLOCK_ROWS // G)
    return [(start, min(start + step, S)) for start in range(0, S, step)]


@functools.lru_cache(maxsize=16)
def _causal_tile(size: int, G: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """What to add to the scores of a block's queries on its own keys, and what to multiply them with afterwards."""
    seen = np.repeat(np.tril(np.ones((size, size), dtype)), G, axis=0)
    return (1 - seen) * np.asarray(_MASKED, dtype), seen


def _probabilities(q_RH: Tensor, k_SH: Tensor, start: int, stop: int, G: int) -> Tensor:
    """softmax of one query block over the keys before `stop`, exactly zero above the diagonal."""
    p = paddle.matmul(q_RH[start * G : stop * G], k_SH[:stop], transpose_y=True)
    own_keys = host_view(p)[:, start:]
    added, kept = _causal_tile(stop - start, G, own_keys.dtype.str)
    own_keys += added
    F.softmax_(p)
    own_keys *= kept  # Paddle's CPU softmax clips its argument at -64, so a masked key keeps a weight of 1e-28
    return p


class _Heads:
    """Copies between [B, S, heads, H] and one contiguous [S * G, H] per KV head and sample, index b * K + g."""

    def __init__(self, x_BSNH: Tensor, K: int) -> None:
        B, S, N, H = x_BSNH.shape
        self.K = K
        self.by_sequence = host_view(x_BSNH).reshape(B, S, K, N // K * H)
        self.tensor = paddle.empty([B * K, S * (N // K), H], x_BSNH.dtype)
        self.by_head = host_view(self.tensor).reshape(B * K, S, N // K * H)

    def gather(self, i: int, scale: float = 1.0) -> Tensor:
        b, g = divmod(i, self.K)
        np.multiply(self.by_sequence[b, :, g], self.by_sequence.dtype.type(scale), out=self.by_head[i])
        return self.tensor[i]

    def scatter(self, i: int, scale: float = 1.0) -> None:
        b, g = divmod(i, self.K)
        np.multiply(self.by_head[i], self.by_head.dtype.type(scale), out=self.by_sequence[b, :, g])


class _CausalAttention(PyLayer):
    @staticmethod
    def forward(ctx, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        ctx.wanted = gradients_wanted(q_BSNH, k_BSKH, v_BSKH)
        B, S, N, H = q_BSNH.shape
        K = k_BSKH.shape[2]
        G = N // K
        y_BSNH = paddle.empty_like(q_BSNH)
        q, k, v, y = (_Heads(x.contiguous(), K) for x in (q_BSNH, k_BSKH, v_BSKH, y_BSNH))
        keep = B * N * S * S // 2 <= _MAX_KEPT_PROBABILITIES
        kept: dict[tuple[int, int], Tensor] = {}

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                q_RH, k_SH, v_SH, y_RH = q.gather(i, H**-0.5), k.gather(i), v.gather(i), y.tensor[i]
                for start, stop in _blocks(S, G):
                    p = _probabilities(q_RH, k_SH, start, stop, G)
                    paddle.matmul(p, v_SH[:stop], out=y_RH[start * G : stop * G])
                    if keep:
                        kept[i, start] = p
                y.scatter(i)

        for_each_share(B * K, work)
        order = [(i, start) for i in range(B * K) for start, _ in _blocks(S, G)] if keep else []
        ctx.save_for_backward(q.tensor, k.tensor, v.tensor, *(kept[key] for key in order))
        ctx.order = order
        ctx.B = B
        return y_BSNH

    @staticmethod
    def backward(ctx, dy_BSNH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *probabilities = ctx.saved_tensor()
        kept = dict(zip(ctx.order, probabilities, strict=True))
        B, S, N, H = dy_BSNH.shape
        K = len(k) // B
        G = N // K
        grads = [paddle.empty([B, S, heads, H], q.dtype) for heads in (N, K, K)]
        dy = _Heads(dy_BSNH.contiguous(), K)
        dq, dk, dv = (_Heads(grad, K) for grad in grads)

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                dy_RH, dq_RH, dk_SH, dv_SH = dy.gather(i), dq.tensor[i], dk.tensor[i], dv.tensor[i]
                for start, stop in reversed(_blocks(S, G)):  # the last block has all keys: it fills dk and dv
                    rows, keys = slice(start * G, stop * G), slice(0, stop)
                    p = kept[i, start] if kept else _probabilities(q[i], k[i], start, stop, G)
                    dp = paddle.matmul(dy_RH[rows], v[i][keys], transpose_y=True)
                    ds = paddle._C_ops.softmax_grad(p, dp, -1)
                    paddle.matmul(ds, k[i][keys], out=dq_RH[rows])
                    _accumulate(ds, q[i][rows], dk_SH[keys], stop == S)
                    _accumulate(p, dy_RH[rows], dv_SH[keys], stop == S)
                dq.scatter(i, H**-0.5)
                dk.scatter(i)  # q was scaled already
                dv.scatter(i)

        for_each_share(B * K, work)
        return only_wanted(ctx.wanted, *grads)


def _accumulate(left: Tensor, right: Tensor, total: Tensor, first: bool) -> None:
    """total = left^T right the first time, total += left^T right after."""
    if first:
        paddle.matmul(left, right, transpose_x=True, out=total)
    else:
        total.add_(paddle.matmul(left, right, transpose_x=True))


def _attention_with_paddle(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
    """The same in Paddle's operations, with the whole square of scores."""
    B, S, N, H = q_BSNH.shape
    K = k_BSKH.shape[2]
    q_BKGSH = q_BSNH.reshape([B, S, K, N // K, H]).transpose([0, 2, 3, 1, 4])
    k_BK1SH, v_BK1SH = (x.transpose([0, 2, 1, 3]).unsqueeze(2) for x in (k_BSKH, v_BSKH))
    mask_SS = paddle.triu(paddle.full([S, S], _MASKED, q_BSNH.dtype), 1)
    p = F.softmax(paddle.matmul(q_BKGSH * H**-0.5, k_BK1SH, transpose_y=True) + mask_SS)
    return paddle.matmul(p, v_BK1SH).transpose([0, 3, 1, 2, 4]).reshape([B, S, N, H])


def causal_attention(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
    """Softmax attention of each query over the keys at or before its position, scaled by 1 / sqrt(H).

    Args:
        q_BSNH: queries; head n reads KV head n // (N // K).
        k_BSKH, v_BSKH: keys and values. K = 1 is multi-query, K = N multi-head attention.

    Returns:
        y_BSNH.
    """
    B, S, N, H = q_BSNH.shape
    K = k_BSKH.shape[2]
    if k_BSKH.shape != [B, S, K, H] or v_BSKH.shape != k_BSKH.shape or N % K:
        raise ValueError(f"shapes of q {q_BSNH.shape}, k {k_BSKH.shape}, v {v_BSKH.shape} do not fit")
    if on_gpu(q_BSNH):  # not run on a GPU in this project's tests
        if q_BSNH.dtype in (paddle.bfloat16, paddle.float16):
            return F.flash_attention.flash_attention(q_BSNH, k_BSKH, v_BSKH, causal=True)[0]
        return _attention_with_paddle(q_BSNH, k_BSKH, v_BSKH)
    return _CausalAttention.apply(q_BSNH, k_BSKH, v_BSKH)
