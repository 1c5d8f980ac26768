"""The optimizer's constants. Its updates are compared with the oracle's in tests/model, at one set of constants."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.cases import CASES
from tests.oracles.optimizer import AdamWSpec, adamw_update, initial_state
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.optimizer import Optimizer

NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("constants", [{"beta1": 0.7}, {"beta2": 0.8}, {"eps": 0.1}, {"weight_decay": 0.5}], ids=str)
def test_every_constant_of_the_recipe_reaches_adamw(constants: dict[str, float]) -> None:
    recipe = CASES[0].recipe()
    recipe = recipe.model_copy(update={"optim": recipe.optim.model_copy(update=constants)})
    model = build_decoder(recipe.model, Mesh(), seed=0, dtype="float64")
    parameter, optimizer = model.named_tensors()[NAME], Optimizer(model.parameters(), recipe, Mesh())
    optim, weight = recipe.optim, parameter.numpy()
    state = initial_state(weight)
    spec = AdamWSpec(
        learning_rate=0.01, beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay
    )
    for gradient in np.random.default_rng(0).standard_normal((3, *weight.shape)):
        (parameter * paddle.to_tensor(gradient)).sum().backward()
        optimizer.step(spec.learning_rate)
        weight, state = adamw_update(weight, gradient, state, spec)
    assert_close(parameter.numpy(), weight, FLOAT64, NAME)


def test_a_rank_that_owns_no_parameter_takes_its_steps_without_a_state() -> None:
    recipe = CASES[0].recipe()
    parameters = build_decoder(recipe.model, Mesh(), seed=0).parameters()[:1]
    mesh = Mesh(sharding_rank=1, sharding_degree=2, sharding_stage=3)
    optimizer, before = Optimizer(parameters, recipe, mesh), parameters[0].numpy()
    (parameters[0] * 2.0).sum().backward()
    optimizer.step(0.01)
    assert optimizer.slots() == {} and optimizer.powers() == {}
    assert np.array_equal(parameters[0].numpy(), before) and parameters[0].grad is None
