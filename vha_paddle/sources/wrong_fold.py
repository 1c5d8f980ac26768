"""What a fold that does not hold would cost, measured on the weights themselves: for the refusals, in figures.

    norm before Premix    right: norm(q_i) W_premix[g]         folded anyway: norm(q_i W_premix[g])
    gate after Postmix    right: (M y) * sigmoid(x W_gate)     folded anyway: M (y * sigmoid(x W_gate))

Each layer's attention is computed both ways, in numpy and float64, on the same random tokens of unit scale. The error
is the norm of the difference over the norm of the right one.

Letters: T tokens, D hidden, P physical heads, K key/value heads, N virtual heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vha_paddle.config import Model, VirtualHeadAttention
from vha_paddle.fold import postmix_matrix
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX
from vha_paddle.sources.base import Weights
from vha_paddle.tensors import attention_tensors

Array = np.ndarray[Any, Any]

NUM_TOKENS = 32
SEED = 0


@dataclass(frozen=True)
class WrongFold:
    """Relative errors by layer."""

    queries: tuple[float, ...]
    outputs: tuple[float, ...]
    """Of the attention, after its output projection."""

    def __str__(self) -> str:
        worst = int(np.argmax(self.outputs))
        return (
            f"measured on these weights, folding anyway would change the attention's outputs by "
            f"{np.mean(self.outputs):.2g} of their size in the mean of {len(self.outputs)} layers and by "
            f"{self.outputs[worst]:.2g} in layer {worst}" + self._of_queries()
        )

    def _of_queries(self) -> str:
        if not any(self.queries):
            return ""
        return f", its queries by {np.mean(self.queries):.2g} in the mean and {max(self.queries):.2g} at worst"


def fold_despite_norm_order(weights: Weights, model: Model) -> WrongFold:
    """Of a model whose norm of the queries comes before Premix, folded as if it came after it.

    Args:
        weights: of the model, whose section cannot say that order.
    """
    return _measured(weights, model, lambda layer: (layer.output(norm_first=True), layer.output(norm_first=False)))


def fold_despite_gate(weights: Weights, model: Model) -> WrongFold:
    """Of a model whose gate comes after Postmix, folded as if it came before it."""
    return _measured(weights, model, lambda layer: (layer.output(gate_first=False), layer.output(gate_first=True)))


def _measured(
    weights: Weights, model: Model, both_ways: Callable[[_Layer], tuple[tuple[Array, Array], tuple[Array, Array]]]
) -> WrongFold:
    errors = []
    for index in range(model.num_hidden_layers):
        attention = model.attention_of(index)
        if not isinstance(attention, VirtualHeadAttention):
            continue
        prefix = f"model.layers.{index}.self_attn."
        names = [spec.name for spec in attention_tensors(attention, model.hidden_size)]
        tensors = {name: weights.read(prefix + name).astype(np.float64) for name in names}
        right, wrong = both_ways(_Layer(tensors, attention, model))
        errors.append([_relative(folded, exact) for folded, exact in zip(wrong, right, strict=True)])
    queries, outputs = zip(*errors, strict=True)
    return WrongFold(queries, outputs)


def _relative(folded: Array, exact: Array) -> float:
    return float(np.linalg.norm(folded - exact) / np.linalg.norm(exact))


class _Layer:
    """One attention layer on random tokens."""

    def __init__(self, tensors: Mapping[str, Array], attention: VirtualHeadAttention, model: Model) -> None:
        self.tensors, self.attention, self.model = tensors, attention, model
        self.x_TD = np.random.default_rng(SEED).standard_normal((NUM_TOKENS, model.hidden_size))

    def output(self, norm_first: bool = False, gate_first: bool = True) -> tuple[Array, Array]:
        """Queries before RoPE `[T, N, H]`, and the layer's output `[T, D]`."""
        tensors, attention = self.tensors, self.attention
        K, H = attention.num_key_value_heads, attention.head_dim
        q = self._heads("q_proj", attention.projected_head_dim)
        q = self._norm(q, "q_norm") if norm_first else q
        if PREMIX in tensors:
            q = np.einsum("tpq,kqh->tkph", q, tensors[PREMIX]).reshape(NUM_TOKENS, -1, H)
        q = q if norm_first else self._norm(q, "q_norm")
        k, v = self._norm(self._heads("k_proj", H), "k_norm"), self._heads("v_proj", H)
        grouped = self._rotated(q).reshape(NUM_TOKENS, K, -1, H)
        scores = np.einsum("tkgh,skh->kgts", grouped, self._rotated(k)) / np.sqrt(H)
        scores = np.where(np.tri(NUM_TOKENS, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        y = np.einsum("kgts,skh->tkgh", weights, v).reshape(NUM_TOKENS, -1, H)
        if attention.output_gate != "none":
            gate = 1 / (1 + np.exp(-self._heads("g_proj", H)))
            y = self._postmix(y * gate) if gate_first else self._postmix(y) * gate
        else:
            y = self._postmix(y)
        return q, y.reshape(NUM_TOKENS, -1) @ tensors["o_proj.weight"]

    def _heads(self, name: str, width: int) -> Array:
        projected = self.x_TD @ self.tensors[f"{name}.weight"]
        if f"{name}.bias" in self.tensors:
            projected = projected + self.tensors[f"{name}.bias"]
        return projected.reshape(NUM_TOKENS, -1, width)

    def _norm(self, heads: Array, name: str) -> Array:
        if not self.attention.qk_norm:
            return heads
        mean_square = np.mean(heads * heads, axis=-1, keepdims=True)
        return heads / np.sqrt(mean_square + self.model.rms_norm_eps) * self.tensors[f"{name}.weight"]

    def _postmix(self, y_TNH: Array) -> Array:
        if POSTMIX_A not in self.tensors:
            return y_TNH
        return np.einsum("mn,tnh->tmh", postmix_matrix(self.tensors[POSTMIX_A], self.tensors[POSTMIX_B]), y_TNH)

    def _rotated(self, heads: Array) -> Array:
        half = heads.shape[-1] // 2
        angles = np.outer(np.arange(NUM_TOKENS), self.model.rope_theta ** (-np.arange(half) / half))[:, None]
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
