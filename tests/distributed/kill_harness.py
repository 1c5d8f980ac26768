"""Kill a run many times at random: `python -m tests.distributed.kill_harness --times 100 [--seed 0]`.

Half of the kills meet a run that saves before it trains on, half one that saves behind training. Takes about 15
seconds a kill; ends with exit code 1 at the first difference from the unbroken run. A run that comes to its end before
all kills are spent is compared, and begun anew.
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
import time
from pathlib import Path

from tests.distributed.kills import KilledRun, random_kill
from tests.train.conftest import tiny_recipe, write_dataset
from vha_paddle.checkpoint.layout import list_steps

INTERVAL, EVAL_INTERVAL, NUM_STEPS = 3, 4, 240


def campaign(directory: Path, dataset: Path, times: int, asynchronous: bool, generator: random.Random) -> None:
    recipe = tiny_recipe(
        dataset,
        directory / "run",
        parallel__tensor=2,
        schedule__total_tokens=64 * NUM_STEPS,
        checkpoint={"interval": INTERVAL, "keep": 10_000, "asynchronous": asynchronous},
        logging__eval_interval=EVAL_INTERVAL,
        failure__hang_seconds=30.0,
    )
    killed = KilledRun(recipe, directory)
    counts: collections.Counter[str] = collections.Counter()
    try:
        killed.train_unbroken()
        while counts["kills"] < times:
            kill, begin = random_kill(generator), time.monotonic()
            code = killed.kill(kill)
            killed.check()
            if code == 0:  # the run was done before
                counts["too late"] += 1
            else:
                counts.update(["kills", kill.phase or "start", f"of {kill.who}"])
            steps = list_steps(killed.output)
            print(
                f"{'asynchronous' if asynchronous else 'synchronous'} {counts['kills']}/{times}: {kill}: launcher "
                f"ended with {code}, as unbroken, newest checkpoint {steps[-1] if steps else None}, "
                f"{time.monotonic() - begin:.0f} s",
                flush=True,
            )
            if killed.is_done:
                killed.check_end()
                killed.begin_anew()
                counts["runs brought to their end"] += 1
        killed.finish()
        killed.check_end()
    finally:
        killed.clean()
    print(f"finished bit-equal; kills: {dict(sorted(counts.items()))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100, help="how many kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        dataset = write_dataset(Path(directory) / "dataset")
        for asynchronous in (False, True):
            place = Path(directory) / f"asynchronous-{asynchronous}"
            place.mkdir()
            campaign(place, dataset, arguments.times // 2, asynchronous, generator)


if __name__ == "__main__":
    main()
