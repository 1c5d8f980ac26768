"""What Premix and Postmix have learned: a table per layer, and figures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.errors import RunError, UserError, run_tool
from vha_paddle.map_report.read import read_report, table

EPILOG = """\
examples:
  # a run: its newest checkpoint, and its course if it was trained with logging.maps_interval
  python tools/analyze_maps.py runs/quickstart --out figures/quickstart

  # one checkpoint; the metrics alone, say of a run that is still going on another machine
  python tools/analyze_maps.py runs/quickstart/checkpoints/step-00000500 --out figures/step500
  python tools/analyze_maps.py metrics.jsonl --out figures/course

  # the last layer's distances
  python tools/analyze_maps.py runs/quickstart --out figures/quickstart --json | jq '.maps.premix_distance[-1]'

the columns (norms are Frobenius, values of the groups stand beside each other):
  |W-I|, |W|     how far Premix has come from the identity, and from zero: where weight decay can pull
  rank of W-I    effective rank, exp(entropy of the normalised singular values): directions that Premix changes
  divergence     of the groups: 0 all have the same Premix, 2 independent ones
  |M-I|, sigma   size of Postmix's departure B A^T, and its largest singular value
  rank of M-I    effective rank of B A^T, at most postmix_rank
  off-diagonal   share of |M|^2 that mixes heads

OUT gets premix_distance.png, postmix_matrix.png, singular_values.png and history.png, as far as there are data.
Definitions and how to read them: docs/maps.md.
exit codes: 0 done, 1 OUT cannot be written, 2 wrong input.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="checkpoint, run directory, or metrics.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="directory of the figures; made if need be")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"--out {arguments.out}: is a file; name a directory")
    report = read_report(arguments.source)

    from vha_paddle.map_report.figures import write_figures  # matplotlib takes a second to import

    try:
        figures = [str(path) for path in write_figures(report, arguments.out)]
    except OSError as error:
        raise RunError(f"{arguments.out}: cannot be written ({error.strerror})") from None
    if arguments.json:
        print(json.dumps({"source": report.source, "step": report.step, "maps": report.record, "figures": figures}))
    else:
        print("\n".join([*table(report), f"wrote {', '.join(figures) or 'no figure'}"]))


if __name__ == "__main__":
    run_tool(main)
