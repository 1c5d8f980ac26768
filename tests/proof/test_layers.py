"""Blocks one at a time, against the decoder in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from tests.checkpoints import SMALL_EXPERTS, SMALL_GROUPED, SMALL_HYBRID, SMALL_MIXTURE, SMALL_VHA, small_model
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from tests.weights import trained_weights
from vha_paddle.config import Model
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.proof import layers
from vha_paddle.proof.layers import Blocks, Recorded, Steered, attended, fill, in_attention, parameters_of, run

MLA = {"kind": "mla", "num_attention_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
MODELS: dict[str, Model] = {
    "vha": small_model(SMALL_VHA),
    "gated, without premix": small_model(SMALL_VHA | {"premix": "none", "output_gate": "after_postmix"}),
    "hybrid": small_model(SMALL_VHA, **SMALL_HYBRID),
    "mixture": small_model(SMALL_VHA, **SMALL_MIXTURE),
    "shared expert": small_model(
        SMALL_GROUPED, **SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"shared_expert_intermediate_size": 8}}
    ),
    "mla": small_model(MLA | {"v_head_dim": 6}),
}
X_BSD = np.random.default_rng(0).standard_normal((5, 9, 20))


def weights_of(model: Model) -> dict[str, np.ndarray]:
    return trained_weights(model, seed=2)


def whole(model: Model, dtype: str) -> Decoder:
    decoder = build_decoder(model, Mesh(), seed=0, dtype=dtype)
    decoder.eval()
    values = weights_of(model)
    for name, parameter in decoder.named_tensors().items():
        parameter.set_value(values[name].astype(dtype))
    return decoder


@pytest.mark.parametrize("at_once", [9, 10, 4096])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FLOAT32), ("float64", FLOAT64)])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_blocks_one_at_a_time_are_the_decoder(
    model: Model, dtype: str, tolerance: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_TOKENS_AT_ONCE", at_once)
    decoder, weights, blocks = whole(model, dtype), weights_of(model), Blocks(model, dtype)
    x_BSD = X_BSD.astype(dtype)
    expected_BSD = paddle.to_tensor(x_BSD)
    for layer in range(model.num_hidden_layers):
        block = blocks.block(layer)
        for name, parameter in parameters_of(block).items():
            fill(parameter, weights[name])
        one = decoder.layers[layer]
        with paddle.no_grad():
            attention_BSD = one.self_attn(one.input_layernorm(expected_BSD), one.rope)
            expected_BSD = one(expected_BSD)
        assert_close(attended(block, x_BSD), attention_BSD.numpy(), tolerance, f"attention {layer}")
        x_BSD = run(block, x_BSD)
        assert_close(x_BSD, expected_BSD.numpy(), tolerance, f"layer {layer}")


def test_a_block_has_no_memory_before_it_is_filled_and_attention_needs_no_more_than_its_own() -> None:
    model = MODELS["vha"]
    block, weights = Blocks(model, "float64").block(0), weights_of(model)
    parameters = parameters_of(block)
    assert not any(parameter._is_initialized() for parameter in parameters.values())
    for name, parameter in parameters.items():
        if in_attention(name):
            fill(parameter, weights[name])
    assert np.isfinite(attended(block, X_BSD)).all()
    others = [name for name, parameter in parameters.items() if not parameter._is_initialized()]
    assert others and all(".mlp." in name or "post_attention_layernorm" in name for name in others)


def _mixture_block(model: Model, weights: dict[str, np.ndarray], balance: Any) -> Any:
    blocks = Blocks(model, "float64")
    blocks.choose_by(balance)
    block = blocks.block(1)
    for name, parameter in parameters_of(block).items():
        fill(parameter, weights[name])
    return block


@pytest.mark.parametrize("at_once", [9, 4096])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_steered_mixture_uses_the_experts_of_the_other(
    normalised: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router in reverse order chooses others; steered, it gives the probabilities that it has for the given ones."""
    monkeypatch.setattr(layers, "_TOKENS_AT_ONCE", at_once)
    model = small_model(SMALL_VHA, **SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"norm_topk_prob": normalised}})
    weights, recorded = weights_of(model), Recorded(model)
    expected_BSD = run(_mixture_block(model, weights, recorded), X_BSD)

    same = Steered(model, recorded)
    assert_close(run(_mixture_block(model, weights, same), X_BSD), expected_BSD, FLOAT64, "same weights")
    assert same.mean_agreement() == 1

    reversed_router = dict(weights)
    gate = "model.layers.1.mlp.gate.weight"
    reversed_router[gate] = weights[gate][:, ::-1]
    other = Steered(model, recorded)
    found_BSD = run(_mixture_block(model, reversed_router, other), X_BSD)
    assert other.mean_agreement() < 0.8
    assert np.abs(found_BSD - expected_BSD).max() > 1e-3
