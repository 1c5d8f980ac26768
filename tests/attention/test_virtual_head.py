"""`SelfAttentionVHA` on its own, in a decoder that is not ours: no trainer, no mesh, no recipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from tests.attention.layer_checks import HIDDEN, THETA, assert_causal, assert_layer_equals_oracle
from tests.cases import oracle_attention
from tests.oracles.attention import attention_backward, attention_forward
from tests.tolerances import FLOAT32, assert_close
from vha_paddle import GroupedAttention, RotaryTables, SelfAttentionGrouped, SelfAttentionVHA, VirtualHeadAttention
from vha_paddle.parallel.init import Orthogonal

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIM = 6
CONFIG = VirtualHeadAttention(
    kind="vha", num_attention_heads=6, num_key_value_heads=2, head_dim=HEAD_DIM, postmix_rank=2
)
# Each way to the two maps, the gate in both places, physical heads of both widths, with and without a window.
VARIANTS = {
    "linear": {},
    "SiLU after Premix": {"premix": "silu"},
    "SiLU inside Postmix": {"postmix": "silu"},
    "Premix only": {"postmix": "none", "postmix_rank": None},
    "Postmix only": {"premix": "none"},
    "Postmix only, with SiLU": {"premix": "none", "postmix": "silu"},
    "narrow physical heads": {"physical_head_dim": 4, "premix_init": "orthogonal"},
    "wide physical heads": {"physical_head_dim": 9, "premix_init": "orthogonal", "premix": "silu"},
    "gate before Postmix": {"output_gate": "before_postmix"},
    "gate after Postmix": {"output_gate": "after_postmix"},
    "gate after Postmix with SiLU": {"output_gate": "after_postmix", "premix": "silu", "postmix": "silu"},
    "gate without Postmix": {"output_gate": "before_postmix", "postmix": "none", "postmix_rank": None},
    "weight space": {"postmix_space": "weight"},
    "weight space, gate before": {"postmix_space": "weight", "output_gate": "before_postmix"},
    "no QK-norm": {"qk_norm": False},
    "biases": {"attention_bias": True},
    "biases, SiLU after Premix, gate after Postmix": {
        "attention_bias": True,
        "premix": "silu",
        "output_gate": "after_postmix",
    },
    "biases without QK-norm, Postmix only": {"attention_bias": True, "qk_norm": False, "premix": "none"},
    "biases, wide physical heads, weight space": {
        "attention_bias": True,
        "physical_head_dim": 9,
        "premix_init": "orthogonal",
        "postmix_space": "weight",
    },
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("window", [None, 3])
def test_output_and_gradients_equal_the_oracle(variant: dict[str, Any], recompute: str, window: int | None) -> None:
    config = VirtualHeadAttention(**CONFIG.model_dump() | variant)
    spec = oracle_attention(config, HIDDEN, THETA, window)
    assert_layer_equals_oracle(config, attention_forward, attention_backward, spec, recompute, window=window)


def test_a_later_token_leaves_earlier_outputs_bit_equal() -> None:
    assert_causal(CONFIG)


def test_biases_start_at_zero_so_that_a_fresh_layer_is_one_without_them() -> None:
    paddle.seed(3)
    without = SelfAttentionVHA(HIDDEN, CONFIG)
    paddle.seed(3)
    biased = SelfAttentionVHA(HIDDEN, CONFIG.model_copy(update={"attention_bias": True}))
    for part in "qkvo":
        projection = getattr(biased, f"{part}_proj")
        assert projection.bias.shape == projection.weight.shape[1:] and not projection.bias.numpy().any()
        projection.weight.set_value(getattr(without, f"{part}_proj").weight)
    biased.premix.set_value(without.premix)
    biased.postmix_a.set_value(without.postmix_a)
    x_BSD, rope = paddle.randn([2, 5, HIDDEN]), RotaryTables(HEAD_DIM, THETA, "float32")
    assert np.array_equal(biased(x_BSD, rope).numpy(), without(x_BSD, rope).numpy())


def test_the_layer_alone_takes_paddles_default_dtype() -> None:
    outer = paddle.get_default_dtype()
    paddle.set_default_dtype("float64")
    try:
        assert {parameter.dtype for parameter in SelfAttentionVHA(HIDDEN, CONFIG).parameters()} == {paddle.float64}
    finally:
        paddle.set_default_dtype(outer)


@pytest.mark.parametrize("physical", [48, 64, 96])
def test_the_orthogonal_start_keeps_lengths_up_to_the_widths(physical: int) -> None:
    update = {"head_dim": 64, "physical_head_dim": physical, "premix_init": "orthogonal"}
    first, second = SelfAttentionVHA(256, CONFIG.model_copy(update=update)).premix.numpy().astype(np.float64)
    assert first.shape == (physical, 64)
    short = min(physical, 64)
    for premix in (first, second):
        product = premix @ premix.T if physical <= 64 else premix.T @ premix
        assert_close(product, 64 / physical * np.eye(short), FLOAT32, "scaled identity")
    assert np.linalg.norm(first - second) > 1


def test_the_orthogonal_start_prefers_no_direction() -> None:
    """QR alone leaves its triangle's signs in the draw: the first entry would always be negative."""
    drawn = Orthogonal(1.0).draw(np.random.default_rng(0), (400, 3, 2))
    assert np.abs(drawn.mean(axis=0)).max() < 0.15


def test_at_the_start_postmix_is_the_identity_and_premix_near_it() -> None:
    paddle.seed(0)
    layer = SelfAttentionVHA(256, CONFIG.model_copy(update={"head_dim": 128, "postmix_init_std": 0.05}))
    assert not layer.postmix_b.numpy().any()
    assert layer.postmix_a.numpy().std() == pytest.approx(0.05, rel=0.5)
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
