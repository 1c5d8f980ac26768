"""Gradients of dense, tensor-split and expert parameters at once, experts lying along the sharding axis.

Run once per rank, `python expert_worker.py TENSOR SHARDING`; asserts on every rank. The parameters are made here, with
the records that a mixture of experts gives them.
"""

from __future__ import annotations

import sys

import numpy as np
import paddle

from tests.tolerances import FLOAT64, assert_close
from vha_paddle.config import Parallel
from vha_paddle.parallel.gradients import clip_by_global_norm, complete_gradients
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import answered_for
from vha_paddle.parallel.placement import ParameterInfo, Placement, info_of
from vha_paddle.parallel.start import start_mesh

MAX_NORM = 0.5
RNG = np.random.default_rng(3)
# One contribution of each token part (a sharding rank) to each logical gradient; the gain's also of each tensor rank.
DENSE, SPLIT, EXPERTS = (RNG.standard_normal((4, *shape)) for shape in ((4, 3), (6, 4), (3, 4)))
GAIN = RNG.standard_normal((4, 2, 5))


def parameter(name: str, placement: Placement, gradient: np.ndarray) -> paddle.Tensor:
    leaf = paddle.to_tensor(np.zeros(gradient.shape), stop_gradient=False)
    (leaf * paddle.to_tensor(gradient)).sum().backward()
    leaf.info = ParameterInfo(name, placement, "matrix")
    return leaf


def main() -> None:
    degrees = Parallel(tensor=int(sys.argv[1]), sharding=int(sys.argv[2]), expert=2)
    tokens, t = degrees.sharding, degrees.tensor
    mesh = start_mesh(degrees, tokens * t)
    assert mesh.expert_group.nranks == 2 and mesh.expert_rank == mesh.sharding_rank % 2
    part, tensor = mesh.sharding_rank, mesh.tensor_rank
    parameters = [
        parameter("dense", Placement.replicated((4, 3), partial_gradient=False), DENSE[part]),
        parameter("split", Placement.split((6, 4), axis=0), np.split(SPLIT[part], t)[tensor]),
        parameter("gain", Placement.replicated((5,), partial_gradient=True), GAIN[part, tensor]),
        parameter("experts", Placement.experts((2, 3, 4), axis=2), np.split(EXPERTS[part], t, axis=-1)[tensor]),
    ]
    complete_gradients(parameters, mesh)
    # ranks with the same experts add up; other experts are other parameters
    experts = [EXPERTS[expert:tokens:2].sum(0) for expert in range(2)]
    expected = {
        "dense": DENSE[:tokens].sum(0),
        "split": np.split(SPLIT[:tokens].sum(0), t)[tensor],
        "gain": GAIN[:tokens, :t].sum((0, 1)),
        "experts": np.split(experts[mesh.expert_rank], t, axis=-1)[tensor],
    }
    for one in parameters:
        assert_close(one.grad.numpy(), expected[info_of(one).name], FLOAT64, info_of(one).name)

    # what one process would hold: both experts, every part once
    whole = (expected["dense"], SPLIT[:tokens].sum(0), expected["gain"], *experts)
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in whole))
    assert norm > MAX_NORM
    found = clip_by_global_norm(parameters, MAX_NORM, mesh)
    assert_close(np.array(found.total), norm, FLOAT64, "norm")
    for one in parameters:
        name = info_of(one).name
        assert_close(one.grad.numpy(), expected[name] * MAX_NORM / norm, FLOAT64, f"{name}, clipped")
    _check_answers(parameters, mesh)


def _check_answers(parameters: list[paddle.Tensor], mesh: Mesh) -> None:
    """Every part is answered for by one rank: each tensor rank's part of `split` and of both experts, the rest once."""
    answers = mesh.objects([info_of(one).name for one in answered_for(parameters, mesh)])
    counts = {name: sum(names.count(name) for names in answers) for name in ("dense", "split", "gain", "experts")}
    assert counts == {"dense": 1, "split": mesh.tensor_degree, "gain": 1, "experts": 2 * mesh.tensor_degree}, answers


if __name__ == "__main__":
    main()
