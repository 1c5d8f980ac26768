"""The decoder against the numpy oracle: loss, logits, every gradient, weights after clipped AdamW steps."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.cases import CASES, GLOBAL_BATCH, MICRO_BATCH, Case, batches, starting_weights
from tests.oracles.decoder import decoder_loss_and_gradients
from tests.oracles.optimizer import AdamWSpec, adamw_update, clip_by_global_norm, initial_state
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from vha_paddle.checkpoint.load import device_tensor
from vha_paddle.counts import parameters as count_parameters
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.step import accumulate_gradients, train_step

TOLERANCE = {"float32": FLOAT32, "float64": FLOAT64}


def loaded_decoder(case: Case, dtype: str) -> Decoder:
    recipe = case.recipe()
    model = build_decoder(recipe.model, Mesh(), seed=0, dtype=dtype, memory=recipe.memory)
    weights = starting_weights(case)
    parameters = model.named_tensors()
    assert set(weights) == set(parameters)
    for name, parameter in parameters.items():
        parameter.set_value(device_tensor(weights[name], parameter.dtype))
    return model


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.has_oracle and case.dropout == 0], ids=lambda case: case.name
)
class TestAgainstTheOracle:
    def test_logits(self, case: Case, dtype: str) -> None:
        tokens_BS, labels_BS = next(batches(case))
        _, logits_BSV, _ = decoder_loss_and_gradients(starting_weights(case), tokens_BS, labels_BS, case.spec)
        with paddle.no_grad():
            actual = loaded_decoder(case, dtype)(paddle.to_tensor(tokens_BS)).numpy()
        assert_close(actual, logits_BSV, TOLERANCE[dtype], "logits")

    def test_loss_and_every_gradient_accumulated_over_microbatches(self, case: Case, dtype: str) -> None:
        tokens_BS, labels_BS = next(batches(case))
        loss, _, gradients = decoder_loss_and_gradients(starting_weights(case), tokens_BS, labels_BS, case.spec)
        model = loaded_decoder(case, dtype)
        actual = accumulate_gradients(model, tokens_BS, labels_BS, 0, MICRO_BATCH, Mesh())
        assert_close(np.array(actual), np.array(loss), TOLERANCE[dtype], "loss")
        for name, parameter in model.named_tensors().items():
            assert np.abs(gradients[name]).max() > 0, f"{name} has no gradient, so it proves nothing"
            assert_close(parameter.grad.numpy(), gradients[name], TOLERANCE[dtype], name)

    def test_weights_after_clipped_adamw_steps(self, case: Case, dtype: str) -> None:
        recipe = case.recipe()
        model = loaded_decoder(case, dtype)
        optimizer = Optimizer(model.parameters(), recipe, Mesh())
        for tokens_BS, labels_BS in batches(case):
            rate, max_norm = recipe.optim.lr, recipe.optim.max_grad_norm
            train_step(model, optimizer, tokens_BS, labels_BS, 0, MICRO_BATCH, rate, max_norm, Mesh())
        expected = oracle_training(case)
        for name, parameter in model.named_tensors().items():
            assert_close(parameter.numpy(), expected[name], TOLERANCE[dtype], name)


def oracle_training(case: Case) -> dict[str, np.ndarray]:
    """The run of the test above in numpy, with the decay that the recipe's `decay_target` asks for."""
    optim = case.recipe().optim
    weights, routers = starting_weights(case), case.fresh_routers()
    states = {name: initial_state(weight) for name, weight in weights.items()}
    for tokens_BS, labels_BS in batches(case):
        _, _, gradients = decoder_loss_and_gradients(weights, tokens_BS, labels_BS, case.spec, routers)
        if case.spec.experts is not None:
            routers = [router.after_step(case.spec.experts) for router in routers]
        gradients, norm = clip_by_global_norm(gradients, optim.max_grad_norm)
        assert norm > optim.max_grad_norm, "clipping must be active"
        for name, weight in weights.items():
            decays, origin = True, np.zeros_like(weight)
            if weight.ndim == 1:
                decays = False
            elif name.endswith(("premix", "postmix_a", "postmix_b")):
                decays = case.decay_target != "none"
                if name.endswith("premix") and case.decay_target == "identity":
                    origin = np.broadcast_to(np.eye(weight.shape[-1]), weight.shape)
            spec = AdamWSpec(learning_rate=optim.lr, eps=optim.eps, weight_decay=optim.weight_decay if decays else 0.0)
            moved, states[name] = adamw_update(weight - origin, gradients[name], states[name], spec)
            weights[name] = moved + origin
    return weights


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_parameter_count_is_the_calculators(case: Case) -> None:
    model_config = case.recipe().model
    built = build_decoder(model_config, Mesh(), seed=0)
    assert sum(parameter.size for parameter in built.parameters()) == count_parameters(model_config).total


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_later_token_leaves_earlier_logits_bit_equal(case: Case) -> None:
    """Bit-equal but for experts: how many rows a product has decides the order of its sums."""
    model = loaded_decoder(case, "float32")
    model.eval()
    tokens_BS, _ = next(batches(case))
    changed = tokens_BS.copy()
    changed[:, -2:] = (changed[:, -2:] + 1) % case.recipe().model.vocab_size
    with paddle.no_grad():
        before, after = (model(paddle.to_tensor(tokens)).numpy() for tokens in (tokens_BS, changed))
    if "experts" in case.model:
        assert_close(after[:, :-2], before[:, :-2], FLOAT32, "logits")
    else:
        assert np.array_equal(before[:, :-2], after[:, :-2])
    assert not np.array_equal(before[:, -2:], after[:, -2:])


def test_initial_values_depend_on_seed_and_name_only() -> None:
    case = CASES[0]
    first, again, other = (build_decoder(case.recipe().model, Mesh(), seed=seed).named_tensors() for seed in (3, 3, 4))
    for name, parameter in first.items():
        assert np.array_equal(parameter.numpy(), again[name].numpy()), name
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(first[name].numpy(), other[name].numpy())
    assert not np.array_equal(first[name].numpy(), first[name.replace("layers.0", "layers.1")].numpy())


# Parameters that start at a scale of their own, by the last part of their names.
OWN_SCALE = {"premix", "postmix_a", "postmix_b", "key_map", "pre_compose", "post_compose", "compose_factors"}
OWN_SCALE |= {"compose_proj", "diagonal_proj"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_other_matrices_start_at_the_initializer_range(case: Case) -> None:
    model = case.recipe().model
    small, large = (
        build_decoder(model.model_copy(update={"initializer_range": spread}), Mesh(), seed=0).named_tensors()
        for spread in (0.01, 0.04)
    )
    for name, parameter in small.items():
        short = name.removesuffix(".weight").rpartition(".")[2]
        has_own_scale = parameter.ndim == 1 or short in OWN_SCALE
        assert np.array_equal(large[name].numpy(), parameter.numpy() * (1 if has_own_scale else 4)), name
        assert has_own_scale or float(parameter.std()) == pytest.approx(0.01, rel=0.3), name


class TestDropout:
    case = next(case for case in CASES if case.dropout > 0 and case.layers == 2)

    def gradients(self, micro_batch_size: int, first_sample: int = 0) -> tuple[float, dict[str, np.ndarray]]:
        model = loaded_decoder(self.case, "float64")
        loss = accumulate_gradients(model, *next(batches(self.case)), first_sample, micro_batch_size, Mesh())
        return loss, {name: parameter.grad.numpy() for name, parameter in model.named_tensors().items()}

    def test_what_is_dropped_does_not_depend_on_the_microbatch(self) -> None:
        (loss, gradients), (other_loss, other) = self.gradients(1), self.gradients(GLOBAL_BATCH)
        assert_close(np.array(loss), np.array(other_loss), FLOAT64, "loss")
        for name, gradient in gradients.items():
            assert_close(gradient, other[name], FLOAT64, name)

    def test_other_samples_lose_other_values(self) -> None:
        assert abs(self.gradients(2)[0] - self.gradients(2, first_sample=GLOBAL_BATCH)[0]) > 1e-4

    def test_evaluation_drops_nothing(self) -> None:
        tokens_BS, labels_BS = next(batches(self.case))
        _, logits_BSV, _ = decoder_loss_and_gradients(starting_weights(self.case), tokens_BS, labels_BS, self.case.spec)
        model = loaded_decoder(self.case, "float64")
        losses = model.sequence_losses(microbatches_of(tokens_BS, labels_BS, 0, 3, Mesh()))
        at_label = np.take_along_axis(logits_BSV, labels_BS[..., None], -1)[..., 0]
        expected = (np.log(np.exp(logits_BSV).sum(-1)) - at_label).sum(-1)
        assert_close(losses, expected, FLOAT64, "losses")
        assert model.training
