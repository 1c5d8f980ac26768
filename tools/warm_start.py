"""Start a virtual head model from a trained grouped one: pool its key/value heads, fit the maps, copy the rest."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.config import load_recipe
from vha_paddle.errors import UserError, run_tool
from vha_paddle.host import prepare_process

EPILOG = """\
examples:
  # from the weights alone: W_Q and Premix as the nearest product, Postmix the identity
  python tools/warm_start.py runs/gqa8 recipes/vha.yaml --out warm/vha

  # fitted to the source's activations, with the losses of source, warm start and random start
  python tools/warm_start.py runs/gqa8 recipes/vha.yaml --out warm/vha --data data/train --tokens 1000000

  # then train it
  python tools/train.py recipes/vha.yaml run.start_from=warm/vha

  # all of it small, on this machine
  python tools/train.py recipes/table2_1p7b_gqa16_2.yaml --reduced
  python tools/warm_start.py runs/reduced/table2_1p7b_gqa16_2 recipes/ours_1p7b_vha_from_gqa2.yaml --reduced \\
    --out warm/reduced --data runs/reduced/data/train
  python tools/train.py recipes/ours_1p7b_vha_from_gqa2.yaml --reduced run.start_from=warm/reduced

RECIPE describes the virtual head model. All but its attention must be the source's: hidden size, layers, feed-forward,
vocabulary; of the attention, num_attention_heads and head_dim, and num_key_value_heads must divide the source's. The
first --tokens of the data are fitted on; losses are compared on the next logging.eval_sequences sequences, at least 64.
How it is done, and what to expect: docs/warm_start.md.
exit codes: 0 done, 1 OUT cannot be written, 2 wrong input.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="checkpoint of a grouped model, or a run (its newest is taken)")
    parser.add_argument("recipe", type=Path, help="recipe of the virtual head model to start")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="change a key of RECIPE")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to make, complete or not at all")
    parser.add_argument("--data", type=Path, metavar="PREFIX", help="indexed dataset (.bin, .idx) to fit on")
    parser.add_argument("--tokens", type=int, help="tokens of --data to fit on (default 131072)")
    parser.add_argument("--reduced", action="store_true", help="make RECIPE small, as tools/train.py --reduced does")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args()
    if arguments.tokens is not None and arguments.data is None:
        raise UserError(f"--tokens {arguments.tokens}: has no effect without --data; name a dataset")

    prepare_process()
    if arguments.reduced:
        from vha_paddle.train.reduced import load_reduced

        recipe, changes = load_reduced(arguments.recipe, arguments.overrides)
        print("\n".join(changes), file=sys.stderr)  # stdout is for the report
    else:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
    from vha_paddle.host import set_compute_threads
    from vha_paddle.warm_start.run import describe, warm_start

    set_compute_threads()
    num_tokens = 131_072 if arguments.tokens is None else arguments.tokens
    report = warm_start(arguments.source, recipe, arguments.out, arguments.data, num_tokens)
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(describe(report)))


if __name__ == "__main__":
    run_tool(main)
