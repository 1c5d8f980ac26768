"""Which products are computed in FP8 (`precision.fp8`), and what the device needs for that. The one place."""

from __future__ import annotations

from typing import Literal

import paddle

from vha_paddle.config.schema import Precision
from vha_paddle.errors import UserError
from vha_paddle.ops.linear import PLAIN, Products
from vha_paddle.precision.emulation import EMULATED
from vha_paddle.precision.kernels import CAPABILITY, KERNELS

Fp8 = Literal["none", "experts", "all"]


def projection_products(fp8: Fp8) -> Products:
    """For the projections of attention and of feed-forwards that every token uses."""
    return _fp8_products() if fp8 == "all" else PLAIN


def expert_products(fp8: Fp8) -> Products:
    """For the projections of experts."""
    return PLAIN if fp8 == "none" else _fp8_products()


def _fp8_products() -> Products:
    return EMULATED if paddle.device.get_device() == "cpu" else KERNELS


def check_fp8(precision: Precision) -> None:
    """Refuse FP8 where the device has no kernels for it; on a CPU they are emulated, as the recipe's schema says.

    Raises:
        UserError: the GPU is too old, or the weights on it are not bfloat16.
    """
    if precision.fp8 == "none" or paddle.device.get_device() == "cpu":
        return
    capability = paddle.device.cuda.get_device_capability()
    if capability < (CAPABILITY, 0):
        raise UserError(
            f"precision.fp8={precision.fp8}: needs a GPU of compute capability {CAPABILITY}.0 or more, and this one "
            f"has {capability[0]}.{capability[1]}; override with precision.fp8=none"
        )
    if precision.compute != "bfloat16":
        raise UserError(
            f"precision.fp8={precision.fp8}: the kernels take bfloat16, and precision.compute={precision.compute}; "
            "override with precision.compute=bfloat16 or precision.fp8=none"
        )
