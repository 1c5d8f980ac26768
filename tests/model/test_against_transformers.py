"""A whole decoder of grouped attention against transformers' Qwen3 with biases, and Llama with and without them.

Theirs compute norms, rotary angles and softmax in float32 whatever dtype the model has. Stock classes are therefore
compared in float32; with those three in float64, put in their place here, everything else must agree to 1e-10.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.against_transformers import assert_same_step, with_weights
from tests.tolerances import FLOAT32, FLOAT64
from tests.weights import trained_weights
from vha_paddle.config import GroupedAttention, Model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

HIDDEN, HEAD_DIM, THETA, EPS = 14, 6, 50.0, 1e-2
CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def model_of(architecture: str, attention_bias: bool, tied: bool) -> Model:
    attention = GroupedAttention(
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        qk_norm=architecture == "qwen3",
        attention_bias=attention_bias,
    )
    return Model(
        vocab_size=23,
        hidden_size=HIDDEN,
        intermediate_size=9,
        num_hidden_layers=2,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        tie_word_embeddings=tied,
        attention=attention,
    )


def their_model(architecture: str, model: Model, weights: dict[str, np.ndarray]) -> torch.nn.Module:
    attention = model.attention
    assert isinstance(attention, GroupedAttention)
    config_class, model_class = CLASSES[architecture]
    config = config_class(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        attention_bias=attention.attention_bias,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
        tie_word_embeddings=model.tie_word_embeddings,
        attn_implementation="sdpa",  # its softmax is in the dtype of the model
    )
    return with_weights(model_class(config), model, weights)


class Angles(torch.nn.Module):
    """cos and sin of position s times theta^(-2c/H), both halves of the channels alike, in float64."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angles = torch.cat([position_ids[..., None] * frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()


def put_float64_in_place_of_float32(theirs: torch.nn.Module) -> None:
    theirs.model.rotary_emb = Angles()
    norms = [(name, module) for name, module in theirs.named_modules() if type(module).__name__.endswith("RMSNorm")]
    for name, module in norms:
        norm = torch.nn.RMSNorm(module.weight.shape, eps=EPS)
        norm.weight = module.weight
        theirs.set_submodule(name, norm)


@pytest.mark.parametrize("tolerance", [FLOAT64, FLOAT32], ids=["float64", "stock"])
@pytest.mark.parametrize(
    ("architecture", "attention_bias", "tied"),
    [("qwen3", True, True), ("llama", False, True), ("llama", True, False)],
)
def test_loss_logits_and_gradients_equal_transformers(
    architecture: str, attention_bias: bool, tied: bool, tolerance: float
) -> None:
    model = model_of(architecture, attention_bias, tied)
    weights = trained_weights(model, seed=3)
    theirs = their_model(architecture, model, weights)
    if tolerance == FLOAT64:
        put_float64_in_place_of_float32(theirs)
    tokens_BS, labels_BS = np.random.default_rng(0).integers(0, model.vocab_size, (2, 3, 7))
    assert_same_step(model, weights, theirs, tokens_BS, labels_BS, tolerance)
