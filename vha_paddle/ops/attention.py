"""Causal softmax attention with grouped KV heads.

    y_n = softmax(scale * q_n k_g^T, keys up to the query's own) v_g        g = n // (N / K)

Queries and keys have width H, values and outputs may have another one, V. With a window, a query sees only so many
keys, its own the last of them. In a packed sequence it sees none before its document.

The S queries are those of a few pieces of a sequence, the T keys and values start at its first position: a rank of
context parallelism has some of the queries and meets all keys that they see. One piece of all positions, S = T, is
the attention of a whole sequence.

The CPU form folds the G = N / K query heads of a KV head into the rows of its matrix products, row s * G + i, so
keys and values are never repeated, and goes through the queries in blocks: a block of positions [s, e) needs the
keys before e only, which skips most of the upper triangle in the products and in the softmax, and of a window W the
keys from s - W + 1 on, so that a short window costs in proportion. A block holds queries of one document, whose keys
begin with it. Each thread has its own KV heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from vha_paddle.ops.attention_gpu import attention_on_gpu
from vha_paddle.ops.attention_mask import Pieces, segments
from vha_paddle.ops.backend import for_each_share, gradients_wanted, host_view, on_gpu, only_wanted

_BLOCK_ROWS = 256  # rows of one product: queries of a block times G
# Probabilities are kept for backward up to this many (256 MB in float32 for a layer), then computed again.
_MAX_KEPT_PROBABILITIES = 1 << 26


class _Block(NamedTuple):
    """The queries at positions [start, stop) of one KV head, and the keys [first, stop) that they see."""

    first: int
    start: int
    stop: int
    rows: slice  # of the head's S * G rows
    kept: slice  # of the head's kept probabilities


def _blocks(parts: Sequence[tuple[int, int, int]], G: int, window: int | None, block_rows: int) -> list[_Block]:
    """Of the `segments` of a sequence, in the order of the positions."""
    step = max(1, block_rows // G)
    blocks, row, size = [], 0, 0
    for begin, end, origin in parts:
        for start in range(begin, end, step):
            stop = min(start + step, end)
            first = origin if window is None else max(origin, start - window + 1)
            rows = slice(row, row + (stop - start) * G)
            kept = slice(size, size + (rows.stop - rows.start) * (stop - first))
            blocks.append(_Block(first, start, stop, rows, kept))
            row, size = rows.stop, kept.stop
    return blocks


@functools.lru_cache(maxsize=16)
def _causal_tile(size: int, G: int, dtype: str) -> np.ndarray:
    """What to add to the scores of a block's queries [size * G] on the block's own keys [size]."""
    return np.repeat(np.triu(np.full((size, size), -np.inf, dtype), 1), G, axis=0)


@functools.lru_cache(maxsize=16)
def _window_tile(size: int, num_keys: int, G: int, dtype: str) -> np.ndarray:
    """What to add to the scores of a block's queries [size * G] on the first `num_keys` < size of its keys.

    The last query sees none of them, the one before it the last one, and so on.
    """
    return np.repeat(np.tril(np.full((size, num_keys), -np.inf, dtype), num_keys - size), G, axis=0)


def _probabilities(q_RH: Tensor, k_TH: Tensor, block: _Block, window: int | None, out: Tensor) -> None:
    """softmax of one query block over its keys, exactly zero where a query does not see one."""
    paddle.matmul(q_RH[block.rows], k_TH[block.first : block.stop], transpose_y=True, out=out)
    p = host_view(out)  # not Paddle's softmax: its CPU kernel leaves a masked key a weight of 1e-28
    size = block.stop - block.start
    G = len(p) // size
    p[:, block.start - block.first :] += _causal_tile(size, G, p.dtype.str)
    if window is not None:
        unseen_by_last = max(0, block.stop - window - block.first)
        p[:, :unseen_by_last] += _window_tile(size, unseen_by_last, G, p.dtype.str)
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
    def forward(
        ctx: Any,
        q_BSNH: Tensor,
        k_BTKH: Tensor,
        v_BTKV: Tensor,
        pieces: Pieces,
        window: int | None,
        scale: float,
        starts_BS: np.ndarray | None,
    ) -> Tensor:
        ctx.wanted = gradients_wanted(q_BSNH, k_BTKH, v_BTKV)
        B, S, N = q_BSNH.shape[:3]
        K, V = v_BTKV.shape[2:]
        starts_by_sequence = [None] if starts_BS is None else list(starts_BS)
        blocks_B = [_blocks(segments(pieces, starts_S), N // K, window, _BLOCK_ROWS) for starts_S in starts_by_sequence]
        blocks_B *= B // len(blocks_B)  # without documents the same for all
        size = max(blocks[-1].kept.stop for blocks in blocks_B)
        y_BSNV = paddle.empty([B, S, N, V], q_BSNH.dtype)
        q, k, v, y = (_Heads(x.contiguous(), K) for x in (q_BSNH, k_BTKH, v_BTKV, y_BSNV))
        keep = any(ctx.wanted) and B * K * size <= _MAX_KEPT_PROBABILITIES
        kept = paddle.empty([B * K if keep else 0, size], q_BSNH.dtype)

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                q_RH, k_TH, v_TV, y_RV = q.gather(i, scale), k.gather(i), v.gather(i), y.tensor[i]
                for block in blocks_B[i // K]:
                    p = _buffer(kept, i, block)
                    _probabilities(q_RH, k_TH, block, window, out=p)
                    paddle.matmul(p, v_TV[block.first : block.stop], out=y_RV[block.rows])
                y.scatter(i)

        for_each_share(B * K, work)
        ctx.blocks_B, ctx.window, ctx.scale = blocks_B, window, scale
        ctx.save_for_backward(q.tensor, k.tensor, v.tensor, kept)
        return y_BSNV

    @staticmethod
    def backward(ctx: Any, dy_BSNV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, kept = ctx.saved_tensor()
        B, S, N, V = dy_BSNV.shape
        K, T, H = len(k) // B, k.shape[1], k.shape[2]
        gradients = [paddle.empty(shape, q.dtype) for shape in ([B, S, N, H], [B, T, K, H], [B, T, K, V])]
        dy = _Heads(dy_BSNV.contiguous(), K)
        dq, dk, dv = (_Heads(gradient, K) for gradient in gradients)

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                q_RH, k_TH, v_TV, dy_RV = q[i], k[i], v[i], dy.gather(i)
                dq_RH, dk_TH, dv_TV = dq.tensor[i], dk.tensor[i], dv.tensor[i]
                for total in (dk, dv):
                    total.by_head[i] = 0
                for block in ctx.blocks_B[i // K]:
                    rows, keys = block.rows, slice(block.first, block.stop)
                    p = _buffer(kept, i, block)
                    if not len(kept):
                        _probabilities(q_RH, k_TH, block, ctx.window, out=p)
                    dp = paddle.matmul(dy_RV[rows], v_TV[keys], transpose_y=True)
                    ds = paddle._C_ops.softmax_grad(p, dp, -1)
                    paddle.matmul(ds, k_TH[keys], out=dq_RH[rows])
                    dk_TH[keys].add_(paddle.matmul(ds, q_RH[rows], transpose_x=True))
                    dv_TV[keys].add_(paddle.matmul(p, dy_RV[rows], transpose_x=True))
                dq.scatter(i, ctx.scale)
                dk.scatter(i)  # q was scaled already
                dv.scatter(i)

        for_each_share(B * K, work)
        return only_wanted(ctx.wanted, *gradients)


def _buffer(kept: Tensor, i: int, block: _Block) -> Tensor:
    """The place [rows, keys] of a block's probabilities: in `kept`, or a new one where none are kept."""
    shape = [block.rows.stop - block.rows.start, block.stop - block.first]
    return kept[i, block.kept].reshape(shape) if len(kept) else paddle.empty(shape, kept.dtype)


def _checked_pieces(pieces: Pieces | None, S: int, T: int) -> Pieces:
    """The pieces, (0, S) where none are given; ValueError unless they hold S queries of T positions in order."""
    whole = pieces is None
    pieces = ((0, S),) if pieces is None else tuple(pieces)
    bounds = [position for piece in pieces for position in piece]
    lengths = [stop - start for start, stop in pieces]
    if bounds != sorted(bounds) or min(lengths, default=0) < 1 or min(bounds) < 0:
        raise ValueError(f"pieces {pieces} must be ranges (start, stop) that ascend and do not overlap or stay empty")
    if sum(lengths) != S or bounds[-1] > T or (whole and S != T):
        raise ValueError(f"pieces {pieces} do not fit {S} queries and {T} keys")
    return pieces


def _check_starts(starts_BS: np.ndarray, B: int, pieces: Pieces) -> None:
    """ValueError unless they can be the starts of the queries' documents."""
    position_S = np.concatenate([np.arange(*piece) for piece in pieces])
    if starts_BS.shape != (B, len(position_S)):
        raise ValueError(f"starts of shape {starts_BS.shape} do not fit {B} sequences of {len(position_S)} queries")
    if (starts_BS < 0).any() or (starts_BS > position_S).any() or (np.diff(starts_BS) < 0).any():
        raise ValueError("starts must ascend, and none may be after its own query")


def causal_attention(
    q_BSNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    pieces: Pieces | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    starts_BS: np.ndarray | None = None,
) -> Tensor:
    """Softmax attention of each query over the keys at or before its position.

    Args:
        q_BSNH: queries, those of the pieces in order; head n reads KV head n // (N // K).
        k_BTKH, v_BTKV: keys and values of positions 0 to T - 1, in which every piece lies. K = 1 is multi-query,
            K = N multi-head attention. One that no query sees has gradient zero.
        pieces: (start, stop) positions of the queries, ascending and disjoint, S in all; None is the whole
            sequence (0, S) and S = T.
        window: keys that a query sees, its own position included: key j of query i where i - window < j <= i. None
            is all before it.
        scale: factor of the scores; None is H**-0.5.
        starts_BS: of the documents of a packed sequence, for each query the position at which its own starts (see
            `document_starts`): the first key that it sees. None is no mask of documents.

    Returns:
        y_BSNV.

    Raises:
        RunError: the GPU's flash attention cannot compute a part of a sequence.
    """
    B, S, N, H = q_BSNH.shape
    T, K, V = v_BTKV.shape[1:]
    if k_BTKH.shape != [B, T, K, H] or v_BTKV.shape[0] != B or N % K:
        raise ValueError(f"shapes of q {q_BSNH.shape}, k {k_BTKH.shape}, v {v_BTKV.shape} do not fit")
    checked = _checked_pieces(pieces, S, T)
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1: a query sees itself")
    if window is not None and window >= T:
        window = None
    scale = H**-0.5 if scale is None else scale
    if starts_BS is not None:
        _check_starts(starts_BS, B, checked)
    if on_gpu(q_BSNH):
        return attention_on_gpu(q_BSNH, k_BTKH, v_BTKV, checked, window, scale, starts_BS)
    return _CausalAttention.apply(q_BSNH, k_BTKH, v_BTKV, checked, window, scale, starts_BS)
