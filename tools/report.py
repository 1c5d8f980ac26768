"""Compare runs: one HTML page with plots and a table, and the table as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.errors import RunError, UserError, run_tool
from vha_paddle.files import atomic_write

SMOOTHING = 0.01  # of the tokens that all runs have

EPILOG = """\
examples:
  one run, also while it goes on:        python tools/report.py runs/quickstart --out report.html
  VHA against a baseline, three seeds:   python tools/report.py runs/vha-s1 runs/vha-s2 runs/vha-s3 runs/gqa8-s* \\
                                           --out report.html
  the table for a script:                python tools/report.py runs/vha runs/gqa8 --json | jq '.groups[].val_loss_end'

Runs that differ in nothing but run.name, run.seed and run.output are seeds of one model: the table gives their mean
and standard deviation. Losses are compared where the runs end, at the tokens that the shortest run has, and at the
training FLOPs that the cheapest run has (matrix products, of scores those that the mask keeps). The page holds
everything: no network, no script.
exit codes: 0 done, 1 the page cannot be written, 2 wrong input.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output directory of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page; replaced if it is there")
    parser.add_argument(
        "--smoothing-tokens",
        type=float,
        metavar="N",
        help="mean of training losses over so many tokens, 0 for none; default: 1%% of the shortest run",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON object")
    arguments = parser.parse_args()
    if arguments.out is None and not arguments.json:
        parser.error("give --out FILE for the page, --json, or both")
    if arguments.smoothing_tokens is not None and not 0 <= arguments.smoothing_tokens < float("inf"):
        raise UserError(f"--smoothing-tokens {arguments.smoothing_tokens}: must be 0 or more tokens")
    if arguments.out is not None and arguments.out.exists() and not arguments.out.is_file():
        raise UserError(f"--out {arguments.out}: is there and is no file; name a file, which is replaced")
    directories = [path.resolve() for path in arguments.runs]
    for path, directory in zip(arguments.runs, directories, strict=True):
        if directories.count(directory) > 1:
            raise UserError(f"{path}: was given twice, and would count as two seeds; give each run once")

    from vha_paddle.run_report.compare import comparison, groups_of
    from vha_paddle.run_report.read import read_run

    runs = [read_run(path) for path in arguments.runs]
    window = arguments.smoothing_tokens
    if window is None:
        window = SMOOTHING * min(run.tokens for run in runs)
    groups = groups_of(runs)
    compared = comparison(groups, window)
    if arguments.out is not None:
        from vha_paddle.run_report.figures import figures
        from vha_paddle.run_report.page import heading, page

        html = page(compared, groups, figures(groups, window))
        try:
            with atomic_write(arguments.out.resolve()) as file:  # a link stays one, /dev/stdout among them
                file.write(html.encode())
        except OSError as error:
            raise RunError(f"{arguments.out}: cannot be written ({error.strerror})") from None
    if arguments.json:
        print(json.dumps(compared, indent=2))
    else:
        print(f"wrote {arguments.out}: {heading(groups)}")


if __name__ == "__main__":
    run_tool(main)
