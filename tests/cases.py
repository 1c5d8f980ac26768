"""The models that every layout must train alike, and the layouts. A new kind, shape or layout is one row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles.spec import OracleSpec
from tests.weights import trained_weights
from vha_paddle.config import Recipe, recipe_from_dict

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
# AdamW divides a gradient by its own size, so where the gradient is round-off its direction is too; in float32 that
# moves weights by 1e-5 of their size with the usual 1e-8. In float64 the layouts agree to 1e-10 either way.
ADAM_EPS = 1e-6


@dataclass(frozen=True)
class Case:
    name: str
    attention: dict[str, Any]
    tied: bool
    decay_target: str | None = None
    layers: int = 2
    dropout: float = 0.0
    recompute: str = "none"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Float64 proves the arithmetic; float32 is run where the model is trained as most are, to save time."""
        is_plain = self.layers == 2 and self.dropout == 0 and self.recompute == "none"
        return ("float32", "float64") if is_plain else ("float64",)

    def fits(self, layout: str) -> bool:
        """Whether the layers divide among the pipeline stages; the deep models are for pipelines and cost time."""
        degrees = LAYOUTS[layout]
        if self.layers > 2 and layout != "one" and "pipeline" not in degrees:
            return False
        return self.layers % (degrees.get("pipeline", 1) * degrees.get("virtual_pipeline", 1)) == 0

    @property
    def spec(self) -> OracleSpec:
        """The same model, for the numpy oracle."""
        is_vha = self.attention["kind"] == "vha"
        return OracleSpec(
            kind=self.attention["kind"],
            hidden_size=HIDDEN,
            num_attention_heads=self.attention["num_attention_heads"],
            num_key_value_heads=self.attention["num_key_value_heads"],
            head_dim=HEAD_DIM,
            premix=is_vha,
            postmix_rank=self.attention["postmix_rank"] if is_vha else 0,
            num_hidden_layers=self.layers,
            intermediate_size=INTERMEDIATE,
            vocab_size=VOCAB,
            tie_word_embeddings=self.tied,
            rope_theta=ROPE_THETA,
        )

    def recipe(self, layout: str = "one") -> Recipe:
        """A recipe of this model under one of `LAYOUTS`; clipping is active at every step."""
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
                    "tie_word_embeddings": self.tied,
                    "attention": {"head_dim": HEAD_DIM, **self.attention},
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
            },
            source=self.name,
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
)


def batches(case: Case) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same global batches for every layout."""
    generator = np.random.default_rng(len(case.name))
    for _ in range(NUM_STEPS):
        tokens = generator.integers(0, VOCAB, (GLOBAL_BATCH, SEQUENCE + 1))
        yield tokens[:, :-1], tokens[:, 1:]


def starting_weights(case: Case) -> dict[str, np.ndarray]:
    """Trained-size weights: at initialisation Postmix is the identity and Premix nearly so, which hides faults."""
    return trained_weights(case.recipe().model, seed=7)
