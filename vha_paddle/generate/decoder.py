"""A decoder on a cache: it reads prompts, then one token of each text at a time.

THE KEY/VALUE CACHE IS HERE, not in the attention kinds: those serve training, see whole sequences and keep no
state. Decoding runs the same layers one token at a time. Grouped-query layers alone are decoded: one with virtual
heads folds into one, so K heads are cached, 2 * K * H values per token and layer. A layer with a sliding window keeps
its last `window` positions and no more.

Prompts of different lengths are padded on the right, where causal attention shows the padding to no token of the
text; from then on every text has a position of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from vha_paddle.attention.grouped import SelfAttentionGrouped
from vha_paddle.generate.cache import LayerCache, Reading
from vha_paddle.model.block import Block
from vha_paddle.model.decoder import Decoder
from vha_paddle.model.moe import MoE
from vha_paddle.ops.attention import causal_attention
from vha_paddle.ops.rope import apply_rope


class CachedDecoder:
    """A decoder of grouped-query layers and what it has read of B texts.

    Args:
        model: whole in this process. Its dtype is the cache's.
        capacity: positions of each text that can be read.

    Raises:
        ValueError: the model is one that `generate.model.check_decodable` refuses, or a part of one.
    """

    def __init__(self, model: Decoder, capacity: int) -> None:
        if model.mesh.tensor_degree != 1:
            raise ValueError("decoding needs the whole model in one process")
        for block in model.layers:
            if not isinstance(block.self_attn, SelfAttentionGrouped):
                raise ValueError(f"{type(block.self_attn).__name__} keeps something else than keys and values of heads")
            if isinstance(block.mlp, MoE) and block.mlp.config.capacity_factor is not None:
                raise ValueError("a capacity of experts counts whole sequences; token by token there are none")
        self.model, self.capacity = model, capacity
        self.lengths_B = np.zeros(0, np.int64)
        """Positions read of each text."""
        self._caches: list[LayerCache] = []

    def cache_figures(self) -> dict[str, Any]:
        """What the cache holds: its dtype, all its bytes, and how many layers there are of each form."""
        forms = Counter(tuple(cache.figures().items()) for cache in self._caches)
        return {
            "dtype": str(self.model.embed_tokens.weight.dtype).removeprefix("paddle."),
            "texts": len(self.lengths_B),
            "bytes": sum(cache.num_bytes for cache in self._caches),
            "layers": [{"count": count, **dict(form)} for form, count in forms.items()],
        }

    def select(self, texts: Sequence[int]) -> None:
        """Go on with these texts, in this order, and forget the others; one that comes twice goes on as two."""
        self.lengths_B = self.lengths_B[list(texts)]
        for cache in self._caches:
            cache.select(texts)

    @paddle.no_grad()
    def read(self, tokens: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        """Take in the prompts, of whatever lengths, and after them one token of each text.

        Returns:
            float32 logits `[B, V]` of what follows.
        """
        counts_B = np.array([len(row) for row in tokens], np.int64)
        if not self._caches:
            self.lengths_B = np.zeros(len(tokens), np.int64)
            self._caches = [self._new_cache(block.self_attn) for block in self.model.layers]
        is_prompt = not self.lengths_B.any()
        if len(tokens) != len(self.lengths_B) or counts_B.min() < 1 or (counts_B.max() > 1 and not is_prompt):
            raise ValueError(f"{counts_B.tolist()} tokens of the texts after {self.lengths_B.tolist()}")
        if (self.lengths_B + counts_B).max() > self.capacity:
            raise ValueError(f"a text of more than {self.capacity} tokens")
        tokens_BS = np.zeros((len(tokens), counts_B.max()), np.int64)  # any token pads
        for row, padded in zip(tokens, tokens_BS, strict=True):
            padded[: len(row)] = row
        x_BSD = self._hidden(tokens_BS, counts_B, is_prompt)
        last_B = np.arange(len(tokens)) * tokens_BS.shape[1] + counts_B - 1
        self.lengths_B = self.lengths_B + counts_B
        x_BD = paddle.gather(x_BSD.reshape([-1, x_BSD.shape[-1]]), paddle.to_tensor(last_B))
        return self.model.head(x_BD).astype("float32").numpy()

    def _new_cache(self, attention: SelfAttentionGrouped) -> LayerCache:
        weight, head_dim = attention.k_proj.weight, attention.head_dim
        room = min(self.capacity, attention.window or self.capacity)
        return LayerCache(len(self.lengths_B), weight.shape[1] // head_dim, room, head_dim, weight.dtype)

    def _hidden(
        self, tokens_BS: np.ndarray[Any, Any], counts_B: np.ndarray[Any, Any], is_prompt: bool
    ) -> paddle.Tensor:
        """What the last block gives for the tokens."""
        x_BSD, width = self.model.embed_tokens(paddle.to_tensor(tokens_BS)), tokens_BS.shape[1]
        readings = {
            room: Reading.of(self.lengths_B, counts_B, width, room, x_BSD.dtype)
            for room in {cache.room for cache in self._caches}
        }
        positions = paddle.arange(width) if is_prompt else paddle.to_tensor(self.lengths_B)
        for block, cache in zip(self.model.layers, self._caches, strict=True):
            x_BSD = x_BSD + self._attend(block, x_BSD, positions, is_prompt, cache, readings[cache.room])
            x_BSD = x_BSD + block.mlp(block.post_attention_layernorm(x_BSD))
        return x_BSD

    def _attend(
        self,
        block: Block,
        x_BSD: paddle.Tensor,
        positions: paddle.Tensor,
        is_prompt: bool,
        cache: LayerCache,
        reading: Reading,
    ) -> paddle.Tensor:
        """What the block's attention computes for the tokens that are read."""
        layer, x_BSD = block.self_attn, block.input_layernorm(x_BSD)
        batch, count, _ = x_BSD.shape
        heads = [batch, count, -1, layer.head_dim]
        cos, sin = (paddle.gather(table, positions) for table in block.rope.at(self.capacity, layer.head_dim))

        def rotated(x_BSXH: paddle.Tensor) -> paddle.Tensor:
            if is_prompt:  # positions of a text, the same for all
                return apply_rope(x_BSXH, cos, sin)
            return apply_rope(x_BSXH.transpose([1, 0, 2, 3]), cos, sin).transpose([1, 0, 2, 3])  # one of each text

        q_BSNH = rotated(layer.q_norm(layer.q_proj(x_BSD).reshape(heads)))
        k_BSKH = rotated(layer.k_norm(layer.k_proj(x_BSD).reshape(heads)))
        v_BSKH = layer.v_proj(x_BSD).reshape(heads)
        cache.write(reading, k_BSKH, v_BSKH)
        if is_prompt:
            y_BSNH = causal_attention(q_BSNH, k_BSKH, v_BSKH, window=layer.window)
        else:
            y_BSNH = cache.attend(reading, q_BSNH)
        y_BSX = y_BSNH.reshape([batch, count, -1])
        if layer.output_gate:
            y_BSX = y_BSX * F.sigmoid(layer.g_proj(x_BSD))
        return layer.o_proj(y_BSX)
