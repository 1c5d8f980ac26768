"""Attention kinds: one section per kind, told apart by `kind`, so that a key of another kind is an unknown key.

Letters: D hidden, N query heads that attend (virtual ones under VHA), P physical heads, K key/value heads, H head
dim, R rank of Postmix. Names are Hugging Face's where they have one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from vha_paddle.config.fields import NonNegativeFloat, Positive, PositiveFloat, Section


def _kind_is_written(schema: dict[str, Any]) -> None:
    """In a recipe nothing but `kind` tells the sections apart, so there it has no default."""
    del schema["properties"]["kind"]["default"]
    schema["required"].insert(0, "kind")


def _no_gate(value: Any) -> Any:
    """`none` where a recipe says it as one of kind grouped does: its kind changes without another word for no gate."""
    return "none" if value is False else value


class AttentionSection(Section):
    """What the kinds share: built by its class, a section knows its kind; read from a recipe, it must say it."""

    model_config = ConfigDict(json_schema_extra=_kind_is_written)


class GroupedAttention(AttentionSection):
    """Multi-head, multi-query and grouped-query attention: one class, told apart by the head counts."""

    kind: Literal["grouped"] = "grouped"
    num_attention_heads: Positive
    """Query heads N."""
    num_key_value_heads: Positive
    """Key/value heads K: N is MHA, 1 is MQA."""
    head_dim: Positive
    """Width H of a head."""
    qk_norm: bool = True
    """RMSNorm of each query and key head before RoPE, as Qwen3 has it; false is Llama's form."""
    attention_bias: bool = False
    """A bias on each of the q, k, v and o projections. None of the paper's models has one."""
    output_gate: bool = False
    """Multiply each channel of the heads' outputs by sigmoid(x W_gate) before the output projection."""

    @property
    def query_group_size(self) -> int:
        """Query heads that read one KV head, N / K."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def rope_dim(self) -> int:
        """Channels that RoPE turns."""
        return self.head_dim


class VirtualHeadAttention(AttentionSection):
    """Virtual head attention (VHA). `num_attention_heads` counts the virtual heads: what is served."""

    kind: Literal["vha"] = "vha"
    num_attention_heads: Positive
    """Virtual query heads N = P * K. The physical heads are P = N / K."""
    num_key_value_heads: Positive
    """Key/value heads K, one Premix each."""
    head_dim: Positive
    """Width H of a head."""
    premix: Literal["linear", "silu", "none"] = "linear"
    """`linear`: each group's matrix makes a virtual head of every physical one. `silu`: the paper's ablation, SiLU
    of that; does not fold. `none`: W_Q makes all N heads, and only Postmix is left."""
    postmix: Literal["linear", "silu", "none"] = "linear"
    """`linear`: y + B (A^T y) on the head axis. `silu`: the paper's ablation, y + B SiLU(A^T y); does not fold."""
    postmix_rank: Positive | None = None
    """Rank R of Postmix, M = I + B A^T. The paper uses N / 4; N or more is full rank. Required unless postmix=none."""
    physical_head_dim: Positive | None = None
    """Width of a physical head, which Premix takes to head_dim; left out, it is head_dim."""
    premix_init: Literal["scaled", "unscaled", "orthogonal"] = "scaled"
    """Premix starts at I + noise * normal: `scaled` divides the noise by sqrt(head_dim) (upstream's code and the
    paper's Figure 2, ||W-I||_F = 1.13 at 128), `unscaled` does not (the paper's Table 12, 12.8). `orthogonal`: with
    orthonormal rows or columns times sqrt(head_dim / physical_head_dim), as upstream where the two widths differ."""
    premix_init_noise: NonNegativeFloat = 0.1
    """The noise factor of `premix_init`."""
    postmix_init_std: PositiveFloat = 0.01
    """Standard deviation of A at the start. B starts at zero, so Postmix starts as the identity."""
    postmix_space: Literal["activation", "weight"] = "activation"
    """Where training applies Postmix: to the heads' outputs, or to W_O once per forward pass. The same function and
    gradients; `weight` saves no activation and adds no communication per token under tensor parallelism."""
    qk_norm: bool = True
    """RMSNorm of each query and key head before RoPE, as Qwen3 has it; false is Llama's form."""
    attention_bias: bool = False
    """A bias on each of the q, k, v and o projections. None of the paper's models has one."""
    output_gate: Annotated[
        Literal["none", "before_postmix", "after_postmix"],
        BeforeValidator(_no_gate, json_schema_input_type=Literal["none", "before_postmix", "after_postmix", False]),
    ] = "none"
    """Multiply each channel of the heads' outputs by sigmoid(x W_gate). Before Postmix both maps fold; after it
    (as upstream) only Premix does. `false`, as kind grouped has it, is read as `none`."""

    @property
    def num_physical_heads(self) -> int:
        """Query heads P that W_Q projects to where there is Premix, which makes K virtual heads of each."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def query_group_size(self) -> int:
        """Virtual query heads that read one KV head: the physical heads, P."""
        return self.num_physical_heads

    @property
    def num_projected_heads(self) -> int:
        """Heads that W_Q makes: P with Premix, N without."""
        return self.num_attention_heads if self.premix == "none" else self.num_physical_heads

    @property
    def projected_head_dim(self) -> int:
        """Width of a head that W_Q makes."""
        return self.physical_head_dim or self.head_dim

    @property
    def rope_dim(self) -> int:
        """Channels that RoPE turns."""
        return self.head_dim


class LatentAttention(AttentionSection):
    """Multi-head latent attention (MLA) of DeepSeek-V2: keys and values of all heads from one small latent."""

    kind: Literal["mla"] = "mla"
    num_attention_heads: Positive
    """Query heads N; each has keys and values of its own, made from the latent."""
    kv_lora_rank: Positive = 512
    """Width C of the latent that is cached."""
    q_lora_rank: Positive | None = None
    """Width of a latent that queries are made from; None projects them from the residual stream."""
    qk_nope_head_dim: Positive = 128
    """Width of the part of queries and keys without position."""
    qk_rope_head_dim: Positive = 64
    """Width of the part that RoPE turns; the key's is one for all heads, and cached."""
    v_head_dim: Positive = 128

    @property
    def rope_dim(self) -> int:
        """Channels that RoPE turns."""
        return self.qk_rope_head_dim


class FactorizedAttention(AttentionSection):
    """Multi-matrix factorization attention (MFA), in the form of Step3: query heads from a shared latent, one
    key and one value head."""

    kind: Literal["mfa"] = "mfa"
    num_attention_heads: Positive
    """Query heads N."""
    head_dim: Positive
    """Width C of the one key and of the one value head, and of each query head."""
    q_lora_rank: Positive
    """Width of the latent that all query heads are made from."""

    @property
    def rope_dim(self) -> int:
        """Channels that RoPE turns."""
        return self.head_dim


class GroupedValueAttention(AttentionSection):
    """Grouped value attention (GVA): caches value heads and one small rotary key; the content part of the keys is a
    learned linear map of the values."""

    kind: Literal["gva"] = "gva"
    num_attention_heads: Positive
    """Query heads N."""
    num_key_value_heads: Positive
    """Value heads K; keys are made of them, one map per query head."""
    head_dim: Positive
    """Width H of a value head, and of the content part of a query."""
    qk_rope_head_dim: Positive
    """Width of the rotary part of a query, and of the one rotary key that all heads share."""

    @property
    def query_group_size(self) -> int:
        """Query heads that read one value head, N / K."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def rope_dim(self) -> int:
        """Channels that RoPE turns."""
        return self.qk_rope_head_dim


class ComposedAttention(AttentionSection):
    """Dynamically composable multi-head attention (DCMHA) of DCFormer: scores and weights are mixed across the heads
    of a group, by a static matrix and by low-rank ones made from the query's and the key's token."""

    kind: Literal["dcmha"] = "dcmha"
    num_attention_heads: Positive
    """Heads N, each with its own key and value head."""
    head_dim: Positive
    num_groups: Positive = 1
    """Heads are composed within groups of N / num_groups; tensor parallelism splits by group."""
    compose_rank: Positive = 2
    """Rank of the mixing that depends on a token."""

    @property
    def rope_dim(self) -> int:
        """Channels that RoPE turns."""
        return self.head_dim


Attention = Annotated[
    GroupedAttention
    | VirtualHeadAttention
    | LatentAttention
    | FactorizedAttention
    | GroupedValueAttention
    | ComposedAttention,
    Field(discriminator="kind"),
]
