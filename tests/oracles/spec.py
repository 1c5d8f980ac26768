"""What an oracle computes, and weights at the scale that training reaches.

Letters: D hidden, P physical heads, K key/value heads, N = P*K virtual query heads, H head dim, Q width of a
physical head, R postmix rank, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.oracles.moe import MoESpec

# The largest distance from the identity that the paper's Figure 2 shows for a trained Premix is
# ||W - I||_F = 5.85 at H = 128. Entries of std c / sqrt(H) give c * sqrt(H), so c = 5.85 / sqrt(128).
PREMIX_DEPARTURE = 5.85 / np.sqrt(128.0)

BIAS_STD = 0.5  # what projections of normed inputs give has entries of about 1


@dataclass(frozen=True, kw_only=True)
class OracleSpec:
    """The sizes of a decoder, or of one attention layer of it.

    `kind` is "grouped" (MHA, MQA, GQA) or "vha". `num_attention_heads` is N, the heads that attend. Under
    "vha", `premix` says whether P = N / K physical heads are expanded to N, and `postmix_rank` 0 means no
    Postmix; `premix_silu` and `postmix_silu` apply SiLU to the expanded heads and between Postmix's two factors.
    `physical_head_dim` None is `head_dim`. `gate` says where sigmoid(x W_gate) multiplies the heads; without
    Postmix the two places are one. `window` is how many keys a query sees, its own included. `qk_norm` False leaves out
    the norms of queries and keys; `attention_bias` adds a bias to q, k, v (of the heads that W_Q makes) and the output.

    In a decoder, `sliding` is the attention of all layers but the last of each `full_every`.
    """

    kind: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    premix: bool = False
    premix_silu: bool = False
    physical_head_dim: int | None = None
    postmix_rank: int = 0
    postmix_silu: bool = False
    gate: Literal["none", "before_postmix", "after_postmix"] = "none"
    window: int | None = None
    qk_norm: bool = True
    attention_bias: bool = False
    sliding: OracleSpec | None = None
    full_every: int = 1
    num_hidden_layers: int = 1
    intermediate_size: int = 1
    vocab_size: int = 1
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    experts: MoESpec | None = None

    def __post_init__(self) -> None:
        assert self.kind in ("grouped", "vha")
        assert (self.kind == "vha") == (self.premix or self.postmix_rank > 0)
        assert self.num_attention_heads % self.num_key_value_heads == 0
        assert self.head_dim % 2 == 0
        assert self.premix or not (self.premix_silu or self.physical_head_dim)
        assert (self.sliding is None) == (self.full_every == 1)

    def of_layer(self, layer: int) -> OracleSpec:
        """The attention of a decoder's layer."""
        slides = self.sliding is not None and (layer + 1) % self.full_every != 0
        return self.sliding if slides else self

    @property
    def num_projected_heads(self) -> int:
        """Heads made by W_Q: P under Premix, else N."""
        group_size = self.num_attention_heads // self.num_key_value_heads
        return group_size if self.premix else self.num_attention_heads

    @property
    def projected_head_dim(self) -> int:
        """Width of a head made by W_Q."""
        return self.physical_head_dim or self.head_dim


def random_attention_weights(
    spec: OracleSpec, generator: np.random.Generator, dtype: np.dtype | type = np.float64
) -> dict[str, np.ndarray]:
    """One layer's attention under short names, `[in, out]`, every map far from its initial value."""
    D, H, Q, R = spec.hidden_size, spec.head_dim, spec.projected_head_dim, spec.postmix_rank
    N, K = spec.num_attention_heads, spec.num_key_value_heads
    normal = generator.standard_normal
    weights = {
        "q_proj.weight": normal((D, spec.num_projected_heads * Q)) / np.sqrt(D),
        "k_proj.weight": normal((D, K * H)) / np.sqrt(D),
        "v_proj.weight": normal((D, K * H)) / np.sqrt(D),
        "o_proj.weight": normal((N * H, D)) / np.sqrt(N * H),
    }
    if spec.qk_norm:
        weights |= {"q_norm.weight": _random_gain(generator, H), "k_norm.weight": _random_gain(generator, H)}
    if spec.attention_bias:
        for part in "qkvo":
            weights[f"{part}_proj.bias"] = BIAS_STD * normal(weights[f"{part}_proj.weight"].shape[1])
    if spec.premix:
        weights["premix"] = np.eye(Q, H) + PREMIX_DEPARTURE / np.sqrt(H) * normal((K, Q, H))
    if R:
        # Rows of B A^T then have length about 1, the length of a row of the identity.
        scale = (N * R) ** -0.25
        weights |= {"postmix_a": scale * normal((N, R)), "postmix_b": scale * normal((N, R))}
    if spec.gate != "none":
        weights["g_proj.weight"] = normal((D, N * H)) / np.sqrt(D)
    return {name: array.astype(dtype) for name, array in weights.items()}


def random_weights(spec: OracleSpec, seed: int, dtype: np.dtype | type = np.float64) -> dict[str, np.ndarray]:
    """A whole decoder under canonical names, `[in, out]`, from one seed."""
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal
    D, F, V = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    weights = {"model.embed_tokens.weight": normal((V, D))}
    for layer in range(spec.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        weights[f"{prefix}input_layernorm.weight"] = _random_gain(generator, D)
        for name, array in random_attention_weights(spec.of_layer(layer), generator).items():
            weights[f"{prefix}self_attn.{name}"] = array
        weights[f"{prefix}post_attention_layernorm.weight"] = _random_gain(generator, D)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal((D, F)) / np.sqrt(D)
        weights[f"{prefix}mlp.up_proj.weight"] = normal((D, F)) / np.sqrt(D)
        weights[f"{prefix}mlp.down_proj.weight"] = normal((F, D)) / np.sqrt(F)
    weights["model.norm.weight"] = _random_gain(generator, D)
    if not spec.tie_word_embeddings:
        weights["lm_head.weight"] = normal((D, V)) / np.sqrt(D)
    return {name: array.astype(dtype) for name, array in weights.items()}


def _random_gain(generator: np.random.Generator, size: int) -> np.ndarray:
    """Norm gains off 1 and positive, as trained ones are."""
    return np.exp(0.3 * generator.standard_normal(size))
