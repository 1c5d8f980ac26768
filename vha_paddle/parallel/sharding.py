"""ZeRO: what the ranks of the sharding axis divide, given the owners of `ownership.py`.

    stage 1   the optimizer's state    after the update the owners broadcast their weights
    stage 2   and the gradients        each is summed to its owner as soon as backward has made it
    stage 3   and the weights          a unit's are gathered for its forward, and again for its backward

Communication happens inside forward and backward, in the order of the layers, which is the same on every rank.
The parameters of experts are owned along a part of the axis only, and stay at stage 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.autograd import PyLayer

from vha_paddle.parallel.main_gradients import accumulate_in_float32, set_gradient, widened
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import owners_of
from vha_paddle.parallel.placement import info_of

Owned = Sequence[tuple[paddle.Tensor, int]]
"""Parameters, each with the place of its owner on the sharding axis."""


class WeightBroadcast:
    """Gives every sharding rank the values that the owners updated, of the parameters that all ranks keep."""

    def __init__(self, parameters: Sequence[paddle.Tensor], mesh: Mesh) -> None:
        """`parameters` are all of the model, on which the owners depend."""
        self.mesh = mesh
        owners = owners_of(parameters, mesh)
        kept_by_all = mesh.sharding_stage < 3
        self._moving = [
            (parameter, owners[info_of(parameter).name])
            for parameter in parameters
            if mesh.sharding_degree > 1 and (kept_by_all or info_of(parameter).is_expert)
        ]

    def __call__(self) -> None:
        with paddle.no_grad():
            for parameter, owner in self._moving:
                is_expert = info_of(parameter).is_expert
                group = self.mesh.expert_sharding_group if is_expert else self.mesh.sharding_group
                if group is not None:
                    dist.broadcast(parameter, src=self.mesh.sharding_group.ranks[owner], group=group)


class Sharding:
    """What happens to one model's gradients and weights during backward: hooks on its parameters and layers."""

    def __init__(self, model: nn.Layer, units: Sequence[nn.Layer], mesh: Mesh) -> None:
        """Under stage 3 the weights of other owners are released at once.

        Args:
            model: its forward is the extent of a use of the parameters that lie in no unit.
            units: layers of `model` whose parameters are used by their own forward alone, on a first argument that
                is an activation or indices. Each is gathered and released as a whole.
        """
        self._gradients: _OwnersGradients | None = None
        self._units: list[_Unit] = []
        everything = model.parameters()
        if mesh.sharding_stage == 1:
            accumulate_in_float32(everything)
            return
        accumulate_in_float32([parameter for parameter in everything if info_of(parameter).is_expert])
        owners = owners_of(everything, mesh)

        def divided(parameters: Sequence[paddle.Tensor]) -> list[tuple[paddle.Tensor, int]]:
            infos = [info_of(parameter) for parameter in parameters]
            pairs = zip(parameters, infos, strict=True)
            return [(parameter, owners[info.name]) for parameter, info in pairs if not info.is_expert]

        self._gradients = _OwnersGradients(divided(everything), mesh)
        if mesh.sharding_stage == 3:
            in_units = {info_of(parameter).name for unit in units for parameter in unit.parameters()}
            rest = [parameter for parameter in everything if info_of(parameter).name not in in_units]
            self._units = [_hold_in_its_turn(unit, _Unit(divided(unit.parameters()), mesh)) for unit in units]
            self._units.append(_hold_through_backward(model, _Unit(divided(rest), mesh)))
            self._release()

    def finish_backward(self) -> None:
        """Once per optimizer step, after the last backward: from stage 2 on the owners' gradient is the sum over the
        axis and over the microbatches, and what other ranks own takes no memory here."""
        if self._gradients is not None:
            self._gradients.hand_over()
        self._release()

    def _release(self) -> None:
        for unit in self._units:
            unit.release()


class _OwnersGradients:
    """Sums each gradient to its owner when backward has made it.

    `.grad` is emptied every time, or the next microbatch would add to a sum that has crossed the wire already. The
    sum over the microbatches is kept here.
    """

    def __init__(self, parameters: Owned, mesh: Mesh) -> None:
        self.mesh = mesh
        self._sums: dict[str, paddle.Tensor] = {}
        self._mine = [parameter for parameter, owner in parameters if owner == mesh.sharding_rank]
        for parameter, owner in parameters:
            set_gradient(parameter, None)
            parameter._register_backward_hook(functools.partial(self._collect, parameter, owner))

    def _collect(self, parameter: paddle.Tensor, owner: int) -> None:
        group, name = self.mesh.sharding_group, info_of(parameter).name
        with paddle.no_grad():
            gradient = widened(parameter.grad)
            dist.reduce(gradient, dst=group.ranks[owner], group=group)
            if owner == self.mesh.sharding_rank:
                if name in self._sums:
                    self._sums[name].add_(gradient)
                else:
                    self._sums[name] = gradient.clone()  # emptying .grad empties every tensor that is it
            parameter.grad = None

    def hand_over(self) -> None:
        for parameter in self._mine:
            set_gradient(parameter, self._sums.pop(info_of(parameter).name))


class _Unit:
    """Parameters that are gathered from their owners and released together.

    Uses are counted, as a layer may be called again before an earlier call's backward is over.
    """

    def __init__(self, parameters: Owned, mesh: Mesh) -> None:
        self.parameters, self.mesh = parameters, mesh
        self._uses = 0

    def enter(self) -> None:
        """Before a use: every parameter is whole."""
        self._uses += 1
        if self._uses > 1:
            return
        group = self.mesh.sharding_group
        with paddle.no_grad():
            for parameter, owner in self.parameters:
                if owner == self.mesh.sharding_rank:
                    dist.broadcast(parameter, src=group.ranks[owner], group=group)
                else:
                    weight = paddle.empty(parameter.shape, parameter.dtype)
                    dist.broadcast(weight, src=group.ranks[owner], group=group)
                    # what autograd saved for backward is the parameter itself, and sees its memory come back
                    weight._share_buffer_to(parameter)

    def leave(self) -> None:
        """After a use."""
        self._uses -= 1
        if self._uses == 0:
            self.release()

    def release(self) -> None:
        """End all uses: only the owners keep the memory."""
        self._uses = 0
        for parameter, owner in self.parameters:
            if owner != self.mesh.sharding_rank:
                parameter._clear_data()


class _InBackward(PyLayer):
    """The identity, whose backward first does something."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, action: Callable[[], None]) -> paddle.Tensor:
        ctx.action = action
        return x.view(x.shape)  # a tensor of its own: Paddle takes x itself for an operation in place

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        ctx.action()
        return gradient


def _hold_in_its_turn(layer: nn.Layer, unit: _Unit) -> _Unit:
    """Whole during forward of `layer`, and during backward from its output to its first argument.

    A layer on indices is a table, whose gradient does not need its values: nothing is gathered for its backward.
    """

    def differentiates(x: paddle.Tensor) -> bool:
        return paddle.is_grad_enabled() and not x.stop_gradient

    def before(layer: nn.Layer, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        unit.enter()
        x, *others = arguments
        return (_InBackward.apply(x, unit.leave) if differentiates(x) else x, *others)

    def after(layer: nn.Layer, arguments: tuple[Any, ...], output: paddle.Tensor) -> paddle.Tensor:
        unit.leave()
        return _InBackward.apply(output, unit.enter) if differentiates(arguments[0]) else output

    layer.register_forward_pre_hook(before)
    layer.register_forward_post_hook(after)
    return unit


def _hold_through_backward(model: nn.Layer, unit: _Unit) -> _Unit:
    """Whole from forward of `model` on; without gradients to its end, else until the step's backwards are over."""

    def before(model: nn.Layer, arguments: tuple[Any, ...]) -> None:
        unit.enter()

    def after(model: nn.Layer, arguments: tuple[Any, ...], output: paddle.Tensor) -> None:
        if not paddle.is_grad_enabled():
            unit.leave()

    model.register_forward_pre_hook(before)
    model.register_forward_post_hook(after)
    return unit
