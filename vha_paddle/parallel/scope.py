"""Where a layer is being built: its name, the mesh, the dtype, the seed; and the layers that know their role there.

A model asks its scope for a column-split linear, a row-split linear, a replicated one. At tensor degree 1 they are
plain layers, above it they are fleet's; names and logical shapes are the same. No model file asks for the degree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import paddle
from paddle import nn

from vha_paddle.ops.linear import Products, linear, with_bias
from vha_paddle.ops.norm import rms_norm
from vha_paddle.parallel.init import Constant, Initializer, generator_for
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import Decay, ParameterInfo, Placement
from vha_paddle.precision.policy import Fp8, expert_products, projection_products


class RMSNorm(nn.Layer):
    """Root-mean-square norm over the last axis with a learned gain."""

    def __init__(self, scope: Scope, size: int, eps: float, inside_tensor_region: bool = False) -> None:
        super().__init__()
        # each tensor rank sees other heads inside the region, and other tokens outside it when the sequence is cut
        partial_gradient = inside_tensor_region or scope.mesh.sequence
        placement = Placement.replicated((size,), partial_gradient)
        self.weight = scope.parameter(self, "weight", placement, Constant(1.0), "gain")
        self.eps = eps

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Layer):
    """y = x W + b, W `[in, out]`, whole on every rank; `bias` says how b is held, None that there is none."""

    def __init__(
        self, scope: Scope, placement: Placement, initializer: Initializer, bias: Placement | None = None
    ) -> None:
        super().__init__()
        self.weight = scope.parameter(self, "weight", placement, initializer, "matrix")
        self.bias = scope.bias(self, bias)
        self.products = scope.products

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return with_bias(linear(x, self.weight, self.products), self.bias)


class OneHeadLinear(Linear):
    """The projection of all heads, whole on every rank, which computes the one head that is its own."""

    def __init__(
        self,
        scope: Scope,
        placement: Placement,
        initializer: Initializer,
        columns: slice,
        bias: Placement | None = None,
    ) -> None:
        super().__init__(scope, placement, initializer, bias)
        self.columns = columns

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = linear(x, self.weight[:, self.columns], self.products)
        return with_bias(y, None if self.bias is None else self.bias[self.columns])


@dataclass(frozen=True)
class Scope:
    """A place in the model under construction. `child` descends; the other methods create layers there."""

    mesh: Mesh
    dtype: str
    seed: int
    path: str
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in backward rather than kept (`memory.recompute`)."""
    fp8: Fp8 = "none"
    """Whose factors are rounded to FP8 (`precision.fp8`)."""

    @classmethod
    def standalone(cls, prefix: str) -> Scope:
        """For a layer used on its own in one process: a fresh name, and a seed from Paddle's generator."""
        seed = int(paddle.randint(0, 2**31 - 1, [1]).numpy()[0])
        return cls(Mesh(), paddle.get_default_dtype(), seed, paddle.utils.unique_name.generate(prefix))

    def child(self, name: str | int) -> Scope:
        return replace(self, path=f"{self.path}.{name}" if self.path else str(name))

    def without_fp8(self) -> Scope:
        """The same place, for a layer that FP8 leaves alone: the output projection, a router."""
        return replace(self, fp8="none")

    @property
    def products(self) -> Products:
        """How a linear layer made here computes; also for products with a weight that is made of such a layer's."""
        return projection_products(self.fp8)

    @property
    def expert_products(self) -> Products:
        """How experts made here compute."""
        return expert_products(self.fp8)

    def parameter(
        self, owner: nn.Layer, name: str, placement: Placement, initializer: Initializer, decay: Decay
    ) -> paddle.Tensor:
        """This rank's part of a parameter, initialised; `owner` is the layer it becomes an attribute of."""
        shape = list(placement.local_shape(self.mesh.seat))
        parameter = owner.create_parameter(shape, attr=_zeros(), dtype=self.dtype)
        self._adopt(parameter, name, placement, initializer, decay)
        return parameter

    def bias(self, owner: nn.Layer, placement: Placement | None) -> paddle.Tensor | None:
        """The bias of `owner`, zero at the start and without decay; None where no placement is given."""
        return None if placement is None else self.parameter(owner, "bias", placement, Constant(0.0), "bias")

    def column_linear(
        self,
        in_features: int,
        out_features: int,
        initializer: Initializer,
        view: tuple[int, ...] | None = None,
        axis: int = 1,
        bias: bool = False,
    ) -> nn.Layer:
        """Output features split over the tensor ranks. The input must have entered the tensor region.

        `view` and `axis` say which output features a rank holds when they are not a contiguous run; a bias is split
        with them.
        """
        placement = Placement.split((in_features, out_features), axis, view)
        return self._split_linear(placement, initializer, placement.of_columns() if bias else None, leaves_region=False)

    def row_linear(
        self,
        in_features: int,
        out_features: int,
        initializer: Initializer,
        view: tuple[int, ...] | None = None,
        axis: int = 0,
        bias: bool = False,
    ) -> nn.Layer:
        """Input features split over the tensor ranks, results summed: leaves the tensor region.

        `view` and `axis` say which input features a rank holds when they are not a contiguous run. A bias is added to
        the sum, outside the region, where each rank sees other tokens if the sequence is cut.
        """
        placement = Placement.split((in_features, out_features), axis, view)
        outside = Placement.replicated((out_features,), partial_gradient=self.mesh.sequence) if bias else None
        return self._split_linear(placement, initializer, outside, leaves_region=True)

    def _split_linear(
        self, placement: Placement, initializer: Initializer, bias: Placement | None, leaves_region: bool
    ) -> nn.Layer:
        if self.mesh.tensor_degree == 1:
            return Linear(self, placement, initializer, bias)
        from vha_paddle.parallel.layers import ColumnLinear, RowLinear

        in_features, out_features = placement.shape
        split = RowLinear if leaves_region else ColumnLinear
        layer = split(in_features, out_features, _zeros(), self.mesh, self.products)
        self._adopt(layer.weight, "weight", placement, initializer, "matrix")
        layer.bias = self.bias(layer, bias)
        return layer

    def replicated_linear(
        self, in_features: int, out_features: int, initializer: Initializer, bias: bool = False
    ) -> Linear:
        """Whole on every rank, inside the tensor region: each rank's gradient is partial and will be summed."""
        placement = Placement.replicated((in_features, out_features), partial_gradient=True)
        return Linear(self, placement, initializer, placement.of_columns() if bias else None)

    def key_value_linear(
        self, in_features: int, num_heads: int, head_dim: int, initializer: Initializer, bias: bool = False
    ) -> nn.Layer:
        """Heads that query heads share, split over the tensor ranks where the degree divides them. With fewer heads
        than ranks, every rank holds them whole and computes the one that its query heads read."""
        degree = self.mesh.tensor_degree
        if num_heads % degree == 0:
            return self.column_linear(in_features, num_heads * head_dim, initializer, bias=bias)
        head = self.mesh.tensor_rank * num_heads // degree
        placement = Placement.replicated((in_features, num_heads * head_dim), partial_gradient=True)
        columns = slice(head * head_dim, (head + 1) * head_dim)
        return OneHeadLinear(self, placement, initializer, columns, placement.of_columns() if bias else None)

    def vocab_embedding(
        self, vocab_size: int, hidden_size: int, initializer: Initializer, is_tied_copy: bool = False
    ) -> nn.Layer:
        """Embedding whose rows are split over the tensor ranks; the result is outside the tensor region.

        `is_tied_copy` marks the one that the last pipeline stage holds as its output projection.
        """
        placement = Placement.split((vocab_size, hidden_size), axis=0)
        if self.mesh.tensor_degree == 1:
            layer: nn.Layer = nn.Embedding(vocab_size, hidden_size, weight_attr=_zeros())
        else:
            from vha_paddle.parallel.layers import VocabEmbedding

            layer = VocabEmbedding(vocab_size, hidden_size, _zeros(), self.mesh)
        self._adopt(layer.weight, "weight", placement, initializer, "matrix")
        layer.weight.info = replace(layer.weight.info, is_tied_copy=is_tied_copy)
        return layer

    def _adopt(self, parameter: Any, name: str, placement: Placement, initializer: Initializer, decay: Decay) -> None:
        """Give a parameter its record and its initial value, the same values at every degree."""
        full_name = f"{self.path}.{name}"
        parameter.name = full_name  # optimizers key their state by it
        parameter.info = ParameterInfo(full_name, placement, decay)
        # fleet's pipeline gives all tensor ranks, and all sharding ranks, the first one's values of what is not marked
        parameter.is_distributed = placement.axis is not None
        parameter.no_sync = placement.by_expert
        if not parameter._is_initialized():
            return  # under paddle.LazyGuard: a model of any size, for its shapes
        value = paddle.to_tensor(np.ascontiguousarray(self._drawn(full_name, placement, initializer)))
        parameter.set_value(value.astype(parameter.dtype))

    def _drawn(self, name: str, placement: Placement, initializer: Initializer) -> np.ndarray[Any, Any]:
        """The initial values of what this rank holds."""
        seat = self.mesh.seat
        if not placement.by_expert:
            logical = initializer.draw(generator_for(self.seed, name), placement.shape)
            return placement.slice_of(logical, seat)
        # each expert from a name of its own, so that a rank draws those that it holds and not all of a large model's
        first, last = placement.box(seat)[0]
        one = placement.of_one_expert()
        drawn = (initializer.draw(generator_for(self.seed, f"{name}.{i}"), one.shape) for i in range(first, last))
        return np.stack([one.slice_of(logical, seat) for logical in drawn])


def _zeros() -> paddle.ParamAttr:
    """Cheap first values, replaced at once by `_adopt`."""
    return paddle.ParamAttr(initializer=nn.initializer.Constant(0.0))


@contextlib.contextmanager
def building(
    mesh: Mesh, dtype: str, seed: int, recompute: Literal["none", "selective", "full"], fp8: Fp8
) -> Iterator[Scope]:
    """The scope at the root of a model, with Paddle's default dtype set: fleet's layers take theirs from it alone."""
    outer = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield Scope(mesh, dtype, seed, path="", recompute=recompute, fp8=fp8)
    finally:
        paddle.set_default_dtype(outer)
