"""Train a model from a recipe."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.config import Recipe, load_recipe, recipe_to_yaml
from vha_paddle.config.reduced import DATA, VOCAB_SIZE
from vha_paddle.errors import run_tool
from vha_paddle.host import prepare_process
from vha_paddle.train.interrupt import end_with_launcher

LAUNCHED_RANK = "PADDLE_TRAINER_ID"  # Paddle's launcher sets it for each rank

EPILOG = """\
examples:
  one process:            python tools/train.py recipes/quickstart.yaml parallel.tensor=1
  two ranks, one machine: python -m paddle.distributed.launch --nproc_per_node 2 \\
                            tools/train.py recipes/quickstart.yaml
  another learning rate:  python tools/train.py recipes/quickstart.yaml optim.lr=1e-3 run.output=runs/lr1e-3
  what would run:         python tools/train.py recipes/quickstart.yaml --dry-run
  any recipe, small:      python tools/train.py recipes/table1_1p7b_vha.yaml --reduced

--reduced makes a recipe small enough for this machine and keeps its structure: attention kind and groups, experts,
sliding layers, FP8, recompute, schedule, parallel axes of up to 4 ranks in total. Every change is printed; overrides
are applied after it. It trains 20 steps on the English that ships with CPython, in runs/reduced/NAME, and starts its
ranks itself where no launcher did. run.name gets the ending _reduced. A run that is there already is continued if it
is of the same model and data, else refused.

The run directory (run.output) holds metrics.jsonl (one JSON object per step), recipe.yaml (the recipe as it ran)
and checkpoints/. Starting the same command again continues from the newest whole checkpoint. SIGTERM or SIGINT saves
after the step under way and ends. What to do after each failure: docs/running.md.
exit codes: 0 done, 1 the run failed, 2 the recipe or the command line is wrong (nothing was written), 75 a signal asked
for the end (saved), 143 or 130 a second signal, or one before training began (not saved).
"""


def dry_run(recipe: Recipe, as_json: bool) -> str:
    """What a run costs, and the memory of its fullest rank."""
    from vha_paddle import counts
    from vha_paddle.plan.memory import all_ranks, worst
    from vha_paddle.plan.report import memory_table, rank_values

    figures, fullest = counts.summary(recipe), worst(all_ranks(recipe))
    if as_json:
        return json.dumps(figures | {"worst_rank": rank_values(fullest)}, indent=2)
    data = "data were not looked at: whether they are there, and fit, shows when the run starts"
    more = "communication, time and other layouts: python tools/plan.py"
    return "\n".join([counts.render(figures), *memory_table({"worst": fullest}), data, more])


def prepare_reduced_run(recipe: Recipe, allow_changed: list[str]) -> None:
    """Make the data of reduced runs if the recipe reads it; without a launcher, become one where ranks are needed."""
    from vha_paddle.data.builtin import ensure_builtin_data
    from vha_paddle.train.reduced import check_earlier_run

    if recipe.data.tokenizer.startswith(DATA):
        ensure_builtin_data(Path(DATA), VOCAB_SIZE)
    if LAUNCHED_RANK in os.environ:
        return
    check_earlier_run(recipe, allow_changed)
    if recipe.num_ranks > 1:
        quiet = ["-W", "ignore:No ccache found", "-m", "paddle.distributed.launch", "--log_level", "WARNING"]
        ranks = ["--nproc_per_node", str(recipe.num_ranks), "--log_dir", f"{recipe.run.output}/logs"]
        command = [sys.executable, *quiet, *ranks, *sys.argv]
        print(f"starting {recipe.num_ranks} ranks: {shlex.join(command)}", file=sys.stderr, flush=True)
        os.execv(sys.executable, command)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="YAML file, see recipes/")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="change a key of the recipe"
    )
    parser.add_argument(
        "--reduced", action="store_true", help="make the recipe small enough for this machine, see below"
    )
    parser.add_argument(
        "--allow-changed",
        action="append",
        default=[],
        metavar="section.key",
        help="let this key differ from the recipe of the checkpoint that is continued; may be repeated",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--print-config", action="store_true", help="print the resolved recipe and stop")
    action.add_argument(
        "--dry-run", action="store_true", help="print what would run (sizes, steps, memory; data are not read)"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    arguments = parser.parse_intermixed_args()
    if arguments.json and not arguments.dry_run:
        parser.error("--json belongs to --dry-run")

    end_with_launcher()  # before Paddle's import, which takes seconds
    prepare_process()
    if arguments.reduced:
        from vha_paddle.train.reduced import load_reduced

        recipe, changes = load_reduced(arguments.recipe, arguments.overrides)
        if not (arguments.print_config or arguments.dry_run):
            prepare_reduced_run(recipe, arguments.allow_changed)
        if os.environ.get(LAUNCHED_RANK, "0") == "0":
            print("\n".join(changes), file=sys.stderr, flush=True)  # stdout is for --print-config and --json
    else:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.print_config:
        print(recipe_to_yaml(recipe), end="")
    elif arguments.dry_run:
        print(dry_run(recipe, arguments.json))
    else:
        from vha_paddle.train.console import outlive_console
        from vha_paddle.train.run import run

        outlive_console()
        run(recipe, arguments.allow_changed)


if __name__ == "__main__":
    run_tool(main)
