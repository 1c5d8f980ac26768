"""The costs of a run as plain values, and as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vha_paddle.config import Recipe
from vha_paddle.counts.cache import cache_bytes, kv_cache_bytes
from vha_paddle.counts.flops import FlopRule, forward_flops, training_flops
from vha_paddle.counts.parameters import active_parameters, parameters


def summary(recipe: Recipe) -> dict[str, Any]:
    """The costs of a run, memory and communication apart, as plain values for JSON; keys carry their units."""
    model, length = recipe.model, recipe.data.sequence_length
    whole, tokens = parameters(model), recipe.num_steps * recipe.tokens_per_step
    rule = FlopRule(sequence_length=length, causal=True)  # as MFU and tools/plan.py count
    without_head = replace(rule, lm_head=False)
    per_token = sum(kv_cache_bytes(model.attention_of(layer), "bfloat16") for layer in range(model.num_hidden_layers))
    return {
        "run": recipe.run.name,
        "attention": model.attention.kind,
        "ranks": recipe.num_ranks,
        "parameters": {
            "total": whole.total,
            "active_per_token": active_parameters(model),
            "non_embedding": whole.non_embedding,
            "attention": whole.attention,
            "mlp": whole.mlp,
        },
        "schedule": {"tokens_per_step": recipe.tokens_per_step, "steps": recipe.num_steps, "tokens": tokens},
        "flops": {
            "forward_per_token": forward_flops(model, rule),
            "training_per_token": training_flops(model, rule),
            "training_per_token_without_lm_head": training_flops(model, without_head),
            "training_total": training_flops(model, rule) * tokens,
        },
        "kv_cache_bytes_bfloat16": {
            "per_token": per_token,
            "per_sequence": cache_bytes(model, length, "bfloat16"),
        },
    }


def render(summary: dict[str, Any]) -> str:
    """A summary as a table to read."""
    ranks = f"{summary['ranks']} rank" + "s" * (summary["ranks"] > 1)
    lines = [f"{summary['run']}: {summary['attention']} attention on {ranks}"]
    for title, section in ((key, value) for key, value in summary.items() if isinstance(value, dict)):
        lines.append(title.replace("_", " "))
        for name, value in section.items():
            short = binary(value) if "bytes" in title else decimal(value)
            lines.append(f"  {name.replace('_', ' '):<36}{value:>32,}  {short:>12}")
    return "\n".join(lines)


def binary(value: float) -> str:
    """Bytes with the largest unit that leaves at least 1."""
    return _with_unit(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def decimal(value: float) -> str:
    """A count with the largest unit that leaves at least 1."""
    return _with_unit(value, 1000, ("", "k", "M", "G", "T", "P", "E", "Z", "Y"))


def _with_unit(value: float, step: int, units: tuple[str, ...]) -> str:
    """Three decimals, and the largest unit that leaves at least 1."""
    power = 0
    while value >= step and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{value:.3f} {units[power]}" if power else f"{value} {units[0]}".rstrip()
