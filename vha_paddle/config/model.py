"""The `model` section: shape of the decoder, its attention kind, its feed-forward.

Letters as in docs/glossary.md. Sizes that follow from others are properties.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vha_paddle.config.attention import Attention, GroupedAttention, VirtualHeadAttention
from vha_paddle.config.fields import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

MAX_LAYERS = 1024
"""A config.json or recipe from anywhere must not make us list the tensors of more."""


class SlidingWindow(Section):
    """Hybrid attention: most layers see a window of the sequence, every few layers one sees all of it."""

    window: Positive
    """Keys that a query of a sliding layer sees, its own position included."""
    full_every: Annotated[int, Field(ge=2)]
    """Of each so many layers the last one sees all: 4 is one full layer to three sliding ones."""
    attention: Annotated[GroupedAttention | VirtualHeadAttention, Field(discriminator="kind")] | None = None
    """Attention of the sliding layers; left out, it is `model.attention`, as the full layers have it."""


class MixtureOfExperts(Section):
    """Every layer's feed-forward as experts of which each token uses a few, as in Qwen3-MoE. Nothing is dropped
    unless `capacity_factor` is given."""

    num_experts: Positive
    """Routed experts E of a layer."""
    num_experts_per_tok: Positive
    """Experts that a token is sent to: the ones with the largest router probability."""
    moe_intermediate_size: Positive
    """Width F of one expert."""
    norm_topk_prob: bool = True
    """Divide the chosen experts' probabilities by their sum."""
    shared_expert_intermediate_size: NonNegative = 0
    """Width of an expert that every token uses beside the chosen ones; 0 is none (Qwen3-MoE)."""
    router_aux_loss_coef: NonNegativeFloat = 1e-3
    """Weight of the balancing loss E * sum(load * probability), its load taken over the global batch before."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the mean squared logsumexp of the router's logits."""
    router_bias_update_rate: NonNegativeFloat = 0.0
    """Balancing without a loss: what an expert's selection bias changes by per optimizer step. 0 is no bias."""
    capacity_factor: PositiveFloat | None = None
    """Most tokens that an expert takes of one sequence, over the mean share; later ones pass it by. None drops none."""


class Model(Section):
    architecture: Literal["qwen3"] = "qwen3"
    """Decoder of the Qwen3 architecture: RMSNorm, RoPE, SwiGLU; QK-norm and biases as `model.attention` says."""
    vocab_size: Positive
    """Rows V of the embedding; at least the tokenizer's vocabulary."""
    hidden_size: Positive
    """Width D of the residual stream."""
    intermediate_size: Positive | None = None
    """Width F of the MLP. Either this or `experts`."""
    experts: MixtureOfExperts | None = None
    num_hidden_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)]
    max_position_embeddings: Positive = 40960
    """Longest sequence the exported model promises to serve (tokens)."""
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e6
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of every projection and of the embedding at the start."""
    tie_word_embeddings: bool
    """Use the embedding as the output projection."""
    hidden_dropout: Fraction = 0.0
    """Share of each attention and MLP output that is dropped before it joins the residual stream, in training. Which
    values are dropped follows from run.seed, layer, sample, position and channel, so it is alike in every layout."""
    attention: Attention
    sliding_window: SlidingWindow | None = None

    def slides(self, layer: int) -> bool:
        """Whether a layer's queries see a window only."""
        return self.sliding_window is not None and (layer + 1) % self.sliding_window.full_every != 0

    def window_of(self, layer: int) -> int | None:
        """Keys that a layer's queries see; None is all before them."""
        if self.sliding_window is None or not self.slides(layer):
            return None
        return self.sliding_window.window

    def attention_of(self, layer: int) -> Attention:
        """The attention of a layer: that of sliding layers may be another one."""
        if self.sliding_window is not None and self.sliding_window.attention is not None and self.slides(layer):
            return self.sliding_window.attention
        return self.attention

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The different attentions of the layers: one, or that of full and that of sliding layers."""
        found = dict.fromkeys(self.attention_of(layer) for layer in range(self.num_hidden_layers))
        return tuple(found)

    @property
    def attention_sections(self) -> dict[str, Attention]:
        """What a recipe says of attention, by section: of all layers, or of full and of sliding ones."""
        sections: dict[str, Attention] = {"model.attention": self.attention}
        if self.sliding_window is not None and self.sliding_window.attention is not None:
            sections["model.sliding_window.attention"] = self.sliding_window.attention
        return sections

    @property
    def has_maps(self) -> bool:
        """Whether a layer has VHA's maps."""
        return any(isinstance(attention, VirtualHeadAttention) for attention in self.attentions)
