"""A real run with FP8 products beside the same run without: how far apart the losses are. docs/numerics.md has the
figures, also of wrong roundings."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from vha_paddle.config import recipe_from_dict
from vha_paddle.data.builtin import ensure_builtin_data
from vha_paddle.host import set_compute_threads
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.trainer import RunData, Trainer

VOCAB, SEQUENCE, BATCH, STEPS = 512, 32, 8, 300
BOUND = 0.1  # nats per token; policy, as the tolerances are


def train(data: Path, output: Path, fp8: str) -> tuple[np.ndarray, float]:
    """The loss of each step, and the validation loss of the last."""
    tokens = SEQUENCE * BATCH
    recipe = recipe_from_dict(
        {
            "run": {"name": fp8, "seed": 1, "output": str(output / fp8)},
            "model": {
                "vocab_size": VOCAB,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "tie_word_embeddings": True,
                "attention": {
                    "kind": "vha",
                    "num_attention_heads": 8,
                    "num_key_value_heads": 2,
                    "head_dim": 32,
                    "postmix_rank": 2,
                },
            },
            "data": {
                "train": str(data / "train"),
                "validation": str(data / "validation"),
                "tokenizer": str(data / "tokenizer.model"),
                "sequence_length": SEQUENCE,
                "global_batch_size": BATCH,
                "micro_batch_size": BATCH,
            },
            "optim": {"lr": 1e-3, "decay_target": "identity"},
            "schedule": {
                "kind": "cosine",
                "total_tokens": STEPS * tokens,
                "warmup_tokens": 20 * tokens,
                "min_lr": 1e-4,
            },
            "precision": {"fp8": fp8},
            "logging": {"eval_sequences": 256},
        },
        source="loss gap",
    )
    Trainer(recipe, RunData(recipe), Mesh()).fit()
    records = [json.loads(line) for line in (output / fp8 / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == STEPS
    return np.array([record["loss"] for record in records]), records[-1]["val_loss"]


@pytest.mark.timeout(900)
def test_fp8_costs_less_loss_than_its_bound(tmp_path: Path) -> None:
    set_compute_threads()
    ensure_builtin_data(tmp_path / "data", VOCAB)
    exact, exact_validation = train(tmp_path / "data", tmp_path, "none")
    fp8, fp8_validation = train(tmp_path / "data", tmp_path, "all")
    assert exact[-100:].mean() < math.log(VOCAB) - 1.5, "it must have learnt something"
    assert fp8[0] != exact[0], "nothing was rounded"
    gap, validation_gap = (fp8 - exact)[-100:].mean(), fp8_validation - exact_validation
    print(f"exact {exact[-100:].mean():.4f} gap {gap:.4f}, validation {exact_validation:.4f} gap {validation_gap:.4f}")
    assert abs(gap) < BOUND and abs(validation_gap) < BOUND
