"""The oracle of a mixture of experts: against finite differences, and within a decoder against transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.oracles.decoder import decoder_loss_and_gradients
from tests.oracles.moe import PARTS, MoESpec, RouterMemory, balance_losses, moe_backward, moe_forward
from tests.oracles.spec import OracleSpec, random_weights
from tests.oracles.test_oracles import assert_gradients
from tests.tolerances import FLOAT32, assert_close

B, S, D, E, F = 2, 5, 7, 5, 4
SPEC = MoESpec(num_experts=E, num_experts_per_tok=2, aux_coefficient=0.3, z_coefficient=0.2)
SPECS = {
    "normalised": SPEC,
    "not normalised": replace(SPEC, norm_topk_prob=False),
    "capacity": replace(SPEC, capacity_factor=0.8),
    "one of all": replace(SPEC, num_experts_per_tok=1),
}


def layer_weights(generator: np.random.Generator, spec: MoESpec, width: int, shared: int) -> dict[str, np.ndarray]:
    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape) / np.sqrt(shape[-2])

    weights = {"gate.weight": normal(width, spec.num_experts)}
    shapes = {"gate_proj": (width, F), "up_proj": (width, F), "down_proj": (F, width)}
    weights |= {f"experts.{part}": normal(spec.num_experts, *shapes[part]) for part in PARTS}
    if shared:
        weights |= {f"shared_expert.{part}.weight": normal(*shapes[part]) for part in PARTS}
    return weights


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared too"])
@pytest.mark.parametrize("name", SPECS)
def test_every_gradient_is_the_slope_of_output_and_balancing_losses(name: str, shared: bool) -> None:
    spec, generator = SPECS[name], np.random.default_rng(3)
    inputs = layer_weights(generator, spec, D, shared) | {"x": generator.standard_normal((B, S, D))}
    dy_BSD = generator.standard_normal((B, S, D))
    share = generator.random(E)
    memory = RouterMemory(share / share.sum(), 0.1 * generator.standard_normal(E), np.zeros(E, np.int64))

    def loss(inputs: dict[str, np.ndarray]) -> float:
        weights = {name: array for name, array in inputs.items() if name != "x"}
        y_BSD, cache = moe_forward(inputs["x"], weights, spec, memory)
        return float((dy_BSD * y_BSD).sum()) + sum(balance_losses(cache))

    weights = {name: array for name, array in inputs.items() if name != "x"}
    _, cache = moe_forward(inputs["x"], weights, spec, memory)
    assert (name == "capacity") == (cache["kept"].sum() < cache["chosen"].sum())
    dx_BSD, grads = moe_backward(dy_BSD, cache)
    assert_gradients(loss, inputs, grads | {"x": dx_BSD})


def test_the_balancing_loss_is_transformers_but_for_its_factor_k_and_for_whose_load_it_takes() -> None:
    generator = np.random.default_rng(0)
    spec = replace(SPEC, aux_coefficient=1.0)
    weights, x_BSD = layer_weights(generator, spec, D, 0), generator.standard_normal((B, S, D))
    memory = RouterMemory.fresh(spec)
    moe_forward(x_BSD, weights, spec, memory)
    memory = memory.after_step(spec)  # the load of this batch, as they use it
    _, cache = moe_forward(x_BSD, weights, spec, memory)
    logits = torch.tensor((x_BSD @ weights["gate.weight"]).reshape(-1, E))
    theirs = load_balancing_loss_func((logits,), E, spec.num_experts_per_tok)
    assert_close(np.array(spec.num_experts_per_tok * balance_losses(cache)[0]), theirs.numpy(), FLOAT32, "aux loss")


def test_biases_move_against_the_load_and_keep_their_mean() -> None:
    memory = RouterMemory(np.full(4, 0.25), np.zeros(4), np.array([6, 2, 4, 4]))
    after = memory.after_step(replace(SPEC, num_experts=4, bias_rate=0.1))
    assert_close(after.bias_E, np.array([-0.1, 0.1, 0.0, 0.0]), FLOAT32, "bias")
    assert_close(after.share_E, np.array([6, 2, 4, 4]) / 16, FLOAT32, "share")


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_logits_loss_and_every_gradient_equal_transformers(norm_topk_prob: bool) -> None:
    mixture = MoESpec(num_experts=E, num_experts_per_tok=2, norm_topk_prob=norm_topk_prob)
    spec = OracleSpec(
        kind="grouped",
        hidden_size=14,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=6,
        num_hidden_layers=2,
        vocab_size=23,
        tie_word_embeddings=False,
        rope_theta=1e6,
        experts=mixture,
    )
    generator = np.random.default_rng(0)
    weights = {name: w for name, w in random_weights(spec, seed=0).items() if ".mlp." not in name}
    for layer in range(2):
        own = layer_weights(generator, mixture, 14, 0)
        weights |= {f"model.layers.{layer}.mlp.{name}": array for name, array in own.items()}
    tokens, labels = generator.integers(0, spec.vocab_size, (2, 2, 7))
    routers = [RouterMemory.fresh(mixture) for _ in range(2)]
    loss, logits, grads = decoder_loss_and_gradients(weights, tokens, labels, spec, routers)

    model = their_model(weights, spec)
    their_logits = model(torch.tensor(tokens)).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), torch.tensor(labels).flatten())
    their_loss.backward()
    # Its norms, angles and both softmaxes are computed in float32 whatever the model's dtype: hence FLOAT32.
    assert_close(logits, their_logits.detach().numpy(), FLOAT32, "logits")
    assert_close(np.array(loss), their_loss.detach().numpy(), FLOAT32, "loss")
    theirs = {
        name: np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()  # no token, no gradient
        for name, parameter in model.named_parameters()
    }
    ours = to_theirs(grads)
    assert set(theirs) == set(ours)
    for name, grad in ours.items():
        assert_close(grad, theirs[name], FLOAT32, name)


def to_theirs(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Linear weights are `[out, in]` there, and each expert's are tensors of their own."""
    found = {}
    for name, array in tensors.items():
        if ".experts." in name:
            prefix, part = name.rsplit(".", 1)
            found |= {f"{prefix}.{expert}.{part}.weight": own.T for expert, own in enumerate(array)}
        else:
            is_linear = name.endswith(("_proj.weight", "gate.weight", "lm_head.weight"))
            found[name] = array.T if is_linear else array
    return found


def their_model(weights: dict[str, np.ndarray], spec: OracleSpec) -> Qwen3MoeForCausalLM:
    assert spec.experts is not None
    config = Qwen3MoeConfig(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        num_hidden_layers=spec.num_hidden_layers,
        vocab_size=spec.vocab_size,
        num_experts=E,
        num_experts_per_tok=spec.experts.num_experts_per_tok,
        norm_topk_prob=spec.experts.norm_topk_prob,
        moe_intermediate_size=F,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        attn_implementation="eager",
    )
    model = Qwen3MoeForCausalLM(config).double()
    state = {name: torch.tensor(np.ascontiguousarray(array)) for name, array in to_theirs(weights).items()}
    model.load_state_dict(state, strict=True)
    return model
