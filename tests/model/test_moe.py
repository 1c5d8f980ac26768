"""A mixture of experts against its oracle: the layer, the decoder in training, and what its routers count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest

from tests.cases import CASES, GLOBAL_BATCH, MICRO_BATCH, Case, batches, oracle_experts, starting_weights
from tests.model.test_decoder import loaded_decoder, oracle_training
from tests.oracles.decoder import decoder_loss_and_gradients
from tests.oracles.moe import RouterMemory, balance_losses, moe_backward, moe_forward
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from vha_paddle.config import MixtureOfExperts
from vha_paddle.model.balance import Balance
from vha_paddle.model.decoder import Decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.model.moe import MoE
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.scope import Scope
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.step import accumulate_gradients, train_step

TOLERANCE = {"float32": FLOAT32, "float64": FLOAT64}
MIXTURES = [case for case in CASES if "experts" in case.model]
B, S, D = 3, 7, 10
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "not normalised, z loss": {"norm_topk_prob": False, "router_z_loss_coef": 0.1},
    "shared expert, biases": {"shared_expert_intermediate_size": 4, "router_bias_update_rate": 0.1},
    "capacity": {"capacity_factor": 0.8},
    "one expert per token": {"num_experts_per_tok": 1},
    "every expert": {"num_experts_per_tok": 6},
}


def built(changes: dict[str, Any], dtype: str) -> tuple[MoE, RouterMemory, dict[str, np.ndarray]]:
    """A layer after a step with an uneven load, and the same for the oracle: memory and weights."""
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "router_aux_loss_coef": 0.3}
    config, rng = MixtureOfExperts(**(sizes | changes)), np.random.default_rng(0)
    balance = Balance(config, 1, Mesh())
    load = rng.integers(1, 20, (1, 6))
    balance.restore({"model.layers.0.mlp.gate.load": load[0]})
    bias = np.zeros(6)
    if balance.bias_LE is not None:
        bias = 0.1 * rng.standard_normal(6)
        balance.restore({"model.layers.0.mlp.gate.bias": bias})
    outer = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    layer = MoE(D, config, 0.02, Scope(Mesh(), dtype, 0, "mlp"), balance, 0)
    paddle.set_default_dtype(outer)
    weights = {}
    for parameter in layer.parameters():
        shape = parameter.shape
        array = weights[info_of(parameter).name.removeprefix("mlp.")] = rng.standard_normal(shape) / math.sqrt(
            shape[-2]
        )
        parameter.set_value(array.astype(dtype))
    return layer, RouterMemory(load[0] / load.sum(), bias, np.zeros(6, np.int64)), weights


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layer_its_gradients_and_its_figures_are_the_oracles(variant: str, dtype: str) -> None:
    layer, memory, weights = built(VARIANTS[variant], dtype)
    spec = oracle_experts(layer.config)
    rng = np.random.default_rng(1)
    x_BSD, dy_BSD = rng.standard_normal((2, B, S, D))
    expected, cache = moe_forward(x_BSD, weights, spec, memory)
    dx_BSD, gradients = moe_backward(dy_BSD, cache)
    assert (variant == "capacity") == (cache["kept"].sum() < cache["chosen"].sum())

    layer.balance.scale = 1 / (B * S)
    x = paddle.to_tensor(x_BSD.astype(dtype), stop_gradient=False)
    y = layer(x)
    y.backward(paddle.to_tensor(dy_BSD.astype(dtype)))
    assert_close(y.numpy(), expected, TOLERANCE[dtype], "output")
    assert_close(x.grad.numpy(), dx_BSD, TOLERANCE[dtype], "gradient of x")
    assert len(gradients) == len(layer.parameters())
    for parameter in layer.parameters():
        name = info_of(parameter).name.removeprefix("mlp.")
        assert_close(parameter.grad.numpy(), gradients[name], TOLERANCE[dtype], name)

    figures, after = layer.balance.finish_step(), memory.after_step(spec)
    assert_close(np.array([figures["aux_loss"], figures["z_loss"]]), np.array(balance_losses(cache)), FLOAT32, "losses")
    counts = memory.counts_E
    assert figures["max_load"] == [figures["worst_load"]] == [counts.max() / counts.mean()]
    assert figures["dead_experts"] == [int((counts == 0).sum())]
    assert np.array_equal(layer.balance.load_LE[0], counts)
    if layer.balance.bias_LE is not None:
        assert_close(layer.balance.bias_LE[0], after.bias_E, FLOAT64, "bias")
    if variant == "capacity":
        assert figures["dropped"] == [1 - cache["kept"].sum() / cache["chosen"].sum()]


def test_a_layer_alone_gives_its_output_and_counts_nothing_when_evaluated() -> None:
    layer, memory, weights = built({}, "float64")
    layer.eval()
    x_BSD = np.random.default_rng(1).standard_normal((1, 1, D))
    expected, _ = moe_forward(x_BSD, weights, oracle_experts(layer.config), memory)
    for _ in range(2):
        assert_close(layer(paddle.to_tensor(x_BSD)).numpy(), expected, FLOAT64, "output")
    layer.train()
    with paddle.no_grad():
        layer(paddle.to_tensor(x_BSD))
    assert not layer.balance._counts_LE.any()


def test_every_expert_starts_with_weights_of_its_own() -> None:
    config = MixtureOfExperts(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5)
    layer = MoE(D, config, 0.02, Scope(Mesh(), "float32", 0, "mlp"), Balance(config, 1, Mesh()), 0)
    for weight_EDF in (layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj):
        assert len({weight.tobytes() for weight in weight_EDF.numpy()}) == 3


def test_figures_are_of_the_tokens_of_their_own_step_and_of_no_evaluation() -> None:
    changes = {"capacity_factor": 0.8, "router_z_loss_coef": 0.1, "router_bias_update_rate": 0.1}
    (longer, *_), (fresh, *_) = built(changes, "float64"), built(changes, "float64")
    earlier, evaluated, own = (paddle.to_tensor(x) for x in np.random.default_rng(1).standard_normal((3, B, S, D)))
    longer(earlier)
    longer.balance.finish_step()
    fresh.balance.restore(longer.balance.state())
    longer.eval()
    longer(evaluated)
    longer.train()
    figures = []
    for layer in (longer, fresh):
        layer(own)
        figures.append(layer.balance.finish_step())
    assert figures[0] == figures[1] and figures[0]["z_loss"] > 0 and figures[0]["dropped"][0] > 0


def test_a_state_that_is_being_saved_does_not_change_with_the_next_step() -> None:
    layer, *_ = built({"router_bias_update_rate": 0.1}, "float64")
    state = layer.balance.state()
    before = {name: array.copy() for name, array in state.items()}
    layer(paddle.to_tensor(np.random.default_rng(1).standard_normal((B, S, D))))
    layer.balance.finish_step()
    for name, array in layer.balance.state().items():
        assert np.array_equal(state[name], before[name]) and not np.array_equal(array, before[name]), name


@pytest.mark.parametrize("case", [case for case in MIXTURES if case.dropout == 0], ids=lambda case: case.name)
class TestADecoder:
    def test_loss_logits_and_gradients_are_the_oracles(self, case: Case) -> None:
        tokens_BS, labels_BS = next(batches(case))
        loss, logits_BSV, gradients = decoder_loss_and_gradients(
            starting_weights(case), tokens_BS, labels_BS, case.spec, case.fresh_routers()
        )
        model = loaded_decoder(case, "float64")
        actual = accumulate_gradients(model, tokens_BS, labels_BS, 0, MICRO_BATCH, Mesh())
        assert_close(np.array(actual), np.array(loss), FLOAT64, "loss")
        for name, parameter in model.named_tensors().items():
            assert np.abs(gradients[name]).max() > 0, f"{name} has no gradient, so it proves nothing"
            assert_close(parameter.grad.numpy(), gradients[name], FLOAT64, name)
        model.eval()
        assert_close(model(paddle.to_tensor(tokens_BS)).numpy(), logits_BSV, FLOAT64, "logits")

    def test_weights_load_and_figures_after_clipped_adamw_steps(self, case: Case) -> None:
        """Each step's balancing losses go by the load of the step before."""
        recipe, model, spec = case.recipe(), loaded_decoder(case, "float64"), case.spec
        optimizer, routers, aux = Optimizer(model.parameters(), recipe, Mesh()), case.fresh_routers(), []
        assert spec.experts is not None and model.balance is not None
        for tokens_BS, labels_BS in batches(case):
            weights = {name: parameter.numpy() for name, parameter in model.named_tensors().items()}
            decoder_loss_and_gradients(weights, tokens_BS, labels_BS, spec, routers)
            rate, max_norm = recipe.optim.lr, recipe.optim.max_grad_norm
            result = train_step(model, optimizer, tokens_BS, labels_BS, 0, MICRO_BATCH, rate, max_norm, Mesh())
            assert result.moe is not None
            aux.append(result.moe["aux_loss"])
            assert np.array_equal(model.balance.load_LE, [router.counts_E for router in routers])
            routers = [router.after_step(spec.experts) for router in routers]
            if model.balance.bias_LE is not None:
                assert_close(model.balance.bias_LE, np.stack([router.bias_E for router in routers]), FLOAT64, "bias")
        assert aux[0] == pytest.approx(0.1 * case.layers) and len(set(aux)) == len(aux)
        expected = oracle_training(case)
        for name, parameter in model.named_tensors().items():
            assert_close(parameter.numpy(), expected[name], FLOAT64, name)


def stepped(model: Decoder, case: Case, micro_batch_size: int) -> dict[str, np.ndarray]:
    """The gradients of a second step, whose balancing losses have a load to go by, and the load after it."""
    assert model.balance is not None
    for tokens_BS, labels_BS in list(batches(case))[:2]:
        for parameter in model.parameters():
            parameter.grad = None
        accumulate_gradients(model, tokens_BS, labels_BS, 0, micro_batch_size, Mesh())
        model.sequence_losses(microbatches_of(tokens_BS, labels_BS, 0, 4, Mesh()))  # counts nothing
        model.balance.finish_step()
    return {name: parameter.grad.numpy() for name, parameter in model.named_tensors().items()} | model.balance.state()


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_neither_gradients_nor_load_depend_on_the_microbatch(case: Case) -> None:
    first, second = (stepped(loaded_decoder(case, "float64"), case, size) for size in (1, GLOBAL_BATCH))
    for name, array in first.items():
        assert_close(array, second[name], FLOAT64, name)


def test_every_token_is_counted_once_under_recompute() -> None:
    case = next(case for case in MIXTURES if case.recompute == "full")
    state = stepped(loaded_decoder(case, "float64"), case, MICRO_BATCH)
    copies = GLOBAL_BATCH * case.recipe().data.sequence_length * case.model["experts"]["num_experts_per_tok"]
    loads = [load_E for name, load_E in state.items() if name.endswith(".load")]
    assert [load_E.sum() for load_E in loads] == [copies] * case.layers


def test_a_router_in_bfloat16_computes_in_float32() -> None:
    """Without kernels for bfloat16 on a CPU, its cast alone can be seen."""
    layer, _, _ = built({}, "float32")
    weight = layer.gate.weight.astype("bfloat16")
    del layer.gate.weight
    layer.gate.weight = weight
    assert layer._logits(paddle.zeros([4, D], "bfloat16")).dtype == paddle.float32
