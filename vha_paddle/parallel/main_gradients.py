"""Gradients of bfloat16 parameters, added up in float32.

Backward makes the gradient of a microbatch in the parameter's dtype. A bfloat16 sum of many would lose what is
smaller than 1/256 of it, so the sum is kept in float32, as `main_grad` of the parameter: the name under which fleet's
pipeline sums the gradients of tied weights. All that follows is float32 too: sums over ranks, the norm, clipping, and
what AdamW is given for the update of the master weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import paddle


def gradient_of(parameter: paddle.Tensor) -> Any:
    """The sum over the microbatches so far, a tensor; None before the first one."""
    return parameter.main_grad if parameter.dtype == paddle.bfloat16 else parameter.grad


def set_gradient(parameter: paddle.Tensor, gradient: paddle.Tensor | None) -> None:
    """Replace or take away what `gradient_of` gives."""
    if parameter.dtype == paddle.bfloat16:
        parameter.main_grad, gradient = gradient, None
    parameter.grad = gradient


def widened(gradient: paddle.Tensor) -> paddle.Tensor:
    """A gradient as backward made it, ready to be added to others."""
    return gradient.astype("float32") if gradient.dtype == paddle.bfloat16 else gradient


def accumulate_in_float32(parameters: Sequence[paddle.Tensor]) -> None:
    """From now on backward adds to the float32 sums of those parameters that are bfloat16."""
    for parameter in parameters:
        if parameter.dtype == paddle.bfloat16:
            set_gradient(parameter, None)
            parameter._register_backward_hook(functools.partial(_add, parameter))


@paddle.no_grad()
def _add(parameter: paddle.Tensor) -> None:
    gradient, total = widened(parameter.grad), gradient_of(parameter)
    set_gradient(parameter, gradient if total is None else total.add_(gradient))
