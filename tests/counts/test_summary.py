"""The summary of a run, as values and as text."""

from __future__ import annotations

import json
from typing import Any

from tests.counts.models import TINY, tiny
from vha_paddle import counts
from vha_paddle.config import Recipe, recipe_from_dict


def recipe(kind: str, degree: int = 1) -> Recipe:
    sizes = {"sequence_length": 10, "global_batch_size": 8, "micro_batch_size": 2}
    values: dict[str, Any] = {
        "run": {"name": "tiny", "seed": 1, "output": "out"},
        "model": tiny(TINY[kind]).model_dump(),
        "data": {"train": "t", "tokenizer": "m"} | sizes,
        "optim": {"lr": 1e-3} | ({"decay_target": "none"} if kind == "vha" else {}),
        "schedule": {"kind": "cosine", "total_tokens": 815, "warmup_tokens": 0, "min_lr": 0.0},
        "parallel": {"tensor": degree},
        "precision": {"compute": "float32"},
    }
    return recipe_from_dict(values, source="test")


def test_a_summary_holds_the_costs_of_the_run() -> None:
    run = recipe("vha", 2)
    found, model = counts.summary(run), run.model
    assert found["parameters"]["total"] == counts.parameters(model).total
    assert found["parameters"]["non_embedding"] == counts.parameters(model).total - 2 * 40 * 12
    assert found["schedule"] == {"tokens_per_step": 80, "steps": 10, "tokens": 800}
    per_token = counts.training_flops(model, counts.FlopRule(sequence_length=10, causal=True))
    assert found["flops"]["training_per_token"] == per_token
    assert found["flops"]["training_per_token_without_lm_head"] == per_token - 3 * 2 * 12 * 40
    assert found["flops"]["training_total"] == 800 * per_token
    assert found["kv_cache_bytes_bfloat16"] == {"per_token": 3 * 48, "per_sequence": 10 * 3 * 48}


def test_a_summary_survives_json() -> None:
    found = counts.summary(recipe("gqa"))
    assert json.loads(json.dumps(found)) == found


def test_a_rendered_summary_shows_every_number_of_it() -> None:
    found = counts.summary(recipe("vha", 2))
    title, *lines = counts.render(found).splitlines()
    assert title == "tiny: vha attention on 2 ranks"
    for section in (value for value in found.values() if isinstance(value, dict)):
        for name, value in section.items():
            label = name.replace("_", " ")
            assert any(line.startswith(f"  {label} ") and f" {value:,} " in line for line in lines), name


def test_a_rendered_size_has_the_largest_unit_that_leaves_at_least_one() -> None:
    sizes = {"below": 1023, "at": 1024, "above": 3 << 20}
    found = {"run": "tiny", "attention": "vha", "ranks": 1, "cache_bytes": sizes, "flops": {"many": 1_500_000}}
    lines = counts.render(found).splitlines()
    assert lines[0] == "tiny: vha attention on 1 rank"
    assert [line.split()[-2:] for line in lines if line.startswith("  ")] == [
        ["1023", "B"],
        ["1.000", "KiB"],
        ["3.000", "MiB"],
        ["1.500", "M"],
    ]
