"""A whole decoder of grouped attention against transformers' Qwen3 with biases, and Llama with and without them.

Theirs compute norms, rotary angles and softmax in float32 whatever dtype the model has. Stock classes are therefore
compared in float32; with those three in float64, put in their place here, everything else must agree to 1e-10.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from tests.tolerances import FLOAT32, FLOAT64, assert_close
from tests.weights import trained_weights
from vha_paddle.config import GroupedAttention, Model
from vha_paddle.model.decoder import build_decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.parallel.mesh import Mesh

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
    theirs = model_class(config).double()
    tensors = {name: torch.tensor(to_theirs(name, array)) for name, array in weights.items()}
    if model.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    theirs.load_state_dict(tensors, strict=True)
    return theirs


def to_theirs(name: str, array: np.ndarray) -> np.ndarray:
    """A linear weight is `[out, in]` there; the embedding is not a linear map, and a vector has no other side."""
    return array if array.ndim == 1 or name == "model.embed_tokens.weight" else array.T


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
    ours = build_decoder(model, Mesh(), seed=0, dtype="float64")
    parameters = ours.named_tensors()
    for name, parameter in parameters.items():
        parameter.set_value(paddle.to_tensor(weights[name]))
    tokens_BS, labels_BS = np.random.default_rng(0).integers(0, model.vocab_size, (2, 3, 7))
    loss = ours.forward_backward(microbatches_of(tokens_BS, labels_BS, 0, len(tokens_BS), Mesh()), 1 / labels_BS.size)

    theirs = their_model(architecture, model, weights)
    if tolerance == FLOAT64:
        put_float64_in_place_of_float32(theirs)
    logits_BSV = theirs(torch.tensor(tokens_BS)).logits
    their_loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), torch.tensor(labels_BS).flatten())
    their_loss.backward()

    assert_close(ours(paddle.to_tensor(tokens_BS)).numpy(), logits_BSV.detach().numpy(), tolerance, "logits")
    assert_close(np.array(loss / labels_BS.size), their_loss.detach().numpy(), tolerance, "loss")
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert set(gradients) == set(parameters)
    for name, parameter in parameters.items():
        assert_close(to_theirs(name, parameter.grad.numpy()), gradients[name], tolerance, name)
