"""Train a model from a recipe."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.config import Recipe, load_recipe, recipe_to_yaml
from vha_paddle.errors import run_tool
from vha_paddle.host import prepare_process

EPILOG = """\
examples:
  one process:            python tools/train.py recipes/quickstart.yaml parallel.tensor=1
  two ranks, one machine: python -m paddle.distributed.launch --nproc_per_node 2 \\
                            tools/train.py recipes/quickstart.yaml
  another learning rate:  python tools/train.py recipes/quickstart.yaml optim.lr=1e-3 run.output=runs/lr1e-3
  what would run:         python tools/train.py recipes/quickstart.yaml --dry-run

The run directory (run.output) holds metrics.jsonl (one JSON object per step), recipe.yaml (the recipe as it ran)
and checkpoints/. Starting the same command again continues from the newest complete checkpoint.
exit codes: 0 done, 1 the run failed, 2 the recipe or the command line is wrong (nothing was written).
"""


def dry_run(recipe: Recipe, as_json: bool) -> str:
    """What a run costs, and the memory of its fullest rank."""
    from vha_paddle import counts
    from vha_paddle.plan.memory import all_ranks, worst
    from vha_paddle.plan.report import memory_table, rank_values

    figures, fullest = counts.summary(recipe), worst(all_ranks(recipe))
    if as_json:
        return json.dumps(figures | {"worst_rank": rank_values(fullest)}, indent=2)
    more = "communication, time and other layouts: python tools/plan.py"
    return "\n".join([counts.render(figures), *memory_table({"worst": fullest}), more])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="YAML file, see recipes/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change a key of the recipe")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--print-config", action="store_true", help="print the resolved recipe and stop")
    action.add_argument("--dry-run", action="store_true", help="print what would run (sizes, steps, memory) and stop")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    arguments = parser.parse_intermixed_args()
    if arguments.json and not arguments.dry_run:
        parser.error("--json belongs to --dry-run")

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.print_config:
        print(recipe_to_yaml(recipe), end="")
    elif arguments.dry_run:
        print(dry_run(recipe, arguments.json))
    else:
        prepare_process()
        from vha_paddle.train.run import run

        run(recipe)


if __name__ == "__main__":
    run_tool(main)
