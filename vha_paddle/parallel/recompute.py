"""Activations computed again in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable

import paddle


def recomputed(function: Callable[..., paddle.Tensor], *tensors: paddle.Tensor) -> paddle.Tensor:
    """`function(*tensors)`, of which only the arguments are kept for backward; communication inside runs twice.

    The random numbers of this package are functions of what they are drawn for, so no generator is saved.
    """
    if not paddle.is_grad_enabled():
        return function(*tensors)
    from paddle.distributed.fleet.utils import recompute

    result: paddle.Tensor = recompute(function, *tensors, preserve_rng_state=False)
    return result
