"""Print what a run needs before it is paid for: memory of every rank, communication, time, layouts that fit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vha_paddle.config import load_recipe
from vha_paddle.errors import UserError, run_tool
from vha_paddle.plan.cost import make_plan
from vha_paddle.plan.gpus import GPUS, gpu_named
from vha_paddle.plan.layouts import proposals
from vha_paddle.plan.report import render, summary

EPILOG = """\
examples:
  the recipe's own layout:       python tools/plan.py recipes/quickstart.yaml
  another layout:                python tools/plan.py recipes/quickstart.yaml parallel.tensor=4 parallel.sequence=true
  what 128 GPUs should run:      python tools/plan.py recipes/quickstart.yaml --gpus 128 --gpu h200 --mfu 0.45

Layouts are proposed where the recipe's own does not fit into memory, and where --gpus is not its number of ranks: then
the recipe's own layout on so many comes first, whether it fits or not. Times are a range: at the stated MFU, and with
all communication added, since the trainer overlaps none.
Parameters, weights, gradients and optimizer state are exact; activations, times and what fits are estimates.
docs/planning.md has the formulas and what is not modelled.

exit status: 0 done (also where nothing fits), 2 wrong recipe or arguments.
"""


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("recipe", type=Path, help="YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to propose layouts for (default: the recipe's)")
    parser.add_argument("--gpu", default="h800", metavar="NAME", help=f"{', '.join(GPUS)} (default: h800)")
    parser.add_argument("--mfu", type=float, default=0.4, help="utilisation to predict times with (default: 0.4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args()
    gpu = gpu_named(arguments.gpu)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    num_gpus = recipe.num_ranks if arguments.gpus is None else arguments.gpus
    if num_gpus < 1:
        raise UserError(f"--gpus {num_gpus}: must be at least 1; leave it out for the recipe's {recipe.num_ranks}")
    plan = make_plan(recipe, gpu, arguments.mfu)
    wanted = not plan.fits or num_gpus != recipe.num_ranks
    proposed = proposals(recipe, num_gpus, gpu, arguments.mfu) if wanted else []
    if arguments.json:
        print(json.dumps(summary(plan, proposed, num_gpus), indent=2))
    else:
        print(render(plan, proposed, num_gpus))


if __name__ == "__main__":
    run_tool(main)
