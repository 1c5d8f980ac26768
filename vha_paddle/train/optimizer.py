"""AdamW over the decoder: decay groups, master weights, and the state a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle

from vha_paddle.config import Recipe
from vha_paddle.parallel.main_gradients import gradient_of, set_gradient
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import owned
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.sharding import WeightBroadcast


class Optimizer:
    """AdamW with decoupled decay; VHA's maps decay toward the recipe's `optim.decay_target`.

    Paddle's AdamW can only decay toward zero, so Premix's decay toward the identity is applied here, before the
    step, as AdamW does its own: W -= lr * weight_decay * (W - I). Postmix is the identity where A and B are zero.
    """

    def __init__(self, parameters: Sequence[paddle.Tensor], recipe: Recipe, mesh: Mesh) -> None:
        self.parameters = list(parameters)
        self.before_update: Callable[[], None] = lambda: None
        """Called when the weights and the state are about to change."""
        self._broadcast = WeightBroadcast(self.parameters, mesh)
        mine = self._mine = owned(self.parameters, mesh)
        self.weight_decay = recipe.optim.weight_decay
        target = recipe.optim.decay_target
        to_zero = {"matrix"}
        if target in ("zero", "identity"):
            to_zero.add("postmix")
        if target == "zero":
            to_zero.add("premix")
        decaying = {info_of(p).name for p in mine if info_of(p).decay in to_zero}
        self._to_identity = [p for p in mine if info_of(p).decay == "premix" and target == "identity"]
        self._adamw: paddle.optimizer.AdamW | None = None
        if mine:  # more ranks than parameters leave some without; AdamW refuses an empty list
            self._adamw = paddle.optimizer.AdamW(
                learning_rate=recipe.optim.lr,
                beta1=recipe.optim.beta1,
                beta2=recipe.optim.beta2,
                epsilon=recipe.optim.eps,
                parameters=mine,
                weight_decay=self.weight_decay,
                apply_decay_param_fun=decaying.__contains__,
                multi_precision=recipe.precision.compute != "float32",
            )
            # made now and not at the first step, so that a checkpoint can be read into them
            block = paddle.base.framework.default_main_program().global_block()
            self._adamw._create_accumulators(block, mine)

    def step(self, learning_rate: float) -> None:
        """One update from the gradients at hand, which are then cleared."""
        self.before_update()
        if self._adamw is not None:
            self._adamw.set_lr(learning_rate)
            self._decay_to_identity(self._adamw._master_weights, learning_rate)
            self._update(self._adamw)
        self._broadcast()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Take away the gradients at hand, which an update has used or a skipped step must not leave."""
        for parameter in self.parameters:
            set_gradient(parameter, None)

    @paddle.no_grad()
    def _update(self, adamw: paddle.optimizer.AdamW) -> None:
        """As `adamw.step`, which knows only `parameter.grad`, and not the float32 gradients of bfloat16 weights."""
        gradients = [(parameter, gradient_of(parameter)) for parameter in self._mine]
        with_gradient = [pair for pair in gradients if pair[1] is not None]
        adamw._apply_optimize(loss=None, startup_program=None, params_grads=with_gradient)

    @paddle.no_grad()
    def _decay_to_identity(self, masters: Mapping[str, paddle.Tensor], learning_rate: float) -> None:
        for parameter in self._to_identity:
            weight = masters.get(parameter.name, parameter)
            identity = paddle.eye(weight.shape[-1], dtype=weight.dtype)
            weight.subtract_((weight - identity) * (learning_rate * self.weight_decay))

    def slots(self) -> dict[str, dict[str, paddle.Tensor]]:
        """State of each parameter that this rank owns, by slot name.

        `moment1`, `moment2`, and `master` where weights are not float32.
        """
        if self._adamw is None:
            return {}
        accumulators: dict[str, dict[str, paddle.Tensor]] = self._adamw._accumulators
        masters: dict[str, paddle.Tensor] = self._adamw._master_weights
        # AdamW files the moments of a parameter that has a master weight under the name of that
        updated = {parameter.name: masters.get(parameter.name, parameter).name for parameter in self._mine}
        slots = {
            slot: {name: accumulators[slot][key] for name, key in updated.items()} for slot in ("moment1", "moment2")
        }
        return slots | {"master": masters} if masters else slots

    def powers(self) -> dict[str, dict[str, Any]]:
        """beta1^t and beta2^t, which AdamW keeps for each parameter and which are equal for all."""
        if self._adamw is None:
            return {}
        accumulators: dict[str, dict[str, Any]] = self._adamw._accumulators
        return {name: accumulators[f"{name}_pow_acc"] for name in ("beta1", "beta2")}
