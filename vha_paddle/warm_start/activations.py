"""What the fits need to know of the source's activations, as sums over tokens. Runs the models, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from vha_paddle.config import GroupedAttention, Model
from vha_paddle.evaluate import decoder_with
from vha_paddle.model.decoder import Decoder
from vha_paddle.warm_start.factorise import OutputMoments

TokenBatches = Iterable[np.ndarray[Any, Any]]
"""Batches of tokens, `[B, S]`."""

Seen = Callable[[int, tuple[Any, ...], paddle.Tensor], None]
"""Given a layer's number, the arguments of its attention (inputs `[B, S, D]` first) and what it returned."""


def input_moments(source: Decoder, layers: Sequence[int], batches: TokenBatches) -> dict[int, np.ndarray]:
    """Sum of x^T x over the inputs of the attention of some layers, `[D, D]` each.

    Where the projections have a bias, x has a last channel that is always 1.
    """
    moments: dict[int, np.ndarray] = {}

    def seen(layer: int, arguments: tuple[Any, ...], out_BSD: paddle.Tensor) -> None:
        x_TD = _rows(arguments[0])
        if source.layers[layer].self_attn.q_proj.bias is not None:
            x_TD = np.append(x_TD, np.ones((len(x_TD), 1)), axis=1)
        moments[layer] = moments.get(layer, 0.0) + x_TD.T @ x_TD

    _watch(source, layers, batches, seen)
    return moments


def output_moments(
    source: Decoder, plain: Model, weights: Mapping[str, np.ndarray], layers: Sequence[int], batches: TokenBatches
) -> dict[int, OutputMoments]:
    """What `fit_postmix` needs, of some layers: their heads on the source's inputs, against the source's outputs.

    Args:
        plain: the target without its maps: grouped attention in these layers.
        weights: of these layers' attention, Premix folded, under canonical names.
    """
    target = decoder_with(plain, weights.items())
    moments: dict[int, OutputMoments] = {}
    caught: list[np.ndarray] = []
    for layer in layers:
        attention = plain.attention_of(layer)
        assert isinstance(attention, GroupedAttention), "checked in layers_to_convert"
        moments[layer] = OutputMoments.empty(attention.num_attention_heads, attention.head_dim)
        projection = target.layers[layer].self_attn.o_proj
        projection.register_forward_pre_hook(lambda module, arguments: caught.append(_rows(arguments[0])))

    def seen(layer: int, arguments: tuple[Any, ...], out_BSD: paddle.Tensor) -> None:
        target.layers[layer].self_attn(*arguments)
        y_TX = caught.pop()
        y_TNH = y_TX.reshape(len(y_TX), plain.attention_of(layer).num_attention_heads, -1)
        out_TD = _rows(out_BSD) - weights.get(f"{o_proj(layer)}.bias", 0.0)  # the target adds the same one
        moments[layer].add(y_TNH, out_TD, weights[f"{o_proj(layer)}.weight"])

    _watch(source, layers, batches, seen)
    return moments


def o_proj(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.o_proj"


def _watch(model: Decoder, layers: Sequence[int], batches: TokenBatches, seen: Seen) -> None:
    """Run the model over all batches without gradients, and show the attention of some layers."""

    def hook(layer: int) -> Callable[[Any, tuple[Any, ...], paddle.Tensor], None]:
        return lambda module, arguments, out_BSD: seen(layer, arguments, out_BSD)

    hooks = [model.layers[layer].self_attn.register_forward_post_hook(hook(layer)) for layer in layers]
    try:
        with paddle.no_grad():
            for tokens_BS in batches:
                model(paddle.to_tensor(tokens_BS))
    finally:
        for handle in hooks:
            handle.remove()


def _rows(x_BSD: paddle.Tensor) -> np.ndarray:
    """One row for each token, float64."""
    array: np.ndarray = x_BSD.numpy().astype(np.float64)
    return array.reshape(-1, array.shape[-1])
