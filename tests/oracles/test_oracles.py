"""The oracles themselves: gradients against finite differences, identities, AdamW against torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from tests.oracles import ops
from tests.oracles.attention import attention_backward, attention_forward
from tests.oracles.decoder import decoder_loss_and_gradients
from tests.oracles.optimizer import AdamWSpec, adamw_update, clip_by_global_norm, global_norm, initial_state
from tests.oracles.spec import PREMIX_DEPARTURE, OracleSpec, random_attention_weights, random_weights
from tests.tolerances import FLOAT64_FOLD, assert_close

B, S, D, H = 2, 5, 7, 6
# Fourth-order differences with a step of 1e-3: truncation and round-off are both below 2e-10 of the gradient.
FINITE_DIFFERENCES = 1e-9
STEP = 1e-3

SPECS = {
    "mha": OracleSpec(kind="grouped", hidden_size=D, num_attention_heads=3, num_key_value_heads=3, head_dim=H),
    "gqa": OracleSpec(kind="grouped", hidden_size=D, num_attention_heads=6, num_key_value_heads=2, head_dim=H),
    "mqa": OracleSpec(kind="grouped", hidden_size=D, num_attention_heads=3, num_key_value_heads=1, head_dim=H),
}
VHA = replace(SPECS["gqa"], kind="vha", premix=True, postmix_rank=2)
SPECS |= {"vha": VHA, "premix": replace(VHA, postmix_rank=0), "postmix": replace(VHA, premix=False)}
SPECS |= {
    "gqa, gate and window": replace(SPECS["gqa"], gate="before_postmix", window=2),
    "vha, gate before": replace(VHA, gate="before_postmix", premix_silu=True),
    "vha, gate after": replace(VHA, gate="after_postmix", postmix_silu=True, window=3),
    "vha, narrow physical heads": replace(VHA, physical_head_dim=4),
    "vha, wide physical heads": replace(VHA, physical_head_dim=9, premix_silu=True),
    "gqa, no norms": replace(SPECS["gqa"], qk_norm=False),
    "gqa, biases": replace(SPECS["gqa"], attention_bias=True, gate="before_postmix"),
    "vha, biases and no norms": replace(VHA, attention_bias=True, qk_norm=False),
    "vha, wide physical heads, biases": replace(VHA, physical_head_dim=9, attention_bias=True, gate="after_postmix"),
}
HYBRID = replace(VHA, sliding=replace(SPECS["mqa"], window=2), full_every=2)

Inputs = Mapping[str, np.ndarray]
Loss = Callable[[Inputs], float]


def slope(loss: Loss, inputs: Inputs, name: str, direction: np.ndarray) -> float:
    """The loss's derivative along a direction of one input, by the five-point stencil."""

    def moved(distance: float) -> float:
        return loss({**inputs, name: inputs[name] + distance * direction})

    near, far = moved(STEP) - moved(-STEP), moved(2 * STEP) - moved(-2 * STEP)
    return (8 * near - far) / (12 * STEP)


def assert_gradients(loss: Loss, inputs: Inputs, grads: Inputs) -> None:
    """Along two random directions per input, the gradient's component equals the loss's slope."""
    assert set(grads) == set(inputs)
    generator = np.random.default_rng(7)
    for name, value in inputs.items():
        assert grads[name].shape == value.shape, name
        for _ in range(2):
            direction = generator.standard_normal(value.shape)
            direction /= np.linalg.norm(direction)
            measured = slope(loss, inputs, name, direction)
            derived = np.sum(grads[name] * direction)
            scale = np.linalg.norm(grads[name]) / np.sqrt(value.size)
            assert scale > 0, f"{name}: no gradient to check"
            error = abs(measured - derived) / scale
            assert error <= FINITE_DIFFERENCES, f"{name}: {error:.1e}"


def decoder_spec(kind: str, tied: bool) -> OracleSpec:
    spec = HYBRID if kind == "hybrid" else SPECS[kind]
    return replace(spec, num_hidden_layers=2, intermediate_size=9, vocab_size=11, tie_word_embeddings=tied)


@pytest.mark.parametrize("kind", SPECS)
def test_attention_gradients_equal_finite_differences(kind: str) -> None:
    spec, generator = SPECS[kind], np.random.default_rng(0)
    weights = random_attention_weights(spec, generator)
    x, dout = generator.standard_normal((2, B, S, D))
    _, cache = attention_forward(x, weights, spec)
    dx, dweights = attention_backward(dout, cache)

    def loss(inputs: Inputs) -> float:
        return float(np.sum(dout * attention_forward(inputs["x"], inputs, spec)[0]))

    assert_gradients(loss, {"x": x, **weights}, {"x": dx, **dweights})


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["gqa", "vha", "hybrid", "vha, biases and no norms"])
def test_decoder_gradients_equal_finite_differences(kind: str, tied: bool) -> None:
    spec, generator = decoder_spec(kind, tied), np.random.default_rng(3)
    weights = random_weights(spec, seed=3)
    tokens, labels = generator.integers(0, spec.vocab_size, (2, B, S))
    labels[0, 2] = ops.IGNORED_LABEL
    _, _, grads = decoder_loss_and_gradients(weights, tokens, labels, spec)

    def loss(inputs: Inputs) -> float:
        return decoder_loss_and_gradients(inputs, tokens, labels, spec)[0]

    assert_gradients(loss, weights, grads)


def test_an_ignored_label_takes_its_position_out_of_the_mean() -> None:
    generator = np.random.default_rng(2)
    logits, labels = generator.standard_normal((1, 4, 9)), np.array([[3, 8, 0, 5]])
    kept, _ = ops.cross_entropy(logits[:, :3], labels[:, :3])
    labels[0, 3] = ops.IGNORED_LABEL
    loss, dlogits = ops.cross_entropy(logits, labels)
    assert abs(loss - kept) <= 1e-15
    assert not dlogits[0, 3].any()


@pytest.mark.parametrize("kind", SPECS)
def test_a_later_token_leaves_earlier_outputs_bit_equal(kind: str) -> None:
    spec, generator = SPECS[kind], np.random.default_rng(3)
    weights = random_attention_weights(spec, generator)
    x = generator.standard_normal((B, S, D))
    before, _ = attention_forward(x, weights, spec)
    x[:, 3] += 1.0
    after, _ = attention_forward(x, weights, spec)
    assert np.array_equal(before[:, :3], after[:, :3])
    assert not np.allclose(before[:, 3:], after[:, 3:])


def test_vha_with_identity_maps_is_grouped_attention_with_repeated_queries() -> None:
    generator = np.random.default_rng(4)
    weights = random_attention_weights(VHA, generator)
    weights |= {"premix": np.stack([np.eye(H)] * 2), "postmix_b": np.zeros_like(weights["postmix_b"])}
    repeated = {**weights, "q_proj.weight": np.tile(weights["q_proj.weight"], 2)}
    x = generator.standard_normal((B, S, D))
    actual, expected = attention_forward(x, weights, VHA)[0], attention_forward(x, repeated, SPECS["gqa"])[0]
    assert_close(actual, expected, FLOAT64_FOLD, "output")


def test_random_maps_are_as_far_from_the_identity_as_trained_ones() -> None:
    wide = replace(VHA, head_dim=128)
    weights = random_attention_weights(wide, np.random.default_rng(5))
    distances = np.linalg.norm(weights["premix"] - np.eye(128), axis=(1, 2))
    assert np.allclose(distances, PREMIX_DEPARTURE * np.sqrt(128), rtol=0.02)
    assert np.linalg.norm(weights["postmix_b"] @ weights["postmix_a"].T) > 1


def test_clipping_scales_all_gradients_to_the_maximal_norm() -> None:
    grads = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert norm == 5.0
    assert abs(global_norm(clipped) - 1.0) <= 1e-15
    assert np.allclose(clipped["a"], [0.6, 0.0]) and np.allclose(clipped["b"], [[0.8]])


def test_clipping_leaves_small_gradients_bit_equal() -> None:
    grads = {"a": np.array([0.3, 0.1])}
    clipped, _ = clip_by_global_norm(grads, 1.0)
    assert np.array_equal(clipped["a"], grads["a"])


def test_adamw_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(6)
    weight, spec = generator.standard_normal((3, 4)), AdamWSpec(learning_rate=0.03, weight_decay=0.2)
    parameter = torch.nn.Parameter(torch.tensor(weight))
    betas = (spec.beta1, spec.beta2)
    optimizer = torch.optim.AdamW(
        [parameter], lr=spec.learning_rate, betas=betas, eps=spec.eps, weight_decay=spec.weight_decay
    )
    state = initial_state(weight)
    for grad in generator.standard_normal((4, 3, 4)):
        parameter.grad = torch.tensor(grad)
        optimizer.step()
        weight, state = adamw_update(weight, grad, state, spec)
        assert_close(weight, parameter.detach().numpy(), FLOAT64_FOLD, f"weight after step {state.step}")
