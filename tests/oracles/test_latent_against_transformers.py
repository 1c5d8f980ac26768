"""The oracle of MLA against DeepSeek's layers in transformers, whose checkpoints interleave the rotary channels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.latent import LatentSpec, backward, forward
from tests.tolerances import FLOAT32, assert_close

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.models.deepseek_v2 import configuration_deepseek_v2, modeling_deepseek_v2  # noqa: E402
from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3  # noqa: E402

D, B, S, N, C, A, R, V, Q = 12, 2, 6, 3, 5, 3, 4, 7, 8
THETA = 30.0
SIZES = {
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": N,
    "kv_lora_rank": C,
    "qk_nope_head_dim": A,
    "qk_rope_head_dim": R,
    "v_head_dim": V,
    "rope_theta": THETA,
    "attn_implementation": "eager",
}


def weights_of(query_latent: bool, generator: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        "kv_a_proj_with_mqa": (D, C + R),
        "kv_a_layernorm": (C,),
        "kv_b_proj": (C, N * (A + V)),
        "o_proj": (N * V, D),
    }
    if query_latent:
        shapes |= {"q_a_proj": (D, Q), "q_a_layernorm": (Q,), "q_b_proj": (Q, N * (A + R))}
    else:
        shapes["q_proj"] = (D, N * (A + R))
    return {
        f"{name}.weight": generator.standard_normal(shape) / np.sqrt(shape[0]) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def interleaved(name: str, weight: np.ndarray) -> np.ndarray:
    """Rotary columns j and j + R/2, which this package turns together, side by side."""
    order = np.arange(R).reshape(2, R // 2).T.reshape(-1)
    if name in ("q_proj.weight", "q_b_proj.weight"):
        by_head = weight.reshape(len(weight), N, A + R)
        return np.concatenate([by_head[..., :A], by_head[..., A:][..., order]], axis=-1).reshape(weight.shape)
    if name == "kv_a_proj_with_mqa.weight":
        return np.concatenate([weight[:, :C], weight[:, C:][:, order]], axis=-1)
    return weight


def loaded(layer: torch.nn.Module, weights: dict[str, np.ndarray]) -> torch.nn.Module:
    layer = layer.double()
    layer.load_state_dict({name: torch.tensor(weight.T) for name, weight in weights.items()}, strict=True)
    return layer


@pytest.mark.parametrize("model", ["v2", "v3 interleaved", "v3 halves"])
@pytest.mark.parametrize("query_latent", [True, False])
def test_output_and_gradients_equal_transformers(model: str, query_latent: bool) -> None:
    generator = np.random.default_rng(0)
    weights, x, dout = weights_of(query_latent, generator), *generator.standard_normal((2, B, S, D))
    spec = LatentSpec(num_heads=N, latent=C, content=A, rotary=R, value=V, query_latent=query_latent, theta=THETA)
    expected, cache = forward(x, weights, spec)

    theirs = {name: weight if "halves" in model else interleaved(name, weight) for name, weight in weights.items()}
    angles = torch.arange(S)[:, None] * THETA ** (-torch.arange(0, R, 2) / R)
    mask = torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    sizes = SIZES | {"q_lora_rank": Q if query_latent else None}
    x_BSD = torch.tensor(x, requires_grad=True)
    if model == "v2":
        config = configuration_deepseek_v2.DeepseekV2Config(**sizes)
        layer = loaded(modeling_deepseek_v2.DeepseekV2Attention(config, 0), theirs)
        turns = torch.polar(torch.ones_like(angles), angles)[None]
        y_BSD = layer(x_BSD, attention_mask=mask, position_embeddings=turns)[0]
    else:
        config = configuration_deepseek_v3.DeepseekV3Config(**sizes, rope_interleave="interleaved" in model)
        layer = loaded(modeling_deepseek_v3.DeepseekV3Attention(config, 0), theirs)
        tables = tuple(torch.cat([f(angles), f(angles)], dim=-1)[None] for f in (torch.cos, torch.sin))
        y_BSD = layer(x_BSD, tables, mask)[0]
    y_BSD.backward(torch.tensor(dout))

    # its norms and softmax are computed in float32 whatever the model's dtype: hence FLOAT32
    assert_close(expected, y_BSD.detach().numpy(), FLOAT32, "output")
    dx, dweights = backward(dout, cache)
    assert_close(dx, x_BSD.grad.numpy(), FLOAT32, "input gradient")
    for name, parameter in layer.named_parameters():
        gradient = dweights[name] if "halves" in model else interleaved(name, dweights[name])
        assert_close(gradient.T, parameter.grad.numpy(), FLOAT32, name)
