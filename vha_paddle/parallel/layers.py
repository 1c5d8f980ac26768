"""fleet's tensor-parallel layers in the roles the model asks for.

fleet's `ColumnParallelLinear` enters the tensor region by itself, once per layer: three projections of one input
would sum the input's gradient three times over the wire. Here the model enters the region once, so the column
layer only multiplies. How the region is left (summed, or summed and cut by sequence) is the mesh's to say.
fleet's layers are made without a bias; the scope that makes them gives them one where it is asked for.
"""

from __future__ import annotations

import paddle
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

from vha_paddle.ops.linear import Products, linear, with_bias
from vha_paddle.parallel.mesh import Mesh


class ColumnLinear(ColumnParallelLinear):
    def __init__(
        self, in_features: int, out_features: int, attribute: paddle.ParamAttr, mesh: Mesh, products: Products
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            weight_attr=attribute,
            has_bias=False,
            gather_output=False,
            mp_group=mesh.tensor_group,
        )
        self.products = products

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return with_bias(linear(x, self.weight, self.products), self.bias)


class RowLinear(RowParallelLinear):
    def __init__(
        self, in_features: int, out_features: int, attribute: paddle.ParamAttr, mesh: Mesh, products: Products
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            weight_attr=attribute,
            has_bias=False,
            input_is_parallel=True,
            mp_group=mesh.tensor_group,
        )
        self.mesh, self.products = mesh, products

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.mesh.leave_tensor_region(linear(x, self.weight, self.products))
        return with_bias(y, self.bias)  # once: inside the region every rank would add it to the sum


class VocabEmbedding(VocabParallelEmbedding):
    def __init__(self, vocab_size: int, hidden_size: int, attribute: paddle.ParamAttr, mesh: Mesh) -> None:
        super().__init__(vocab_size, hidden_size, weight_attr=attribute, mp_group=mesh.tensor_group)
        self.mesh = mesh

    def forward(self, tokens_BS: paddle.Tensor) -> paddle.Tensor:
        partial_BSD = mp_ops._c_lookup_table(
            self.weight, tokens_BS, start_index=self.vocab_start_index, vocab_size=self.num_embeddings
        )
        return self.mesh.leave_tensor_region(partial_BSD)
