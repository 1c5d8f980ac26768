"""The models that every layout must train alike, and the layouts. A new kind, shape or layout is one row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.oracles.moe import MoESpec, RouterMemory
from tests.oracles.spec import OracleSpec
from tests.weights import trained_weights
from vha_paddle.config import GroupedAttention, MixtureOfExperts, Recipe, VirtualHeadAttention, recipe_from_dict

# Every layout must train every case as `one` does. A new layout is one row.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor_2": {"tensor": 2},
    "tensor_4": {"tensor": 4},
    "tensor_2_sequence": {"tensor": 2, "sequence": True},
    "tensor_4_sequence": {"tensor": 4, "sequence": True},
    "data_2": {"data": 2},
    "sharding_2": {"sharding": 2},
    "sharding_2_stage_2": {"sharding": 2, "sharding_stage": 2},
    "sharding_2_stage_3": {"sharding": 2, "sharding_stage": 3},
    "tensor_2_data_2": {"tensor": 2, "data": 2},
    "tensor_2_sequence_sharding_2": {"tensor": 2, "sequence": True, "sharding": 2},
    "data_2_sharding_2": {"data": 2, "sharding": 2},
    "data_2_sharding_2_stage_2": {"data": 2, "sharding": 2, "sharding_stage": 2},
    "tensor_2_sharding_2_stage_3": {"tensor": 2, "sharding": 2, "sharding_stage": 3},
    "pipeline_2": {"pipeline": 2},
    "pipeline_4_virtual_2": {"pipeline": 4, "virtual_pipeline": 2},
    "pipeline_4_virtual_2_few_microbatches": {"pipeline": 4, "virtual_pipeline": 2},
    "tensor_2_pipeline_2": {"tensor": 2, "pipeline": 2},
    "tensor_2_sequence_pipeline_2": {"tensor": 2, "sequence": True, "pipeline": 2},
    "pipeline_2_sharding_2": {"pipeline": 2, "sharding": 2},
    "context_2": {"context": 2},
    "tensor_2_sequence_context_2": {"tensor": 2, "sequence": True, "context": 2},
    "context_2_sharding_2": {"context": 2, "sharding": 2},
    "sharding_2_expert_2": {"sharding": 2, "expert": 2},
    "sharding_4_expert_2": {"sharding": 4, "expert": 2},
    "sharding_2_stage_3_expert_2": {"sharding": 2, "sharding_stage": 3, "expert": 2},
    "sharding_4_stage_3_expert_2": {"sharding": 4, "sharding_stage": 3, "expert": 2},
    "data_2_sharding_2_expert_2": {"data": 2, "sharding": 2, "expert": 2},
    "tensor_2_sharding_2_expert_2": {"tensor": 2, "sharding": 2, "expert": 2},
    "pipeline_2_sharding_2_expert_2": {"pipeline": 2, "sharding": 2, "expert": 2},
    "context_2_sharding_2_expert_2": {"context": 2, "sharding": 2, "expert": 2},
}
# Sequences of a microbatch where a layout needs another number of them. Interleaving takes 8 microbatches on 4 stages.
MICRO_BATCHES = {"pipeline_4_virtual_2": 1}


def num_ranks(layout: str) -> int:
    """Ranks that a layout takes."""
    axes = ("tensor", "pipeline", "context", "data", "sharding")
    return math.prod(degree for axis, degree in LAYOUTS[layout].items() if axis in axes)


NUM_STEPS = 5
SEQUENCE, GLOBAL_BATCH, MICRO_BATCH = 8, 8, 2
VOCAB, HIDDEN, INTERMEDIATE, HEAD_DIM = 56, 24, 32, 6
ROPE_THETA = 100.0
NORM_EPS = 1e-2  # so large that a norm with another one shows
# AdamW divides a gradient by its own size, so where the gradient is round-off its direction is too; in float32 that
# moves weights by 1e-5 of their size with the usual 1e-8. In float64 the layouts agree to 1e-10 either way.
ADAM_EPS = 1e-6


@dataclass(frozen=True)
class Case:
    name: str
    attention: dict[str, Any]
    """Keys of `model.attention`; head_dim is HEAD_DIM unless given, and null takes it out."""
    tied: bool
    decay_target: str | None = None
    layers: int = 2
    dropout: float = 0.0
    recompute: str = "none"
    layouts: tuple[str, ...] | None = None
    """The layouts beside `one` that this case is run under, in float64 only; None is all. The whole matrix is costly,
    and a variant of an attention or a feed-forward needs the layouts that cut it."""
    model: dict[str, Any] = field(default_factory=dict)
    """Keys of the `model` section beside those above, or in their place."""
    fp8: str = "none"
    eod_id: int | None = None
    """Attention keeps to the documents that this token ends; None is no mask."""

    @property
    def has_oracle(self) -> bool:
        """Whether `spec` describes the whole model."""
        sections = self.recipe().model
        kinds = {attention.kind for attention in sections.attentions}
        is_plain = sections.experts is None and self.fp8 == "none" and self.eod_id is None
        return kinds <= {"grouped", "vha"} and is_plain

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Float64 proves the arithmetic; float32 is run where the model is trained as most are, to save time."""
        is_plain = self.layers == 2 and self.dropout == 0 and self.recompute == "none" and self.layouts is None
        return ("float32", "float64") if is_plain else ("float64",)

    def fits(self, layout: str) -> bool:
        """Whether the case is run under a layout. Layers must divide among the stages; deep models cost time."""
        degrees = LAYOUTS[layout]
        if self.layouts is not None and layout not in ("one", *self.layouts):
            return False
        if "expert" in degrees and "experts" not in self.model:
            return False
        if self.layouts is None and self.layers > 2 and layout != "one" and "pipeline" not in degrees:
            return False
        return self.layers % (degrees.get("pipeline", 1) * degrees.get("virtual_pipeline", 1)) == 0

    @property
    def spec(self) -> OracleSpec:
        """The same model, for the numpy oracle."""
        model = self.recipe().model
        spec = replace(
            oracle_attention(model.attention, HIDDEN, ROPE_THETA),
            num_hidden_layers=self.layers,
            intermediate_size=INTERMEDIATE,
            vocab_size=VOCAB,
            tie_word_embeddings=self.tied,
            experts=None if model.experts is None else oracle_experts(model.experts),
        )
        hybrid = model.sliding_window
        if hybrid is None:
            return spec
        sliding = oracle_attention(hybrid.attention or model.attention, HIDDEN, ROPE_THETA, hybrid.window)
        return replace(spec, sliding=sliding, full_every=hybrid.full_every)

    def fresh_routers(self) -> list[RouterMemory]:
        """What the routers of the oracle know before the first step."""
        experts = self.spec.experts
        return [] if experts is None else [RouterMemory.fresh(experts) for _ in range(self.layers)]

    def recipe(self, layout: str = "one") -> Recipe:
        """A recipe of this model under one of `LAYOUTS`; clipping is active at every step."""
        attention = {"head_dim": HEAD_DIM, **self.attention}
        return recipe_from_dict(
            {
                "run": {"name": self.name, "seed": 5, "output": "unused"},
                "model": {
                    "vocab_size": VOCAB,
                    "hidden_size": HIDDEN,
                    "intermediate_size": INTERMEDIATE,
                    "num_hidden_layers": self.layers,
                    "hidden_dropout": self.dropout,
                    "rope_theta": ROPE_THETA,
                    "rms_norm_eps": NORM_EPS,
                    "tie_word_embeddings": self.tied,
                    "attention": {key: value for key, value in attention.items() if value is not None},
                    **self.model,
                },
                "data": {
                    "train": "unused",
                    "tokenizer": "unused",
                    "sequence_length": SEQUENCE,
                    "global_batch_size": GLOBAL_BATCH,
                    "micro_batch_size": MICRO_BATCHES.get(layout, MICRO_BATCH),
                },
                "optim": {"lr": 2e-4, "eps": ADAM_EPS, "max_grad_norm": 0.3, "decay_target": self.decay_target},
                "schedule": {"kind": "cosine", "total_tokens": 1000, "warmup_tokens": 0, "min_lr": 0.0},
                "parallel": LAYOUTS[layout],
                "memory": {"recompute": self.recompute},
                "precision": {"fp8": self.fp8},
            },
            source=self.name,
        )


def oracle_attention(
    attention: GroupedAttention | VirtualHeadAttention, hidden_size: int, rope_theta: float, window: int | None = None
) -> OracleSpec:
    """The same attention, for the numpy oracle."""
    spec = OracleSpec(
        kind="grouped",
        hidden_size=hidden_size,
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        rope_theta=rope_theta,
        rms_norm_eps=NORM_EPS,
        window=window,
        qk_norm=attention.qk_norm,
        attention_bias=attention.attention_bias,
    )
    if not isinstance(attention, VirtualHeadAttention):
        return replace(spec, gate="before_postmix" if attention.output_gate else "none")
    return replace(
        spec,
        kind="vha",
        premix=attention.premix != "none",
        premix_silu=attention.premix == "silu",
        physical_head_dim=attention.physical_head_dim,
        postmix_rank=attention.postmix_rank or 0,
        postmix_silu=attention.postmix == "silu",
        gate=attention.output_gate,
    )


def oracle_experts(experts: MixtureOfExperts) -> MoESpec:
    """The same mixture, for the numpy oracle."""
    return MoESpec(
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        norm_topk_prob=experts.norm_topk_prob,
        aux_coefficient=experts.router_aux_loss_coef,
        z_coefficient=experts.router_z_loss_coef,
        bias_rate=experts.router_bias_update_rate,
        capacity_factor=experts.capacity_factor,
    )


def _grouped(num_query: int, num_kv: int) -> dict[str, Any]:
    return {"kind": "grouped", "num_attention_heads": num_query, "num_key_value_heads": num_kv}


def _vha(num_virtual: int, num_kv: int, rank: int, postmix_space: str = "activation") -> dict[str, Any]:
    return {
        "kind": "vha",
        "num_attention_heads": num_virtual,
        "num_key_value_heads": num_kv,
        "postmix_rank": rank,
        "postmix_space": postmix_space,
    }


def _mla(q_lora_rank: int | None) -> dict[str, Any]:
    return {
        "kind": "mla",
        "num_attention_heads": 4,
        "head_dim": None,
        "kv_lora_rank": 10,
        "q_lora_rank": q_lora_rank,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
    }


def _gva(num_query: int, num_value: int) -> dict[str, Any]:
    return _grouped(num_query, num_value) | {"kind": "gva", "qk_rope_head_dim": 4}


def _dcmha(num_heads: int, num_groups: int, rank: int) -> dict[str, Any]:
    sizes = {"num_attention_heads": num_heads, "num_groups": num_groups, "compose_rank": rank}
    return {"kind": "dcmha", **sizes}


def _experts(num_experts: int, per_token: int, width: int, **changes: Any) -> dict[str, Any]:
    """The balancing loss weighs so much that a fault in it shows."""
    sizes = {"num_experts": num_experts, "num_experts_per_tok": per_token, "moe_intermediate_size": width}
    return {"intermediate_size": None, "experts": {"router_aux_loss_coef": 0.1, **sizes, **changes}}


def _hybrid(window: int, attention: dict[str, Any] | None = None) -> dict[str, Any]:
    """Every other layer slides, the first of them."""
    section = {"window": window, "full_every": 2}
    return {"sliding_window": section | ({"attention": {"head_dim": HEAD_DIM, **attention}} if attention else {})}


# What cuts an attention: its heads, its sequence, its layers, and heads and sequence together.
ATTENTION_LAYOUTS = (
    "tensor_2",
    "tensor_4",
    "tensor_2_sequence",
    "context_2",
    "pipeline_2",
    "tensor_2_sequence_context_2",
)
# What cuts a bias (as a projection's columns, or not at all on the residual stream), and what sums its gradient.
BIAS_LAYOUTS = (
    "tensor_2",
    "tensor_4",
    "tensor_2_sequence",
    "context_2",
    "pipeline_2",
    "sharding_2_stage_3",
)
# What cuts the positions of documents, or runs other sequences meanwhile.
DOCUMENT_LAYOUTS = (
    "tensor_2",
    "tensor_2_sequence",
    "context_2",
    "tensor_2_sequence_context_2",
    "pipeline_2",
    "sharding_2_stage_3",
)
# What cuts experts, and what cuts the tokens that are counted.
EXPERT_LAYOUTS = (
    "tensor_2",
    "tensor_2_sequence",
    "data_2",
    "pipeline_2",
    "context_2",
    *(layout for layout, degrees in LAYOUTS.items() if "expert" in degrees),
)
CASES = (
    Case("vha_2_groups_tied", _vha(8, 2, 3), tied=True, decay_target="identity"),
    Case("vha_3_groups_untied", _vha(12, 3, 2), tied=False, decay_target="zero"),
    Case("vha_1_group", _vha(4, 1, 4), tied=True, decay_target="none"),
    Case("mha", _grouped(4, 4), tied=True),
    Case("gqa_4", _grouped(8, 4), tied=False),
    Case("gqa_2_fewer_kv_heads_than_ranks", _grouped(8, 2), tied=True),
    Case("mqa", _grouped(4, 1), tied=False),
    Case("vha_weight_space", _vha(8, 2, 3, "weight"), tied=True, decay_target="identity"),
    Case("vha_recompute_full", _vha(8, 2, 3), tied=True, decay_target="identity", recompute="full", dropout=0.2),
    Case("vha_recompute_selective", _vha(8, 2, 3), tied=False, decay_target="zero", recompute="selective"),
    Case("gqa_dropout", _grouped(8, 2), tied=True, dropout=0.3),
    Case("vha_8_layers", _vha(8, 2, 3), tied=True, decay_target="identity", layers=8, dropout=0.1),
    Case("gqa_8_layers_untied", _grouped(8, 2), tied=False, layers=8),
    Case(
        "vha_silu_premix_gate_before_postmix_in_weight_space",
        _vha(8, 2, 3, "weight") | {"premix": "silu", "output_gate": "before_postmix"},
        tied=True,
        decay_target="identity",
        layouts=ATTENTION_LAYOUTS,
    ),
    Case(
        "vha_silu_postmix_gate_after_it",
        _vha(8, 2, 3) | {"postmix": "silu", "output_gate": "after_postmix"},
        tied=False,
        decay_target="zero",
        recompute="selective",
        layouts=ATTENTION_LAYOUTS,
    ),
    Case(
        "vha_premix_only_from_narrow_heads",
        _vha(8, 2, 3) | {"postmix": "none", "postmix_rank": None, "physical_head_dim": 4, "premix_init": "orthogonal"},
        tied=True,
        decay_target="zero",
        layouts=ATTENTION_LAYOUTS,
    ),
    Case(
        "vha_silu_postmix_only",
        _vha(8, 2, 3) | {"premix": "none", "postmix": "silu"},
        tied=False,
        decay_target="identity",
        layouts=ATTENTION_LAYOUTS,
    ),
    Case(
        "hybrid_vha_full_gqa_sliding",
        _vha(8, 2, 3) | {"output_gate": "before_postmix"},
        tied=True,
        decay_target="identity",
        model=_hybrid(3, _grouped(4, 4) | {"head_dim": 4}),
        layouts=ATTENTION_LAYOUTS,
    ),
    Case(
        "gqa_gate_full_and_sliding",
        _grouped(8, 2) | {"output_gate": True},
        tied=True,
        model=_hybrid(4),
        layouts=ATTENTION_LAYOUTS,
    ),
    Case(
        "gqa_bias_without_qk_norm_fewer_kv_heads_than_ranks",
        _grouped(8, 2) | {"attention_bias": True, "qk_norm": False},
        tied=False,
        layouts=BIAS_LAYOUTS,
    ),
    Case(
        "vha_bias_without_qk_norm_in_weight_space",
        _vha(8, 2, 3, "weight") | {"attention_bias": True, "qk_norm": False},
        tied=True,
        decay_target="identity",
        recompute="selective",
        layouts=BIAS_LAYOUTS,
    ),
    Case(
        "vha_bias_postmix_only",
        _vha(8, 2, 3) | {"attention_bias": True, "premix": "none", "output_gate": "before_postmix"},
        tied=False,
        decay_target="zero",
        layouts=BIAS_LAYOUTS,
    ),
    Case("mla", _mla(14), tied=True, layouts=ATTENTION_LAYOUTS),
    Case("mla_queries_projected", _mla(None), tied=False, recompute="selective", layouts=ATTENTION_LAYOUTS),
    Case(
        "mfa",
        {"kind": "mfa", "num_attention_heads": 4, "q_lora_rank": 14},
        tied=True,
        recompute="selective",
        layouts=ATTENTION_LAYOUTS,
    ),
    Case("gva", _gva(8, 4), tied=True, layouts=ATTENTION_LAYOUTS),
    Case(
        "gva_fewer_value_heads_than_ranks",
        _gva(8, 2),
        tied=False,
        recompute="selective",
        layouts=ATTENTION_LAYOUTS,
    ),
    Case("dcmha", _dcmha(8, 4, 2), tied=True, layouts=ATTENTION_LAYOUTS),
    Case("dcmha_wide_groups", _dcmha(12, 4, 1), tied=False, recompute="selective", layouts=ATTENTION_LAYOUTS),
    Case(
        "moe_vha_tied",
        _vha(8, 2, 3),
        tied=True,
        decay_target="identity",
        layouts=EXPERT_LAYOUTS,
        model=_experts(6, 2, 10),
    ),
    Case(
        "moe_shared_expert_bias_z_loss",
        _grouped(8, 2),
        tied=False,
        layouts=EXPERT_LAYOUTS,
        model=_experts(
            8,
            3,
            6,
            norm_topk_prob=False,
            shared_expert_intermediate_size=8,
            router_z_loss_coef=0.01,
            router_bias_update_rate=0.05,
        ),
    ),
    Case(
        "moe_recompute_full",
        _vha(8, 2, 3),
        tied=True,
        decay_target="zero",
        dropout=0.1,
        recompute="full",
        layouts=("tensor_2_sharding_2_expert_2", "pipeline_2_sharding_2_expert_2", "sharding_2_stage_3_expert_2"),
        model=_experts(6, 2, 10),
    ),
    Case(
        "moe_capacity",
        _grouped(4, 4),
        tied=True,
        layouts=("tensor_2_sequence", "sharding_2_expert_2", "tensor_2_sharding_2_expert_2"),
        model=_experts(6, 2, 10, capacity_factor=1.0),
    ),
    Case(
        "documents_vha_full_gqa_sliding",
        _vha(8, 2, 3) | {"output_gate": "before_postmix"},
        tied=True,
        decay_target="identity",
        recompute="full",
        dropout=0.1,
        model=_hybrid(3, _grouped(4, 4)),
        layouts=DOCUMENT_LAYOUTS,
        eod_id=0,
    ),
    Case("documents_gqa_8_layers", _grouped(8, 2), tied=False, layers=8, layouts=("pipeline_4_virtual_2",), eod_id=0),
    Case("documents_mla", _mla(14), tied=True, recompute="selective", layouts=("context_2",), eod_id=0),
    Case(
        "documents_mfa",
        {"kind": "mfa", "num_attention_heads": 4, "q_lora_rank": 14},
        tied=True,
        layouts=("context_2",),
        eod_id=0,
    ),
    Case("documents_gva", _gva(8, 2), tied=True, layouts=("context_2",), eod_id=0),
    Case("documents_dcmha", _dcmha(8, 4, 2), tied=True, layouts=("tensor_2_sequence_context_2",), eod_id=0),
    Case(
        # sizes of which every tensor rank has whole tiles; the ranks of the other axes share out whole microbatches
        "gqa_fp8",
        _grouped(4, 2) | {"head_dim": 128, "attention_bias": True},
        tied=False,
        model={"hidden_size": 160, "intermediate_size": 256},
        fp8="all",
        recompute="full",
        layouts=("tensor_2", "tensor_2_sequence", "pipeline_2", "sharding_2_stage_3"),
    ),
)


def batches(case: Case) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same global batches for every layout. Where documents matter every fourth token ends one."""
    generator = np.random.default_rng(len(case.name))
    for _ in range(NUM_STEPS):
        tokens = generator.integers(0, VOCAB, (GLOBAL_BATCH, SEQUENCE + 1))
        if case.eod_id is not None:
            tokens[generator.random(tokens.shape) < 0.25] = case.eod_id
        yield tokens[:, :-1], tokens[:, 1:]


def starting_weights(case: Case) -> dict[str, np.ndarray]:
    """Trained-size weights: at initialisation Postmix is the identity and Premix nearly so, which hides faults."""
    return trained_weights(case.recipe().model, seed=7)
