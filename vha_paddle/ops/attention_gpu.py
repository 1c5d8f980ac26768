"""Causal attention on a GPU: Paddle's flash attention where it can, else the plain form in Paddle's operations.

The kernel takes half precision, one width of up to 256 for queries, keys and values, and no window. Widths that differ
are padded with zeros, which add nothing to a score and make channels of the output that are cut off. A window, float32
and wider heads get the plain form. Documents of a whole sequence are FlashMask's; of a part of one, plain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import functional as F

from vha_paddle.errors import RunError
from vha_paddle.ops.attention_mask import Pieces, document_ends, seen_keys

_WINDOWED_QUERIES = 256  # at least so many at a time, where the window is shorter
_WIDEST_FLASH = 256  # above it Paddle's flash_attention turns to a kernel that it does not tell of the causal mask
# Of the check of a flash attention kernel: more than a tile of queries, and keys that are no multiple of one.
_CHECKED_QUERIES, _CHECKED_KEYS = 150, 330
_MAX_FLASH_ERROR = 0.05  # relative; bfloat16 rounds to 0.004, a mask in another place is wrong by about 1

Attention = Callable[..., Tensor]


def attention_on_gpu(
    q_BSNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    pieces: Pieces,
    window: int | None,
    scale: float,
    starts_BS: np.ndarray | None = None,
) -> Tensor:
    """`causal_attention`, its arguments checked. Not run on a GPU in this project's tests."""
    if window is not None:
        return windowed_attention(q_BSNH, k_BTKH, v_BTKV, pieces, window, scale, starts_BS)
    is_half = q_BSNH.dtype in (paddle.bfloat16, paddle.float16)
    if not is_half or max(q_BSNH.shape[3], v_BTKV.shape[3]) > _WIDEST_FLASH:
        return plain_attention(q_BSNH, k_BTKH, v_BTKV, pieces, None, scale, starts_BS)
    if starts_BS is None:
        return flash_attention(q_BSNH, k_BTKH, v_BTKV, pieces, scale)
    if q_BSNH.shape[1] != k_BTKH.shape[1]:
        return plain_attention(q_BSNH, k_BTKH, v_BTKV, pieces, None, scale, starts_BS)
    return flash_attention_of_documents(q_BSNH, k_BTKH, v_BTKV, scale, starts_BS)


def plain_attention(
    q_BSNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    pieces: Pieces,
    window: int | None,
    scale: float,
    starts_BS: np.ndarray | None = None,
) -> Tensor:
    """The whole rectangle of scores of the pieces' queries on the keys up to the last of them."""
    B, S, N, H = q_BSNH.shape
    K, T = k_BTKH.shape[2], pieces[-1][1]  # the keys after the last query are left out, so their gradient is zero
    q_BKGSH = q_BSNH.reshape([B, S, K, N // K, H]).transpose([0, 2, 3, 1, 4])
    k_BK1TH, v_BK1TV = (x[:, :T].transpose([0, 2, 1, 3]).unsqueeze(2) for x in (k_BTKH, v_BTKV))
    seen_B11ST = seen_keys(pieces, T, window, starts_BS)[:, None, None]
    mask_B11ST = paddle.to_tensor(np.where(seen_B11ST, 0.0, -math.inf)).astype(q_BSNH.dtype)
    p = F.softmax(paddle.matmul(q_BKGSH * scale, k_BK1TH, transpose_y=True) + mask_B11ST)
    return paddle.matmul(p, v_BK1TV).transpose([0, 3, 1, 2, 4]).reshape([B, S, N, -1])


def windowed_attention(
    q_BSNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    pieces: Pieces,
    window: int,
    scale: float,
    starts_BS: np.ndarray | None = None,
) -> Tensor:
    """The plain form on some queries at a time with the keys that they see: memory in proportion to the window."""
    step = max(window, _WINDOWED_QUERIES)
    outputs, row = [], 0
    for begin, end in pieces:
        for start in range(begin, end, step):
            stop, first = min(start + step, end), max(0, start - window + 1)
            rows = slice(row, row + stop - start)
            q, k, v = q_BSNH[:, rows], k_BTKH[:, first:stop], v_BTKV[:, first:stop]
            starts = None if starts_BS is None else starts_BS[:, rows] - first
            outputs.append(plain_attention(q, k, v, [(start - first, stop - first)], window, scale, starts))
            row += stop - start
    return paddle.concat(outputs, axis=1)


def flash_attention(q_BSNH: Tensor, k_BTKH: Tensor, v_BTKV: Tensor, pieces: Pieces, scale: float) -> Tensor:
    """Paddle's kernel, once for each piece, over the keys up to the piece's end."""
    q, k, v = _of_one_width(q_BSNH, k_BTKH, v_BTKV, scale)
    outputs, row = [], 0
    for start, stop in pieces:
        if start:  # more keys than queries
            _require_mask_at_last_key(q.dtype, q.shape[2], k.shape[2], q.shape[3])
        outputs.append(_flash(q[:, row : row + stop - start], k[:, :stop], v[:, :stop]))
        row += stop - start
    return paddle.concat(outputs, axis=1)[..., : v_BTKV.shape[3]]


def flash_attention_of_documents(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, scale: float, starts_BS: np.ndarray
) -> Tensor:
    """FlashMask (arXiv 2410.01359): for each key the first of the later queries that do not see it."""
    q, k, v = _of_one_width(q_BSNH, k_BSKH, v_BSKV, scale)
    ends_B1S1 = paddle.to_tensor(document_ends(starts_BS).astype(np.int32)[:, None, :, None])
    return F.flashmask_attention(q, k, v, ends_B1S1, causal=True)[..., : v_BSKV.shape[3]]


def _of_one_width(q_BSNH: Tensor, k_BTKH: Tensor, v_BTKV: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Padded to the widest of them; the queries scaled so that the kernel's own scale makes `scale`."""
    width = max(q_BSNH.shape[3], v_BTKV.shape[3])
    if scale != width**-0.5:
        q_BSNH = q_BSNH * (scale * width**0.5)
    missing = [width - x.shape[3] for x in (q_BSNH, k_BTKH, v_BTKV)]
    q, k, v = (
        F.pad(x, [0, 0, 0, 0, 0, 0, 0, columns]) if columns else x
        for x, columns in zip((q_BSNH, k_BTKH, v_BTKV), missing, strict=True)
    )
    return q, k, v


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
    plain = functools.partial(plain_attention, pieces=[(T - S, T)], window=None, scale=H**-0.5)
    expected = _results(plain, inputs, dy_BSNH, "float32")
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
