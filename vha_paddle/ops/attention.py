"""Causal softmax attention with grouped KV heads.

    y_n = softmax(q_n k_g^T / sqrt(H), keys up to the query's own) v_g        g = n // (N / K)

The S queries are those of a few pieces of a sequence, the T keys and values start at its first position: a rank of
context parallelism has some of the queries and meets all keys that they see. One piece of all positions, S = T, is
the attention of a whole sequence.

The CPU form folds the G = N / K query heads of a KV head into the rows of its matrix products, row s * G + i, so
keys and values are never repeated, and goes through the queries in blocks: a block that ends before position e
needs the keys before e only, which skips most of the upper triangle in the products and in the softmax. Each
thread has its own KV heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from vha_paddle.errors import RunError
from vha_paddle.ops.backend import for_each_share, gradients_wanted, host_view, on_gpu, only_wanted

_BLOCK_ROWS = 256  # rows of one product: queries of a block times G
# Probabilities are kept for backward up to this many (256 MB in float32 for a layer), then computed again.
_MAX_KEPT_PROBABILITIES = 1 << 26
# Of the check of a flash attention kernel: more than a tile of queries, and keys that are no multiple of one.
_CHECKED_QUERIES, _CHECKED_KEYS = 150, 330
_MAX_FLASH_ERROR = 0.05  # relative; bfloat16 rounds to 0.004, a mask in another place is wrong by about 1

Pieces = Sequence[tuple[int, int]]
Attention = Callable[..., Tensor]


class _Block(NamedTuple):
    """The queries at positions [start, stop) of one KV head."""

    start: int
    stop: int
    rows: slice  # of the head's S * G rows
    kept: slice  # of the head's kept probabilities


def _blocks(pieces: Pieces, G: int) -> list[_Block]:
    """In the order of the positions: the last block is the one with the most keys."""
    step = max(1, _BLOCK_ROWS // G)
    blocks, row, size = [], 0, 0
    for first, last in pieces:
        for start in range(first, last, step):
            stop = min(start + step, last)
            rows = slice(row, row + (stop - start) * G)
            kept = slice(size, size + (rows.stop - rows.start) * stop)
            blocks.append(_Block(start, stop, rows, kept))
            row, size = rows.stop, kept.stop
    return blocks


@functools.lru_cache(maxsize=16)
def _causal_tile(size: int, G: int, dtype: str) -> np.ndarray:
    """What to add to the scores of a block's queries [size * G] on the block's own keys [size]."""
    return np.repeat(np.triu(np.full((size, size), -np.inf, dtype), 1), G, axis=0)


def _probabilities(q_RH: Tensor, k_TH: Tensor, block: _Block, out: Tensor) -> None:
    """softmax of one query block over the keys before its end, exactly zero above the diagonal."""
    paddle.matmul(q_RH[block.rows], k_TH[: block.stop], transpose_y=True, out=out)
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
    def forward(ctx: Any, q_BSNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, pieces: Pieces) -> Tensor:
        ctx.wanted = gradients_wanted(q_BSNH, k_BTKH, v_BTKH)
        B, S, N, H = q_BSNH.shape
        K = k_BTKH.shape[2]
        blocks = _blocks(pieces, N // K)
        y_BSNH = paddle.empty_like(q_BSNH)
        q, k, v, y = (_Heads(x.contiguous(), K) for x in (q_BSNH, k_BTKH, v_BTKH, y_BSNH))
        keep = any(ctx.wanted) and B * K * blocks[-1].kept.stop <= _MAX_KEPT_PROBABILITIES
        kept = paddle.empty([B * K if keep else 0, blocks[-1].kept.stop], q_BSNH.dtype)

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                q_RH, k_TH, v_TH, y_RH = q.gather(i, H**-0.5), k.gather(i), v.gather(i), y.tensor[i]
                for block in blocks:
                    p = _buffer(kept, i, block)
                    _probabilities(q_RH, k_TH, block, out=p)
                    paddle.matmul(p, v_TH[: block.stop], out=y_RH[block.rows])
                y.scatter(i)

        for_each_share(B * K, work)
        ctx.pieces = pieces
        ctx.save_for_backward(q.tensor, k.tensor, v.tensor, kept)
        return y_BSNH

    @staticmethod
    def backward(ctx: Any, dy_BSNH: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, kept = ctx.saved_tensor()
        B, S, N, H = dy_BSNH.shape
        K, T = len(k) // B, k.shape[1]
        blocks = _blocks(ctx.pieces, N // K)
        num_seen = blocks[-1].stop
        gradients = [paddle.empty(shape, q.dtype) for shape in ([B, S, N, H], [B, T, K, H], [B, T, K, H])]
        dy = _Heads(dy_BSNH.contiguous(), K)
        dq, dk, dv = (_Heads(gradient, K) for gradient in gradients)

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                q_RH, k_TH, v_TH, dy_RH = q[i], k[i], v[i], dy.gather(i)
                dq_RH, dk_TH, dv_TH = dq.tensor[i], dk.tensor[i], dv.tensor[i]
                for unseen in (dk.by_head[i, num_seen:], dv.by_head[i, num_seen:]):
                    unseen[:] = 0
                for block in reversed(blocks):  # the last block has every key that is seen: it fills dk and dv
                    stop, is_first = block.stop, block is blocks[-1]
                    p = _buffer(kept, i, block)
                    if not len(kept):
                        _probabilities(q_RH, k_TH, block, out=p)
                    dp = paddle.matmul(dy_RH[block.rows], v_TH[:stop], transpose_y=True)
                    ds = paddle._C_ops.softmax_grad(p, dp, -1)
                    paddle.matmul(ds, k_TH[:stop], out=dq_RH[block.rows])
                    _accumulate(ds, q_RH[block.rows], dk_TH[:stop], is_first)
                    _accumulate(p, dy_RH[block.rows], dv_TH[:stop], is_first)
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


def _attention_with_paddle(q_BSNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, pieces: Pieces) -> Tensor:
    """The same in Paddle's operations, with the whole rectangle of scores."""
    B, S, N, H = q_BSNH.shape
    K, T = k_BTKH.shape[2], pieces[-1][1]  # the keys after the last query are left out, so their gradient is zero
    q_BKGSH = q_BSNH.reshape([B, S, K, N // K, H]).transpose([0, 2, 3, 1, 4])
    k_BK1TH, v_BK1TH = (x[:, :T].transpose([0, 2, 1, 3]).unsqueeze(2) for x in (k_BTKH, v_BTKH))
    mask_TT = paddle.triu(paddle.full([T, T], -math.inf, q_BSNH.dtype), 1)
    mask_ST = paddle.concat([mask_TT[start:stop] for start, stop in pieces])
    p = F.softmax(paddle.matmul(q_BKGSH * H**-0.5, k_BK1TH, transpose_y=True) + mask_ST)
    return paddle.matmul(p, v_BK1TH).transpose([0, 3, 1, 2, 4]).reshape([B, S, N, H])


def _flash_attention(q_BSNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, pieces: Pieces) -> Tensor:
    """Paddle's GPU kernel, once for each piece, over the keys up to the piece's end."""
    N, H = q_BSNH.shape[2:]
    outputs, row = [], 0
    for start, stop in pieces:
        if start:  # more keys than queries
            _require_mask_at_last_key(q_BSNH.dtype, N, k_BTKH.shape[2], H)
        q_piece = q_BSNH[:, row : row + stop - start]
        outputs.append(_flash(q_piece, k_BTKH[:, :stop], v_BTKH[:, :stop]))
        row += stop - start
    return paddle.concat(outputs, axis=1)


def _flash(q_BSNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    return F.flash_attention.flash_attention(q_BSNH, k_BTKH, v_BTKH, causal=True)[0]


@functools.cache
def _require_mask_at_last_key(dtype: Any, N: int, K: int, H: int) -> None:
    """Try once, with values and gradients, that the kernel puts the last of S queries at the last of T > S keys.

    FlashAttention changed from the first key to the last between its versions; Paddle does not say which it has.
    """
    S, T = _CHECKED_QUERIES, _CHECKED_KEYS
    rng = np.random.default_rng(0)
    shapes = ([1, S, N, H], [1, T, K, H], [1, T, K, H])
    inputs = [paddle.to_tensor(rng.normal(size=shape).astype(np.float32)).astype(dtype) for shape in shapes]
    dy_BSNH = paddle.to_tensor(rng.normal(size=shapes[0]).astype(np.float32))
    expected = _results(functools.partial(_attention_with_paddle, pieces=[(T - S, T)]), inputs, dy_BSNH, "float32")
    actual = _results(_flash, inputs, dy_BSNH, dtype)
    error = np.max([np.abs(a - e).max() / np.abs(e).max() for a, e in zip(actual, expected, strict=True)])
    if not error <= _MAX_FLASH_ERROR:  # nan is refused too
        raise RunError(
            f"flash attention of {S} queries over {T} keys has a relative error of {error:.2g} on this device: a part "
            "of a sequence needs a kernel whose causal mask ends at the last key; set parallel.context=1"
        )


def _results(attention: Attention, inputs: list[Tensor], dy_BSNH: Tensor, dtype: Any) -> list[np.ndarray]:
    """The output and the three gradients of `attention`, computed in `dtype`."""
    with paddle.enable_grad():  # whatever the caller has
        leaves = [x.astype(dtype).detach() for x in inputs]
        for x in leaves:
            x.stop_gradient = False
        y_BSNH = attention(*leaves)
        gradients = paddle.grad([y_BSNH], leaves, [dy_BSNH.astype(dtype)])
    return [x.astype("float32").numpy() for x in (y_BSNH, *gradients)]


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


def causal_attention(q_BSNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, pieces: Pieces | None = None) -> Tensor:
    """Softmax attention of each query over the keys at or before its position, scaled by 1 / sqrt(H).

    Args:
        q_BSNH: queries, those of the pieces in order; head n reads KV head n // (N // K).
        k_BTKH, v_BTKH: keys and values of positions 0 to T - 1, in which every piece lies. K = 1 is multi-query,
            K = N multi-head attention. One that no query sees has gradient zero.
        pieces: (start, stop) positions of the queries, ascending and disjoint, S in all; None is the whole
            sequence (0, S) and S = T.

    Returns:
        y_BSNH.

    Raises:
        RunError: the GPU's flash attention cannot compute a part of a sequence.
    """
    B, S, N, H = q_BSNH.shape
    T, K = k_BTKH.shape[1:3]
    if k_BTKH.shape != [B, T, K, H] or v_BTKH.shape != k_BTKH.shape or N % K:
        raise ValueError(f"shapes of q {q_BSNH.shape}, k {k_BTKH.shape}, v {v_BTKH.shape} do not fit")
    checked = _checked_pieces(pieces, S, T)
    if on_gpu(q_BSNH):  # not run on a GPU in this project's tests
        if q_BSNH.dtype not in (paddle.bfloat16, paddle.float16):
            return _attention_with_paddle(q_BSNH, k_BTKH, v_BTKH, checked)
        if pieces is None:
            return _flash(q_BSNH, k_BTKH, v_BTKH)
        return _flash_attention(q_BSNH, k_BTKH, v_BTKH, checked)
    return _CausalAttention.apply(q_BSNH, k_BTKH, v_BTKH, checked)
