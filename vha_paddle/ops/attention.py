"""Causal softmax attention with grouped KV heads.

    y_n = softmax(q_n k_g^T / sqrt(H), keys up to the query's own) v_g        g = n // (N / K)

The CPU form folds the G = N / K query heads of a KV head into the rows of its matrix products, row s * G + i, so
keys and values are never repeated, and goes through the queries in blocks: a block that ends before position e
needs the keys before e only, which skips most of the upper triangle in the products and in the softmax. Each
thread has its own KV heads.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from vha_paddle.ops.backend import for_each_share, gradients_wanted, host_view, on_gpu, only_wanted

_BLOCK_ROWS = 256  # rows of one product: queries of a block times G
# Probabilities are kept for backward up to this many (256 MB in float32 for a layer), then computed again.
_MAX_KEPT_PROBABILITIES = 1 << 26


class _Block(NamedTuple):
    """Queries [start, stop) of one KV head."""

    start: int
    stop: int
    rows: slice  # of the head's S * G rows
    kept: slice  # of the head's kept probabilities


def _blocks(S: int, G: int) -> list[_Block]:
    step = max(1, _BLOCK_ROWS // G)
    blocks, size = [], 0
    for start in range(0, S, step):
        stop = min(start + step, S)
        rows = slice(start * G, stop * G)
        kept = slice(size, size + (rows.stop - rows.start) * stop)
        blocks.append(_Block(start, stop, rows, kept))
        size = kept.stop
    return blocks


@functools.lru_cache(maxsize=16)
def _causal_tile(size: int, G: int, dtype: str) -> np.ndarray:
    """What to add to the scores of a block's queries [size * G] on the block's own keys [size]."""
    return np.repeat(np.triu(np.full((size, size), -np.inf, dtype), 1), G, axis=0)


def _probabilities(q_RH: Tensor, k_SH: Tensor, block: _Block, out: Tensor) -> None:
    """softmax of one query block over the keys before its end, exactly zero above the diagonal."""
    paddle.matmul(q_RH[block.rows], k_SH[: block.stop], transpose_y=True, out=out)
    p = host_view(out)  # not Paddle's softmax: its CPU kernel leaves a masked key a weight of 1e-28
    size = block.stop - block.start
    p[:, block.start :] += _causal_tile(size, len(p) // size, p.dtype.str)
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)


class _Heads:
    """Copies between [B, S, heads, H] and, at index b * K + g, one contiguous [S * G, H] per KV head."""

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
    def forward(ctx: Any, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        ctx.wanted = gradients_wanted(q_BSNH, k_BSKH, v_BSKH)
        B, S, N, H = q_BSNH.shape
        K = k_BSKH.shape[2]
        blocks = _blocks(S, N // K)
        y_BSNH = paddle.empty_like(q_BSNH)
        q, k, v, y = (_Heads(x.contiguous(), K) for x in (q_BSNH, k_BSKH, v_BSKH, y_BSNH))
        keep = any(ctx.wanted) and B * K * blocks[-1].kept.stop <= _MAX_KEPT_PROBABILITIES
        kept = paddle.empty([B * K if keep else 0, blocks[-1].kept.stop], q_BSNH.dtype)

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                q_RH, k_SH, v_SH, y_RH = q.gather(i, H**-0.5), k.gather(i), v.gather(i), y.tensor[i]
                for block in blocks:
                    p = _buffer(kept, i, block)
                    _probabilities(q_RH, k_SH, block, out=p)
                    paddle.matmul(p, v_SH[: block.stop], out=y_RH[block.rows])
                y.scatter(i)

        for_each_share(B * K, work)
        ctx.save_for_backward(q.tensor, k.tensor, v.tensor, kept)
        return y_BSNH

    @staticmethod
    def backward(ctx: Any, dy_BSNH: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, kept = ctx.saved_tensor()
        B, S, N, H = dy_BSNH.shape
        K = len(k) // B
        blocks = _blocks(S, N // K)
        gradients = [paddle.empty([B, S, heads, H], q.dtype) for heads in (N, K, K)]
        dy = _Heads(dy_BSNH.contiguous(), K)
        dq, dk, dv = (_Heads(gradient, K) for gradient in gradients)

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                q_RH, k_SH, v_SH, dy_RH = q[i], k[i], v[i], dy.gather(i)
                dq_RH, dk_SH, dv_SH = dq.tensor[i], dk.tensor[i], dv.tensor[i]
                for block in reversed(blocks):  # the last block has all keys: it fills dk and dv
                    stop, is_first = block.stop, block.stop == S
                    p = _buffer(kept, i, block)
                    if not len(kept):
                        _probabilities(q_RH, k_SH, block, out=p)
                    dp = paddle.matmul(dy_RH[block.rows], v_SH[:stop], transpose_y=True)
                    ds = paddle._C_ops.softmax_grad(p, dp, -1)
                    paddle.matmul(ds, k_SH[:stop], out=dq_RH[block.rows])
                    _accumulate(ds, q_RH[block.rows], dk_SH[:stop], is_first)
                    _accumulate(p, dy_RH[block.rows], dv_SH[:stop], is_first)
                dq.scatter(i, H**-0.5)
                dk.scatter(i)  # q was scaled already
                dv.scatter(i)

        for_each_share(B * K, work)
        return only_wanted(ctx.wanted, *gradients)


def _buffer(kept: Tensor, i: int, block: _Block) -> Tensor:
    """The place [rows, keys] of a block's probabilities: in `kept`, or a new one where none are kept."""
    shape = [block.rows.stop - block.rows.start, block.stop]
    return kept[i, block.kept].reshape(shape) if len(kept) else paddle.empty(shape, kept.dtype)


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
    mask_SS = paddle.triu(paddle.full([S, S], -math.inf, q_BSNH.dtype), 1)
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
