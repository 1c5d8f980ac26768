"""One layer of experts on two ranks, where one rank's experts get few tokens or none: `python expert_layer_worker.py`.

Asserts on every rank that output and gradients are those of the oracle for this rank's tokens and experts.
"""

from __future__ import annotations

import numpy as np
import paddle

from tests.cases import oracle_experts
from tests.oracles.moe import RouterMemory, moe_backward, moe_forward
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.config import MixtureOfExperts, Parallel
from vha_paddle.model.balance import Balance
from vha_paddle.model.moe import MoE
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.scope import building
from vha_paddle.parallel.start import start_mesh

B, S, D, E = 2, 5, 8, 4
CONFIG = MixtureOfExperts(
    num_experts=E, num_experts_per_tok=2, moe_intermediate_size=6, router_aux_loss_coef=0.0, router_bias_update_rate=1.0
)
BIASES = {
    "spread": [0.0, 0.0, 0.0, 0.0],
    "all to the first rank": [2.0, 2.0, 0.0, 0.0],
    "all to the second": [0.0, 0.0, 2.0, 2.0],
}


def check(what: str, mesh: Mesh) -> None:
    rng = np.random.default_rng(1)
    with building(mesh, "float64", 0, "none", "none") as scope:
        balance = Balance(CONFIG, 1, mesh)
        layer = MoE(D, CONFIG, 0.02, scope.child("mlp"), balance, 0)
    bias = np.array(BIASES[what])
    balance.restore({"model.layers.0.mlp.gate.bias": bias})
    weights = {}
    for parameter in layer.parameters():
        name, placement = info_of(parameter).name.removeprefix("mlp."), info_of(parameter).placement
        weights[name] = rng.standard_normal(placement.shape) / np.sqrt(placement.shape[-2])
        parameter.set_value(np.ascontiguousarray(placement.slice_of(weights[name], mesh.seat)))
    every_x, every_dy = rng.standard_normal((2, mesh.num_ranks, B, S, D))

    x = paddle.to_tensor(every_x[mesh.rank], stop_gradient=False)
    y = layer(x)
    y.backward(paddle.to_tensor(every_dy[mesh.rank]))
    memory, gradients = RouterMemory(np.full(E, 1 / E), bias, np.zeros(E, np.int64)), []
    for rank in range(mesh.num_ranks):
        expected, cache = moe_forward(every_x[rank], weights, oracle_experts(CONFIG), memory)
        dx, own = moe_backward(every_dy[rank], cache)
        gradients.append(own)
        if rank == mesh.rank:
            assert_close(y.numpy(), expected, FLOAT64, f"{what}: output")
            assert_close(x.grad.numpy(), dx, FLOAT64, f"{what}: gradient of x")
            assert_close(layer.gate.weight.grad.numpy(), own["gate.weight"], FLOAT64, f"{what}: router")
        assert (what == "spread") == (memory.counts_E.reshape(2, -1).sum(1) > 0).all()
    for parameter in layer.experts.parameters():  # every rank's tokens have come to their experts
        name = info_of(parameter).name.removeprefix("mlp.")
        summed = np.sum([own[name] for own in gradients], axis=0)
        expected = info_of(parameter).placement.slice_of(summed, mesh.seat)
        assert_close(parameter.grad.numpy(), expected, FLOAT64, f"{what}: {name}")


def main() -> None:
    mesh = start_mesh(Parallel(sharding=2, expert=2), 2)
    for what in BIASES:
        check(what, mesh)


if __name__ == "__main__":
    main()
