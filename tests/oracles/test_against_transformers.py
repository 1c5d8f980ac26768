"""The decoder oracle against transformers' Qwen3: logits, loss, and every gradient by torch's autograd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.oracles.decoder import decoder_loss_and_gradients
from tests.oracles.spec import OracleSpec, random_weights
from tests.tolerances import FLOAT32, assert_close

SPEC = OracleSpec(
    kind="grouped",
    hidden_size=14,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=6,
    num_hidden_layers=2,
    intermediate_size=9,
    vocab_size=23,
    tie_word_embeddings=False,
    rope_theta=1e6,
)
HYBRID = replace(SPEC, num_hidden_layers=4, sliding=replace(SPEC, window=3), full_every=3)


def to_theirs(name: str, array: np.ndarray) -> np.ndarray:
    """Linear weights are `[out, in]` there."""
    return array.T if name.endswith("_proj.weight") or name == "lm_head.weight" else array


def their_model(weights: dict[str, np.ndarray], spec: OracleSpec) -> Qwen3ForCausalLM:
    layers = [spec.of_layer(layer) for layer in range(spec.num_hidden_layers)]
    windows = {layer.window for layer in layers if layer.window is not None}
    config = Qwen3Config(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        num_hidden_layers=spec.num_hidden_layers,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        tie_word_embeddings=False,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        use_sliding_window=bool(windows),
        sliding_window=max(windows, default=None),
        layer_types=["full_attention" if layer.window is None else "sliding_attention" for layer in layers],
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).double()
    tensors = {name: torch.tensor(to_theirs(name, array)) for name, array in weights.items()}
    model.load_state_dict(tensors, strict=True)
    return model


@pytest.mark.parametrize("spec", [SPEC, HYBRID], ids=["full", "two sliding layers to one full"])
def test_decoder_loss_logits_and_gradients_equal_transformers(spec: OracleSpec) -> None:
    weights, generator = random_weights(spec, seed=0), np.random.default_rng(0)
    tokens, labels = generator.integers(0, spec.vocab_size, (2, 2, 7))
    loss, logits, grads = decoder_loss_and_gradients(weights, tokens, labels, spec)

    model = their_model(weights, spec)
    their_logits = model(torch.tensor(tokens)).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), torch.tensor(labels).flatten())
    their_loss.backward()

    # Its norms, angles and softmax are computed in float32 whatever the model's dtype: hence FLOAT32.
    assert_close(logits, their_logits.detach().numpy(), FLOAT32, "logits")
    assert_close(np.array(loss), their_loss.detach().numpy(), FLOAT32, "loss")
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(theirs) == set(grads)
    for name, grad in grads.items():
        assert_close(to_theirs(name, grad), np.asarray(theirs[name]), FLOAT32, name)
