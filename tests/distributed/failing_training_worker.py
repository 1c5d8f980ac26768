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
    import paddle

    from vha_paddle.train import step, trainer
    from vha_paddle.train.run import run

    train_step, accumulate = trainer.train_step, step.accumulate_gradients
    calls = iter(range(1, 1000))

    def with_misfortune(*arguments: Any, **named: Any) -> Any:
        if next(calls) == STEP and os.environ["PADDLE_TRAINER_ID"] == str(RANK):
            if WHAT == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if WHAT == "hangs":
                time.sleep(600)
            if WHAT == "finds_no_number":
                step.accumulate_gradients = lambda *arguments: accumulate(*arguments) * float("nan")
                result = train_step(*arguments, **named)
                step.accumulate_gradients = accumulate
                return result
            if WHAT == "has_no_gradient":  # of a gain, which every tensor rank computes for itself

                def spoiled(model: Any, *rest: Any) -> float:
                    loss = accumulate(model, *rest)
                    model.norm.weight.grad.scale_(float("nan"))
                    return loss

                step.accumulate_gradients = spoiled
                result = train_step(*arguments, **named)
                step.accumulate_gradients = accumulate
                return result
            if WHAT == "lacks_memory":
                paddle.empty([1 << 46])
            raise ZeroDivisionError("a bug")
        return train_step(*arguments, **named)

    trainer.train_step = with_misfortune
    run(load_recipe(Path(sys.argv[1])))


run_tool(main)
