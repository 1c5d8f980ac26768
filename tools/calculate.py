"""Print what the model of a recipe costs, from its numbers alone."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vha_paddle import counts
from vha_paddle.config import Recipe, load_recipe
from vha_paddle.errors import run_tool

TEXT = """
topics:
  cache   KV-cache bytes per token of context, as served
  params  parameters by tensor, in total, on one rank of parallel.tensor, and as served after the fold
  flops   FLOPs per token: forward by part; training, and forward once folded, under each rule of counting

examples:
  python tools/calculate.py cache recipes/quickstart.yaml
  python tools/calculate.py params recipes/quickstart.yaml parallel.tensor=4
  python tools/calculate.py flops recipes/quickstart.yaml data.sequence_length=1024 --json

exit status: 0 done, 2 wrong recipe or arguments.
"""


def cache(recipe: Recipe) -> dict[str, int]:
    attention, layers = recipe.model.attention, recipe.model.num_hidden_layers
    per_layer = {dtype: counts.kv_cache_bytes(attention, dtype) for dtype in counts.BYTES}
    values = {f"{dtype}_bytes_per_token_per_layer": size for dtype, size in per_layer.items()}
    return values | {f"{dtype}_bytes_per_token": size * layers for dtype, size in per_layer.items()}


def params(recipe: Recipe) -> dict[str, int]:
    model, whole = recipe.model, counts.parameters(recipe.model)
    tensors = counts.attention_parameters(model)
    values = {f"attention_per_layer.{name}": size for name, size in tensors.items()}
    values |= asdict(whole) | {"non_embedding": whole.non_embedding, "total": whole.total}
    values["total_on_one_rank"] = counts.parameters(model, recipe.parallel.tensor).total
    return values | {"total_served_folded": counts.parameters(counts.folded(model)).total}


def flops(recipe: Recipe) -> dict[str, int]:
    model, rule = recipe.model, counts.FlopRule(sequence_length=recipe.data.sequence_length)
    values = {f"forward.{part}": count for part, count in counts.forward_flops_by_part(model, rule).items()}
    for lm_head, causal in itertools.product((True, False), (False, True)):
        rule = replace(rule, lm_head=lm_head, causal=causal)
        name = f"{'with' if lm_head else 'without'}_lm_head_{'causal' if causal else 'full'}_scores"
        values[f"training.{name}"] = counts.training_flops(model, rule)
        values[f"folded_forward.{name}"] = counts.forward_flops(model, replace(rule, folded=True))
    return values


TOPICS = {"cache": cache, "params": params, "flops": flops}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=TEXT, formatter_class=raw)
    parser.add_argument("topic", choices=TOPICS)
    parser.add_argument("recipe", type=Path, help="YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args()
    values = TOPICS[arguments.topic](load_recipe(arguments.recipe, arguments.overrides))
    if arguments.json:
        print(json.dumps(values, indent=2))
        return
    for name, value in values.items():
        print(f"{name:<52} {value:>22,}")


if __name__ == "__main__":
    run_tool(main)
