"""`SelfAttentionVHA` on its own, in a decoder that is not ours: no trainer, no mesh, no recipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn

from tests.oracles.attention import attention_backward, attention_forward
from tests.oracles.spec import OracleSpec, random_attention_weights
from tests.tolerances import FLOAT64, assert_close
from vha_paddle import GroupedAttention, RotaryTables, SelfAttentionGrouped, SelfAttentionVHA, VirtualHeadAttention

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, HEAD_DIM, THETA = 10, 6, 50.0
CONFIG = VirtualHeadAttention(
    kind="vha", num_attention_heads=6, num_key_value_heads=2, head_dim=HEAD_DIM, postmix_rank=2
)
SPEC = OracleSpec(
    kind="vha",
    hidden_size=HIDDEN,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=HEAD_DIM,
    premix=True,
    postmix_rank=2,
    rope_theta=THETA,
)


@pytest.fixture
def float64() -> None:
    """The layer alone takes Paddle's default dtype, as any Paddle layer does."""
    outer = paddle.get_default_dtype()
    paddle.set_default_dtype("float64")
    yield
    paddle.set_default_dtype(outer)


def test_output_and_gradients_equal_the_oracle(float64: None) -> None:
    layer = SelfAttentionVHA(HIDDEN, CONFIG)
    weights = random_attention_weights(SPEC, np.random.default_rng(0))
    parameters = dict(layer.named_parameters())
    assert set(parameters) == set(weights)
    for name, parameter in parameters.items():
        parameter.set_value(paddle.to_tensor(weights[name]))
    generator = np.random.default_rng(1)
    x, gradient = generator.standard_normal((2, 2, 7, HIDDEN))
    expected, cache = attention_forward(x, weights, SPEC)
    expected_dx, expected_dweights = attention_backward(gradient, cache)

    x_BSD = paddle.to_tensor(x, stop_gradient=False)
    y_BSD = layer(x_BSD, RotaryTables(HEAD_DIM, THETA, "float64"))
    y_BSD.backward(paddle.to_tensor(gradient))
    assert_close(y_BSD.numpy(), expected, FLOAT64, "output")
    assert_close(x_BSD.grad.numpy(), expected_dx, FLOAT64, "input gradient")
    for name, parameter in parameters.items():
        assert_close(parameter.grad.numpy(), expected_dweights[name], FLOAT64, name)


def test_at_the_start_postmix_is_the_identity_and_premix_near_it() -> None:
    paddle.seed(0)
    layer = SelfAttentionVHA(256, CONFIG.model_copy(update={"head_dim": 128}))
    assert not layer.postmix_b.numpy().any()
    assert layer.postmix_a.numpy().std() == pytest.approx(CONFIG.postmix_init_std, rel=0.5)
    for premix in layer.premix.numpy():
        # 0.1 * sqrt(128): the distance that the paper's Figure 2 starts from
        assert np.linalg.norm(premix - np.eye(128)) == pytest.approx(1.13, rel=0.05)


def test_the_unscaled_start_is_the_papers_table_12() -> None:
    config = CONFIG.model_copy(update={"head_dim": 128, "premix_init": "unscaled"})
    for premix in SelfAttentionVHA(256, config).premix.numpy():
        assert np.linalg.norm(premix - np.eye(128)) == pytest.approx(12.8, rel=0.05)


def test_identity_maps_make_grouped_attention_with_repeated_queries() -> None:
    vha = SelfAttentionVHA(HIDDEN, CONFIG)
    grouped = SelfAttentionGrouped(
        HIDDEN, GroupedAttention(kind="grouped", num_attention_heads=6, num_key_value_heads=2, head_dim=HEAD_DIM)
    )
    vha.premix.set_value(paddle.eye(HEAD_DIM).tile([2, 1, 1]))
    for name in ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        getattr(grouped, name).weight.set_value(getattr(vha, name).weight)
    grouped.q_proj.weight.set_value(paddle.concat([vha.q_proj.weight, vha.q_proj.weight], axis=1))
    x_BSD, rope = paddle.randn([2, 5, HIDDEN]), RotaryTables(HEAD_DIM, THETA, "float32")
    assert_close(vha(x_BSD, rope).numpy(), grouped(x_BSD, rope).numpy(), 1e-5, "output")


def test_two_layers_start_differently_and_paddles_seed_decides() -> None:
    def first_weights() -> list[np.ndarray]:
        paddle.seed(5)
        return [SelfAttentionVHA(HIDDEN, CONFIG).q_proj.weight.numpy() for _ in range(2)]

    first = first_weights()
    assert not np.array_equal(first[0], first[1])


def test_it_trains_in_somebody_elses_decoder() -> None:
    class TheirBlock(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, HIDDEN), nn.Linear(HIDDEN, 11)
            self.attention = SelfAttentionVHA(HIDDEN, CONFIG)
            self.rope = RotaryTables(HEAD_DIM, THETA, "float32")

        def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
            x = self.embedding(tokens)
            return self.head(x + self.attention(x, self.rope))

    paddle.seed(0)
    model = TheirBlock()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    tokens = paddle.to_tensor(np.random.default_rng(0).integers(0, 11, (4, 9)))
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).reshape([-1, 11]), tokens[:, 1:].reshape([-1]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert np.abs(model.attention.postmix_b.numpy()).max() > 0


def test_the_layer_needs_neither_paddlenlp_nor_wandb() -> None:
    code = (
        "import sys; from vha_paddle import SelfAttentionVHA; "
        "print(sorted({'paddlenlp', 'wandb', 'sentencepiece', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr
