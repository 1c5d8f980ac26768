"""A whole decoder with multi-head latent attention against DeepSeek-V3 of transformers with dense layers only."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.cases import CASES, Case, batches
from tests.tolerances import FLOAT32, assert_close
from tests.weights import trained_weights
from vha_paddle.config import LatentAttention, Model
from vha_paddle.model.decoder import build_decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.parallel.mesh import Mesh

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # noqa: E402


def their_model(model: Model, weights: dict[str, np.ndarray]) -> torch.nn.Module:
    attention = model.attention
    assert isinstance(attention, LatentAttention)
    config = DeepseekV3Config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        first_k_dense_replace=model.num_hidden_layers,
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_attention_heads,
        kv_lora_rank=attention.kv_lora_rank,
        q_lora_rank=attention.q_lora_rank,
        qk_nope_head_dim=attention.qk_nope_head_dim,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        v_head_dim=attention.v_head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
        rope_interleave=False,
        tie_word_embeddings=model.tie_word_embeddings,
        attn_implementation="eager",
    )
    theirs = DeepseekV3ForCausalLM(config).double()
    tensors = {name: torch.tensor(to_theirs(name, array)) for name, array in weights.items()}
    if model.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    theirs.load_state_dict(tensors, strict=True)
    return theirs


def to_theirs(name: str, array: np.ndarray) -> np.ndarray:
    """A linear weight is `[out, in]` there; the embedding is not a linear map."""
    return array if name == "model.embed_tokens.weight" else array.T


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.attention["kind"] == "mla"], ids=lambda case: case.name
)
def test_loss_logits_and_gradients_equal_transformers(case: Case) -> None:
    # its norms of the latents have 1e-6 whatever rms_norm_eps is
    model = case.recipe().model.model_copy(update={"rms_norm_eps": 1e-6})
    weights = trained_weights(model, seed=3)
    ours = build_decoder(model, Mesh(), seed=0, dtype="float64")
    parameters = ours.named_tensors()
    for name, parameter in parameters.items():
        parameter.set_value(paddle.to_tensor(weights[name]))
    tokens_BS, labels_BS = next(batches(case))
    loss = ours.forward_backward(microbatches_of(tokens_BS, labels_BS, 0, len(tokens_BS), Mesh()), 1 / labels_BS.size)

    theirs = their_model(model, weights)
    logits_BSV = theirs(torch.tensor(tokens_BS)).logits
    their_loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), torch.tensor(labels_BS).flatten())
    their_loss.backward()

    # its norms, angles and softmax are computed in float32 whatever the model's dtype: hence FLOAT32
    assert_close(ours(paddle.to_tensor(tokens_BS)).numpy(), logits_BSV.detach().numpy(), FLOAT32, "logits")
    assert_close(np.array(loss / labels_BS.size), their_loss.detach().numpy(), FLOAT32, "loss")
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert set(gradients) == set(parameters)
    for name, parameter in parameters.items():
        assert_close(to_theirs(name, parameter.grad.numpy()), gradients[name], FLOAT32, name)
