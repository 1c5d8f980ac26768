"""The keys and values that one layer remembers, of several texts of different lengths.

Shapes: B texts, R tokens that are written, S positions that there is room for, N query heads, K key/value heads,
G = N / K query heads that read one of them (query head n reads n // G), H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F


@dataclass(frozen=True)
class Reading:
    """Where the tokens that a decoder reads at once go in the caches of one room, and what their queries see there.

    Text b has `starts_B[b]` positions before and `counts_B[b]` new ones, the first of the `width` that are read of
    every text; what follows them is padding, and is not remembered.
    """

    sources_R: paddle.Tensor
    """Which of the B * width tokens are kept: of more than there is room for, each text's last."""
    texts_R: np.ndarray[Any, Any]
    slots_R: np.ndarray[Any, Any]
    visible: int
    """Slots that some text fills."""
    bias_B11S: paddle.Tensor
    """0 for the slots that text b fills, minus infinity for the others, of the `visible`."""

    @classmethod
    def of(
        cls, starts_B: np.ndarray[Any, Any], counts_B: np.ndarray[Any, Any], width: int, room: int, dtype: Any
    ) -> Reading:
        ends_B = starts_B + counts_B
        positions = [np.arange(max(start, end - room), end) for start, end in zip(starts_B, ends_B, strict=True)]
        texts_R = np.repeat(np.arange(len(positions)), [len(kept) for kept in positions])
        positions_R = np.concatenate(positions)
        filled_B = np.minimum(ends_B, room)
        visible = int(filled_B.max())
        bias_BS = np.where(np.arange(visible) < filled_B[:, None], 0.0, -np.inf)
        return cls(
            sources_R=paddle.to_tensor(texts_R * width + positions_R - starts_B[texts_R]),
            texts_R=texts_R,
            slots_R=positions_R % room,
            visible=visible,
            bias_B11S=paddle.to_tensor(bias_BS[:, None, None], dtype=dtype),
        )


class LayerCache:
    """Keys and values of one layer, `[B, K, S, H]` each: the last S positions of each text, S being the `room`.

    Position p lies in slot p % room, so the newest takes the place of the one that has left the window. Attention
    sums over positions, and RoPE has told the keys which is theirs: the order of the slots does not matter.
    """

    def __init__(self, batch: int, num_kv_heads: int, room: int, head_dim: int, dtype: Any) -> None:
        self.room, self._num_kv_heads, self._head_dim = room, num_kv_heads, head_dim
        # one axis for texts, heads and slots, which is how slots are written
        rows = batch * num_kv_heads * room
        self._k, self._v = paddle.zeros([rows, head_dim], dtype), paddle.zeros([rows, head_dim], dtype)

    def _by_text(self, flat: paddle.Tensor) -> paddle.Tensor:
        return flat.reshape([-1, self._num_kv_heads, self.room, self._head_dim])

    @property
    def num_bytes(self) -> int:
        return sum(int(tensor.size) * int(tensor.element_size()) for tensor in (self._k, self._v))

    def figures(self) -> dict[str, int]:
        """Its heads K, the positions that it has room for, and the bytes for one of them of one text."""
        texts = len(self._k) // (self._num_kv_heads * self.room)
        return {
            "num_key_value_heads": self._num_kv_heads,
            "positions": self.room,
            "bytes_per_token": self.num_bytes // (texts * self.room),
        }

    def write(self, reading: Reading, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor) -> None:
        """Put the keys and values of the tokens that are read into their slots."""
        heads_RK = reading.texts_R[:, None] * self._num_kv_heads + np.arange(self._num_kv_heads)
        rows = paddle.to_tensor((heads_RK * self.room + reading.slots_R[:, None]).ravel())
        for cache, new_BSKH in ((self._k, k_BSKH), (self._v, v_BSKH)):
            new = paddle.gather(new_BSKH.reshape([-1, self._num_kv_heads, self._head_dim]), reading.sources_R)
            cache[rows] = new.reshape([-1, self._head_dim])

    def attend(self, reading: Reading, q_B1NH: paddle.Tensor) -> paddle.Tensor:
        """Attention of each text's newest position, whose key has been written, over all that are kept."""
        batch, _, num_query, head_dim = q_B1NH.shape
        groups = [batch, self._num_kv_heads, num_query // self._num_kv_heads, head_dim]
        k_BKSH, v_BKSH = (self._by_text(flat)[:, :, : reading.visible] for flat in (self._k, self._v))
        scores_BKGS = paddle.matmul(q_B1NH.reshape(groups) * head_dim**-0.5, k_BKSH, transpose_y=True)
        weights_BKGS = F.softmax((scores_BKGS + reading.bias_B11S).astype("float32"), axis=-1).astype(q_B1NH.dtype)
        return paddle.matmul(weights_BKGS, v_BKSH).reshape(q_B1NH.shape)

    def select(self, texts: Sequence[int]) -> None:
        """Go on with these texts, in this order; one may come more than once."""
        chosen = paddle.to_tensor(list(texts))
        self._k, self._v = (
            paddle.gather(self._by_text(flat), chosen).reshape([-1, self._head_dim]) for flat in (self._k, self._v)
        )
