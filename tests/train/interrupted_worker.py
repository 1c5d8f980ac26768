"""tools/train.py that gets signals: `python interrupted_worker.py RECIPE [before] (TERM|INT|wait)...`.

They come in the middle of the second step, or with `before` while data are opened. `wait` lets the time pass within
which signals count as one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vha_paddle.config import load_recipe
from vha_paddle.errors import run_tool
from vha_paddle.host import prepare_process


def send(plan: list[str]) -> None:
    for word in plan:
        if word == "wait":
            time.sleep(2.5)
        else:
            os.kill(os.getpid(), getattr(signal, f"SIG{word}"))
        time.sleep(0.2)


def main() -> None:
    prepare_process()
    from vha_paddle.train import run as run_module
    from vha_paddle.train import trainer

    recipe, plan = load_recipe(Path(sys.argv[1])), sys.argv[2:]
    if plan[0] == "before":
        RunData = run_module.RunData

        def opened(*arguments: Any) -> Any:
            send(plan[1:])
            return RunData(*arguments)

        run_module.RunData = opened  # type: ignore[assignment, misc]
    else:
        train_step, calls = trainer.train_step, iter(range(1, 1000))

        def with_signals(*arguments: Any, **named: Any) -> Any:
            if next(calls) == 2:
                send(plan)
            return train_step(*arguments, **named)

        trainer.train_step = with_signals
    run_module.run(recipe)


run_tool(main)
