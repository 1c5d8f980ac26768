"""One block of a model at a time: built without values, filled with any weights, run, dropped."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from vha_paddle.checkpoint.load import device_tensor
from vha_paddle.config import Model
from vha_paddle.model.balance import Balance
from vha_paddle.model.block import BatchContext, Block
from vha_paddle.ops.backend import host_view, on_gpu
from vha_paddle.ops.routing import Routing
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.scope import Scope, building

Array = np.ndarray[Any, Any]

_TOKENS_AT_ONCE = 4096


class Blocks:
    """The blocks of a model, in a dtype. None is kept."""

    def __init__(self, model: Model, dtype: str) -> None:
        self.model, self.dtype = model, dtype
        with self._scope() as scope:
            self._context = BatchContext(model, scope)

    def choose_by(self, balance: Balance) -> None:
        """Let `balance` choose the experts of a mixture."""
        self._context.balance = balance

    def _scope(self) -> AbstractContextManager[Scope]:
        return building(Mesh(), self.dtype, seed=0, recompute="none", fp8="none")

    def block(self, layer: int) -> Block:
        """A block whose parameters have shapes and no memory yet."""
        with self._scope() as scope, paddle.LazyGuard():
            at = scope.child("model").child("layers").child(layer)
            block = Block(self.model, layer, at, self._context)
        block.eval()
        return block


def parameters_of(block: Block) -> dict[str, Any]:
    """A block's parameters by canonical name."""
    return {info_of(parameter).name: parameter for parameter in block.parameters()}


def in_attention(name: str) -> bool:
    """Whether a parameter belongs to a block's attention, its norm included."""
    return ".self_attn." in name or ".input_layernorm." in name


def fill(parameter: Any, values: Array) -> None:
    """Give a parameter its values, whatever their dtype, and its memory if it has none."""
    if not parameter._is_initialized():
        parameter.initialize()
    if on_gpu(parameter):  # not run on a GPU in this project's tests
        parameter.set_value(device_tensor(values, parameter.dtype))
    else:
        host_view(parameter)[...] = values  # a tensor made of them first would be one more copy


def values_of(parameter: Any) -> Array:
    """The values of a parameter; on a CPU its own memory."""
    return parameter.numpy() if on_gpu(parameter) else host_view(parameter)


def run(block: Block, x_BSD: Array) -> Array:
    """The block's output, some sequences at a time."""
    return _in_parts(block, x_BSD)


def attended(block: Block, x_BSD: Array) -> Array:
    """What the block's attention makes of the residual stream, its norm included: what it adds to the stream."""
    return _in_parts(lambda part_BSD: block.self_attn(block.input_layernorm(part_BSD), block.rope), x_BSD)


def _in_parts(layer: Callable[[paddle.Tensor], paddle.Tensor], x_BSD: Array) -> Array:
    rows = max(1, _TOKENS_AT_ONCE // x_BSD.shape[1])
    with paddle.no_grad():
        parts = [layer(paddle.to_tensor(x_BSD[start : start + rows])) for start in range(0, len(x_BSD), rows)]
    return np.concatenate([part.numpy() for part in parts])


class Recorded(Balance):
    """Remembers the experts that it chose."""

    def __init__(self, model: Model) -> None:
        assert model.experts is not None
        super().__init__(model.experts, model.num_hidden_layers, Mesh())
        self.choices: dict[int, list[Array]] = defaultdict(list)
        """By layer, in the order of the calls."""

    def route(self, layer: int, logits_TE: paddle.Tensor, counted: bool) -> Routing:
        routing = super().route(layer, logits_TE, counted)
        self.choices[layer].append(routing.experts_Tk)
        return routing


class Steered(Balance):
    """Sends each token where another model, which has run the layer before on as many tokens a call, sent it."""

    def __init__(self, model: Model, recorded: Recorded) -> None:
        assert model.experts is not None
        super().__init__(model.experts, model.num_hidden_layers, Mesh())
        self._recorded = recorded
        self._calls: dict[int, Iterator[int]] = defaultdict(itertools.count)
        self._agreements: list[float] = []

    def route(self, layer: int, logits_TE: paddle.Tensor, counted: bool) -> Routing:
        own = super().route(layer, logits_TE, counted)
        experts_Tk = self._recorded.choices[layer][next(self._calls[layer])]
        self._agreements.append(float((experts_Tk[:, :, None] == own.experts_Tk[:, None]).any(-1).mean()))
        weights_Tk = paddle.take_along_axis(F.softmax(logits_TE), paddle.to_tensor(experts_Tk), axis=1)
        if self.config.norm_topk_prob:
            weights_Tk = weights_Tk / weights_Tk.sum(axis=-1, keepdim=True)
        return replace(own, weights_Tk=weights_Tk, experts_Tk=experts_Tk)

    def mean_agreement(self) -> float:
        """Share of the other model's choices that this one's routers make too, over all layers."""
        return float(np.mean(self._agreements))
