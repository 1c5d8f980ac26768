"""A whole decoder with multi-head latent attention against DeepSeek-V3 of transformers with dense layers only."""

from __future__ import annotations

import numpy as np
import pytest

from tests.against_transformers import assert_same_step, with_weights
from tests.cases import CASES, Case, batches
from tests.tolerances import FLOAT32
from tests.weights import trained_weights
from vha_paddle.config import LatentAttention, Model

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
    return with_weights(DeepseekV3ForCausalLM(config), model, weights)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.attention["kind"] == "mla"], ids=lambda case: case.name
)
def test_loss_logits_and_gradients_equal_transformers(case: Case) -> None:
    # its norms of the latents have 1e-6 whatever rms_norm_eps is
    model = case.recipe().model.model_copy(update={"rms_norm_eps": 1e-6})
    weights = trained_weights(model, seed=3)
    # its norms, angles and softmax are computed in float32 whatever the model's dtype: hence FLOAT32
    assert_same_step(model, weights, their_model(model, weights), *next(batches(case)), FLOAT32)
