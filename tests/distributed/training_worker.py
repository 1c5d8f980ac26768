"""Train a recipe on this rank, as tools/train.py does: `python training_worker.py RECIPE`."""

from __future__ import annotations

import sys
from pathlib import Path

from vha_paddle.config import load_recipe
from vha_paddle.train.run import run

if __name__ == "__main__":
    run(load_recipe(Path(sys.argv[1])))
