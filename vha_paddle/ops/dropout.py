"""Dropout whose mask belongs to the elements of the model, not to the process that holds them.

    y = x / (1 - rate) where u >= rate, else 0        u = hash(key, sample, position, channel) in [0, 1)

Whoever computes an element finds the same u, so the masks of a run do not change with the number of processes
or with how batch and sequence are cut, and backward computes the mask again instead of storing it.

The hash is SplitMix64: a mixer M of 64 bits, applied to a state that moves by a fixed odd step.

    state = M(M(key + (sample + 1) step) + (position + 1) step)        bits_j = M(state + (j + 1) step)

M is one-to-one, so no two samples, positions or j of the same rest meet in one value. The two halves of bits_j
are the u of channels 2j and 2j + 1.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from vha_paddle.ops.backend import for_each_share, host_view, on_gpu, row_blocks

# SplitMix64 (Steele, Lea and Flood 2014; constants of Vigna's splitmix64.c)
_STEP = 0x9E3779B97F4A7C15
_SHIFT_AND_FACTOR = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


class _Mask(NamedTuple):
    """Which elements of a [B, S, D] to drop."""

    rate: float
    state_R: np.ndarray  # uint64; row b * S + s

    @property
    def threshold(self) -> int:
        """An element is dropped when its 32 bits are below this."""
        return int(self.rate * 2**32)


def dropout_key(seed: int, name: str) -> int:
    """A key in [0, 2^64) for `dropout`: another one for every seed and every name of a layer."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def _steps(count: int) -> np.ndarray:
    """step, 2 step, ... modulo 2^64."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)


def _mix(z: np.ndarray) -> None:
    """M, in place, on uint64."""
    t = np.empty_like(z)
    for shift, factor in _SHIFT_AND_FACTOR:
        np.right_shift(z, np.uint64(shift), out=t)
        z ^= t
        z *= np.uint64(factor)
    np.right_shift(z, np.uint64(_LAST_SHIFT), out=t)
    z ^= t


def _row_states(key: int, sample_B: np.ndarray, position_S: np.ndarray) -> np.ndarray:
    """state of every row b * S + s, uint64."""
    sample_step_B, position_step_S = (
        (x.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP) for x in (sample_B, position_S)
    )
    state_B = np.uint64(key) + sample_step_B
    _mix(state_B)
    state_BS = state_B[:, None] + position_step_S
    _mix(state_BS)
    return state_BS.reshape(-1)


def _dropped(state_R: np.ndarray, step_j: np.ndarray, mask: _Mask, D: int) -> np.ndarray:
    """Of each row, which of its D channels are dropped."""
    bits_Rj = state_R[:, None] + step_j
    _mix(bits_Rj)
    return bits_Rj.astype("<u8", copy=False).view("<u4")[:, :D] < np.uint32(mask.threshold)


def _apply_on_cpu(x_BSD: Tensor, mask: _Mask) -> Tensor:
    x_BSD = x_BSD.contiguous()
    D = x_BSD.shape[-1]
    y_BSD = paddle.empty_like(x_BSD)
    x_RD, y_RD = (host_view(t).reshape(-1, D) for t in (x_BSD, y_BSD))
    step_j, scale = _steps((D + 1) // 2), x_RD.dtype.type(1 / (1 - mask.rate))

    def work(start: int, stop: int) -> None:
        for rows in row_blocks(start, stop, x_RD[0]):
            y = y_RD[rows]
            np.multiply(x_RD[rows], scale, out=y)
            np.putmask(y, _dropped(mask.state_R[rows], step_j, mask, D), 0)

    for_each_share(len(x_RD), work)
    return y_BSD


def _int64(x: np.ndarray | int) -> Tensor:
    """The same 64 bits as Paddle's int64, which has no unsigned sister; its sums and products wrap as well.

    A Python number beside a tensor would go through a float of 32 bits.
    """
    return paddle.to_tensor(np.asarray(x, np.uint64).view(np.int64))


def _shift_right(z: Tensor, shift: int) -> Tensor:
    return paddle.bitwise_right_shift(z, _int64(shift), is_arithmetic=False)


def _apply_with_paddle(x_BSD: Tensor, mask: _Mask) -> Tensor:
    """The same bits in Paddle's operations."""
    B, S, D = x_BSD.shape
    z = _int64(mask.state_R).reshape([B, S, 1]) + _int64(_steps((D + 1) // 2))
    for shift, factor in _SHIFT_AND_FACTOR:
        z = (z ^ _shift_right(z, shift)) * _int64(factor)
    z = z ^ _shift_right(z, _LAST_SHIFT)
    halves = paddle.stack([z & _int64(2**32 - 1), _shift_right(z, 32)], axis=-1)
    dropped_BSD = (halves < _int64(mask.threshold)).reshape([B, S, -1])[..., :D]
    return paddle.where(dropped_BSD, paddle.zeros_like(x_BSD), x_BSD * (1 / (1 - mask.rate)))


def _apply(x_BSD: Tensor, mask: _Mask) -> Tensor:
    if on_gpu(x_BSD):  # not run on a GPU in this project's tests
        return _apply_with_paddle(x_BSD, mask)
    return _apply_on_cpu(x_BSD, mask)


class _Dropout(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, mask: _Mask) -> Tensor:
        ctx.mask = mask
        return _apply(x_BSD, mask)

    @staticmethod
    def backward(ctx: Any, dy_BSD: Tensor) -> Tensor:
        return _apply(dy_BSD, ctx.mask)


def dropout(x_BSD: Tensor, rate: float, key: int, sample_B: np.ndarray, position_S: np.ndarray) -> Tensor:
    """Set a `rate` of the elements to 0 and divide the others by 1 - rate, so that the mean stays.

    Args:
        x_BSD: activations.
        rate: in [0, 1), in steps of 2^-32; at 0 the result is x itself.
        key: 64 bits, `dropout_key` of the run's seed and the layer's name.
        sample_B: int64, the number of each sample in the whole run: another step's must differ, or its mask repeats.
        position_S: int64, the position of each token in its sample.
    """
    B, S, _ = x_BSD.shape
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate of {rate} is not in [0, 1)")
    if not 0 <= key < 2**64:
        raise ValueError(f"key {key} is not in [0, 2^64)")
    if sample_B.dtype != np.int64 or position_S.dtype != np.int64:
        raise ValueError(f"samples and positions must be int64, not {sample_B.dtype} and {position_S.dtype}")
    if sample_B.shape != (B,) or position_S.shape != (S,):
        raise ValueError(f"samples {sample_B.shape} and positions {position_S.shape} do not fit x {x_BSD.shape}")
    if rate == 0:
        return x_BSD
    return _Dropout.apply(x_BSD, _Mask(rate, _row_states(key, sample_B, position_S)))
