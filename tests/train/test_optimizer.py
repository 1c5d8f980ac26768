"""The optimizer's constants. Its updates are compared with the oracle's in tests/model, at one set of constants."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

from tests.cases import CASES
from tests.oracles.optimizer import AdamWSpec, adamw_update, initial_state
from tests.parallel.test_main_gradients import SIZE, Toy
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from vha_paddle.checkpoint.save import host_array, own_tensors
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.main_gradients import set_gradient
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import Placement
from vha_paddle.parallel.scope import Scope
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


def test_the_state_of_bfloat16_weights_is_under_their_names_and_is_saved() -> None:
    """Paddle files their moments under the names of the master weights."""
    recipe = CASES[0].recipe()
    recipe = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"compute": "bfloat16"})})
    toy = Toy("bfloat16")
    optimizer = Optimizer(toy.parameters(), recipe, Mesh())
    names = [parameter.name for parameter in toy.parameters()]
    slots = optimizer.slots()
    assert {slot: list(states) for slot, states in slots.items()} == dict.fromkeys(
        ("moment1", "moment2", "master"), names
    )
    saved = own_tensors(optimizer, Mesh(), lambda name, tensor: lambda: host_array(tensor))["optimizer"]
    for name in names:
        slots["moment2"][name].set_value(paddle.full([SIZE], 3.0))
        assert np.array_equal(saved[f"{name}.moment2"].read(), np.full(SIZE, 3.0, np.float32))


def test_premix_decays_to_the_identity_at_the_rate_of_the_step_and_in_its_master_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AdamW's own kernel is taken away: what is left is the decay."""
    recipe = CASES[0].recipe()
    recipe = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"compute": "bfloat16"})})
    assert recipe.optim.decay_target == "identity"
    whole = Placement.replicated((2, 4, 4), partial_gradient=True)
    premix = Scope(Mesh(), "bfloat16", 3, "toy").parameter(nn.Layer(), "premix", whole, Normal(1.0), "premix")
    optimizer = Optimizer([premix], recipe, Mesh())
    monkeypatch.setattr(paddle._C_ops, "adamw_", lambda *arguments: [None] * 7)
    before = optimizer.slots()["master"][premix.name].numpy()
    set_gradient(premix, paddle.zeros(premix.shape))
    optimizer.step(0.5)
    expected = before - 0.5 * recipe.optim.weight_decay * (before - np.eye(4))
    assert_close(optimizer.slots()["master"][premix.name].numpy(), expected, FLOAT32, "premix")


def test_a_rank_that_owns_no_parameter_takes_its_steps_without_a_state() -> None:
    recipe = CASES[0].recipe()
    parameters = build_decoder(recipe.model, Mesh(), seed=0).parameters()[:1]
    mesh = Mesh(sharding_rank=1, sharding_degree=2, sharding_stage=3)
    optimizer, before = Optimizer(parameters, recipe, mesh), parameters[0].numpy()
    (parameters[0] * 2.0).sum().backward()
    optimizer.step(0.01)
    assert optimizer.slots() == {} and optimizer.powers() == {}
    assert np.array_equal(parameters[0].numpy(), before) and parameters[0].grad is None
