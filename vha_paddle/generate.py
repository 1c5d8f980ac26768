"""Text from an exported model, token by token, by a decoder that remembers what it has read.

THE KEY/VALUE CACHE IS HERE, not in the attention kinds: those serve training, see whole sequences and keep no
state. Decoding runs the same layers one token at a time. Grouped-query models alone are decoded: a model with
virtual heads folds into one (export it first), so K heads are cached, 2 * K * H values per token and layer. A layer
with a sliding window keeps its last `window` positions and no more.

Shapes: B batch, S positions, D hidden, N query heads, K KV heads, G = N / K query heads that read one KV head
(query head n reads KV head n // G), H head dim, V vocabulary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from vha_paddle.attention.grouped import SelfAttentionGrouped
from vha_paddle.attention.virtual_head import SelfAttentionVHA
from vha_paddle.data.tokenizer import Tokenizer
from vha_paddle.errors import UserError
from vha_paddle.evaluate import load_model
from vha_paddle.export.reader import CONFIG_FILE, read_hf_model
from vha_paddle.model.decoder import Decoder
from vha_paddle.model.moe import MoE
from vha_paddle.ops.attention import causal_attention
from vha_paddle.ops.rope import apply_rope
from vha_paddle.sampling import Sampling, choose_token

TOKENIZER_FILE = "tokenizer.model"
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class LayerCache:
    """Keys and values of one layer, `[B, K, S, H]` each: the last S positions, S being the `room`.

    Position p lies in slot p % room, so the newest takes the place of the one that has left the window. Attention
    sums over positions, and RoPE has told the keys which is theirs: the order of the slots does not matter.
    """

    def __init__(self, batch: int, num_kv_heads: int, room: int, head_dim: int, dtype: Any) -> None:
        shape = [batch, num_kv_heads, room, head_dim]
        self.room = room
        self.k_BKSH = paddle.zeros(shape, dtype)
        self.v_BKSH = paddle.zeros(shape, dtype)

    @property
    def num_bytes(self) -> int:
        return sum(int(tensor.size) * int(tensor.element_size()) for tensor in (self.k_BKSH, self.v_BKSH))

    def figures(self) -> dict[str, int]:
        """Its heads K, the positions that it has room for, and the bytes for one of them of one sequence."""
        batch, num_kv_heads, _, _ = self.k_BKSH.shape
        bytes_per_token = self.num_bytes // (batch * self.room)
        return {"num_key_value_heads": num_kv_heads, "positions": self.room, "bytes_per_token": bytes_per_token}

    def write(self, start: int, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor) -> None:
        """Put the keys and values of positions `start`, `start + 1`, … into their slots; of more than fit, the last."""
        end = start + k_BSKH.shape[1]
        first = max(start, end - self.room)
        while first < end:
            slot = first % self.room
            stop = min(end, first + self.room - slot)  # as far as the slots go without a jump to the first
            slots, positions = slice(slot, slot + stop - first), slice(first - start, stop - start)
            self.k_BKSH[:, :, slots] = k_BSKH[:, positions].transpose([0, 2, 1, 3])
            self.v_BKSH[:, :, slots] = v_BSKH[:, positions].transpose([0, 2, 1, 3])
            first = stop

    def attend(self, q_B1NH: paddle.Tensor, length: int) -> paddle.Tensor:
        """Attention of the newest position's query over those of the first `length` positions that are kept."""
        batch, _, num_query, head_dim = q_B1NH.shape
        num_kv, kept = self.k_BKSH.shape[1], min(length, self.room)
        q_BKGH = q_B1NH.reshape([batch, num_kv, num_query // num_kv, head_dim]) * head_dim**-0.5
        scores_BKGS = paddle.matmul(q_BKGH, self.k_BKSH[:, :, :kept], transpose_y=True)
        weights_BKGS = F.softmax(scores_BKGS.astype("float32"), axis=-1).astype(q_B1NH.dtype)
        return paddle.matmul(weights_BKGS, self.v_BKSH[:, :, :kept]).reshape(q_B1NH.shape)


class CachedDecoder:
    """A grouped decoder and its cache: it reads a prompt, then one token at a time.

    Args:
        model: whole in this process. Its dtype is the cache's.
        batch: sequences B, all of one length.
        capacity: positions that can be read.

    Raises:
        UserError: the model has virtual heads, keeps something else than keys and values, or has experts with a
            capacity.
    """

    def __init__(self, model: Decoder, batch: int, capacity: int) -> None:
        if model.mesh.tensor_degree != 1:
            raise ValueError("decoding needs the whole model in one process")
        attentions = [block.self_attn for block in model.layers]
        for block in model.layers:
            _require_grouped(block.self_attn)
            if isinstance(block.mlp, MoE) and block.mlp.config.capacity_factor is not None:
                raise UserError("model.experts.capacity_factor counts whole sequences; token by token there are none")
        self.model, self.batch, self.capacity, self.length = model, batch, capacity, 0
        self._caches = []
        for attention in attentions:
            weight, head_dim = attention.k_proj.weight, attention.head_dim
            room = min(capacity, attention.window or capacity)
            self._caches.append(LayerCache(batch, weight.shape[1] // head_dim, room, head_dim, weight.dtype))

    def cache_figures(self) -> dict[str, Any]:
        """What the cache holds: its dtype, all its bytes, and how many layers there are of each form."""
        forms = Counter(tuple(cache.figures().items()) for cache in self._caches)
        return {
            "dtype": str(self._caches[0].k_BKSH.dtype).removeprefix("paddle."),
            "bytes": sum(cache.num_bytes for cache in self._caches),
            "layers": [{"count": count, **dict(form)} for form, count in forms.items()],
        }

    @paddle.no_grad()
    def read(self, tokens_BS: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Take in the whole prompt, or one token after it; float32 logits `[B, V]` of what follows."""
        batch, count = tokens_BS.shape
        end = self.length + count
        if batch != self.batch or end > self.capacity or (self.length > 0 and count != 1):
            raise ValueError(f"{batch} x {count} tokens after {self.length}; room is {self.batch} x {self.capacity}")
        x_BSD = self.model.embed_tokens(paddle.to_tensor(tokens_BS.astype(np.int64)))
        for block, cache in zip(self.model.layers, self._caches, strict=True):
            cos_SH, sin_SH = (
                table[self.length : end] for table in block.rope.at(self.capacity, block.self_attn.head_dim)
            )
            x_BSD = x_BSD + self._attend(block.self_attn, block.input_layernorm(x_BSD), cos_SH, sin_SH, cache)
            x_BSD = x_BSD + block.mlp(block.post_attention_layernorm(x_BSD))
        self.length = end
        return self.model.head(x_BSD[:, -1]).astype("float32").numpy()

    def _attend(
        self,
        layer: SelfAttentionGrouped,
        x_BSD: paddle.Tensor,
        cos_SH: paddle.Tensor,
        sin_SH: paddle.Tensor,
        cache: LayerCache,
    ) -> paddle.Tensor:
        """What `layer` computes for the positions from `self.length` on."""
        start, (batch, count, _) = self.length, x_BSD.shape
        heads = [batch, count, -1, layer.head_dim]
        q_BSNH = layer.q_norm(layer.q_proj(x_BSD).reshape(heads))
        k_BSKH = layer.k_norm(layer.k_proj(x_BSD).reshape(heads))
        v_BSKH = layer.v_proj(x_BSD).reshape(heads)
        q_BSNH, k_BSKH = apply_rope(q_BSNH, cos_SH, sin_SH), apply_rope(k_BSKH, cos_SH, sin_SH)
        cache.write(start, k_BSKH, v_BSKH)
        if start == 0:
            y_BSNH = causal_attention(q_BSNH, k_BSKH, v_BSKH, window=layer.window)
        else:
            y_BSNH = cache.attend(q_BSNH, start + 1)
        y_BSX = y_BSNH.reshape([batch, count, -1])
        if layer.output_gate:
            y_BSX = y_BSX * F.sigmoid(layer.g_proj(x_BSD))
        return layer.o_proj(y_BSX)


def _require_grouped(attention: nn.Layer) -> None:
    if isinstance(attention, SelfAttentionVHA):
        raise UserError(
            "the model has virtual heads (model.attention.kind=vha), which are folded before decoding; "
            "export it first with tools/fold_export.py and give the exported directory"
        )
    if not isinstance(attention, SelfAttentionGrouped):
        raise UserError("only attention of kind grouped is decoded; evaluate the checkpoint with tools/evaluate.py")


def generate(
    decoder: CachedDecoder, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, end_id: int
) -> Iterator[int]:
    """New tokens as they are chosen, for a fresh decoder of batch 1. After `end_id` nothing follows it.

    Raises:
        RunError: the model's logits are not finite.
    """
    generator = np.random.Generator(np.random.Philox(sampling.seed))
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        token = choose_token(decoder.read(np.array([tokens]))[0], sampling, generator)
        yield token
        if token == end_id:
            return
        tokens = [token]


class TextStream:
    """Text of tokens as they come, in whole characters, though some tokens are single bytes of one.

    What `push` and `finish` return, joined, is the decoded text of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._emitted = 0  # characters of the pending tokens' text that were returned already

    def push(self, token: int) -> str:
        """The text that is settled by this token; ids that the tokenizer does not know have none."""
        if token < self._tokenizer.vocab_size:
            self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        # Each byte of a character that may still be completed shows as one replacement character.
        unsettled = min(len(text) - len(text.rstrip(_REPLACEMENT)), _LONGEST_CHARACTER - 1)
        settled = text[self._emitted : len(text) - unsettled]
        self._emitted += len(settled)
        if unsettled == 0:
            self._pending, self._emitted = [], 0
        return settled

    def finish(self) -> str:
        """What is left at the end: bytes of a character that was never completed."""
        return self._tokenizer.decode(self._pending)[self._emitted :]


@dataclass(frozen=True)
class ExportedModel:
    """What an exported directory holds, ready to write text."""

    model: Decoder
    tokenizer: Tokenizer
    max_positions: int
    """Longest sequence, prompt and new tokens together."""
    begin_id: int
    """What a text without a prompt starts after."""
    end_id: int

    @classmethod
    def load(cls, directory: Path) -> ExportedModel:
        """Read an exported directory.

        Raises:
            UserError: it is none (a checkpoint is exported first), or its files do not fit together.
        """
        if not (directory / CONFIG_FILE).is_file():
            raise UserError(f"{directory}: not an exported model; export it first with tools/fold_export.py")
        config = read_hf_model(directory)
        tokenizer = Tokenizer.load(directory / TOKENIZER_FILE)
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(
                f"{directory / TOKENIZER_FILE}: {tokenizer.vocab_size} ids, more than the model's "
                f"vocab_size={config.vocab_size}; export the model again"
            )
        values = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        begin_id, end_id = values.get("bos_token_id"), values.get("eos_token_id")
        for key, value in {"bos_token_id": begin_id, "eos_token_id": end_id}.items():
            if type(value) is not int or not 0 <= value < config.vocab_size:
                raise UserError(f"{directory / CONFIG_FILE}: {key}={value}: must be an id; export the model again")
        return cls(load_model(directory), tokenizer, config.max_position_embeddings, begin_id, end_id)

    def encode(self, prompt: str) -> list[int]:
        """Ids to read before the first new token: the prompt's, or the begin token where it is empty.

        Raises:
            UserError: the prompt is not valid Unicode.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid UTF-8; give text") from None
        return self.tokenizer.encode(prompt) or [self.begin_id]

    def decoder(self, num_prompt_tokens: int, max_new_tokens: int) -> CachedDecoder:
        """A fresh decoder with room for a prompt and what follows it.

        Raises:
            UserError: no token is asked for, or more than the model's positions allow.
        """
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        total = num_prompt_tokens + max_new_tokens
        if total > self.max_positions:
            raise UserError(
                f"max_new_tokens={max_new_tokens} after a prompt of {num_prompt_tokens} is {total} tokens: "
                f"at most max_position_embeddings={self.max_positions} are possible; shorten one of them"
            )
        return CachedDecoder(self.model, batch=1, capacity=total)
