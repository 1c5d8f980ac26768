"""tools/train.py, in which a rank meets a misfortune: `python failing_training_worker.py RECIPE RANK STEP WHAT`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from vha_paddle.config import load_recipe
from vha_paddle.errors import run_tool
from vha_paddle.host import prepare_process

RANK, STEP, WHAT = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def main() -> None:
    prepare_process()
    from vha_paddle.train import trainer
    from vha_paddle.train.run import run

    train_step = trainer.train_step
    calls = iter(range(1, 1000))

    def with_misfortune(*arguments: Any) -> Any:
        if next(calls) == STEP and os.environ["PADDLE_TRAINER_ID"] == str(RANK):
            if WHAT == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if WHAT == "hangs":
                time.sleep(600)
            raise ZeroDivisionError("a bug")
        return train_step(*arguments)

    trainer.train_step = with_misfortune
    run(load_recipe(Path(sys.argv[1])))


run_tool(main)
