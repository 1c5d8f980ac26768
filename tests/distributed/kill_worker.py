"""tools/train.py, killed at a chosen moment: `python kill_worker.py RECIPE [SIGNAL WHO STEP PHASE SECONDS]`.

So many seconds after rank 0 has entered the phase, it sends the signal to WHO: a rank's number, `ranks` (all),
`launcher`, or `everything`. A signal from outside is no other; only the moment is more exact.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.distributed.kills import victims
from vha_paddle.config import load_recipe
from vha_paddle.errors import run_tool
from vha_paddle.host import prepare_process
from vha_paddle.train.interrupt import end_with_launcher


def strike(number: int, who: str, seconds: float) -> None:
    time.sleep(seconds)
    for process in victims(os.getppid(), who):
        os.kill(process, number)


def main() -> None:
    end_with_launcher()
    prepare_process()
    from vha_paddle.train.phases import Phases
    from vha_paddle.train.run import run

    if len(sys.argv) > 2 and os.environ["PADDLE_TRAINER_ID"] == "0":
        number, who = signal.Signals[f"SIG{sys.argv[2]}"], sys.argv[3]
        step, phase, seconds = int(sys.argv[4]), sys.argv[5], float(sys.argv[6])
        enter, plan = Phases.enter, [(step, phase)]  # a phase may begin once for each microbatch

        def watched(self: Any, at: int, begins: str) -> None:
            enter(self, at, begins)
            if (at, begins) in plan:
                plan.clear()
                threading.Thread(target=strike, args=(number, who, seconds), daemon=True).start()

        Phases.enter = watched  # type: ignore[method-assign]
    run(load_recipe(Path(sys.argv[1])))


if __name__ == "__main__":
    run_tool(main)
