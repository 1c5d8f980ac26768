"""SIGTERM and SIGINT: a run saves after the step under way and ends; a second signal ends it at once.

Until training begins there is nothing to save, and the kernel ends the process at the first one: ranks look for each
other in a call of Paddle's that keeps Python's lock, for minutes where one is missing, and no Python would run.

After that they are taken by a thread of their own, which Python wakes through a pipe at once (`signal.set_wakeup_fd`):
a handler in Python runs when the main thread next executes Python, and that thread may be in a collective for long.
Paddle's handlers, which print "FatalError: Termination signal" and end the process, are replaced from the beginning.

Paddle's launcher, told to end by either, sends each rank SIGTERM three times, 0.2 s apart, and means one request. The
ranks may have got the launcher's signal too, before or after: what comes within `BURST_SECONDS` of a signal counts with
it, but for a second SIGINT, of someone who presses Ctrl-C twice. 30 s later the launcher sends SIGKILL. One that is
killed itself sends nothing, and its ranks would go on without it: they ask the kernel for a SIGTERM then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BURST_SECONDS = 2.0
_LAUNCHED_RANK = "PADDLE_TRAINER_ID"  # Paddle's launcher sets it for each rank
_SET_PARENT_DEATH_SIGNAL, _GET_PARENT_DEATH_SIGNAL = 1, 2  # of prctl(2)


class Interrupts:
    """The requests of this process. Ranks hear of them at different times, or not: they must agree (`is_requested`
    of any)."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._last = (0, 0.0)  # number of the last signal, and when it came

    def is_requested(self) -> bool:
        """Whether the run is to save and end."""
        return self._requested.is_set()

    def training_begins(self) -> None:
        """From now on there is something to save; until now a signal ends the process at once. Main thread only."""
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)

    def agreed(self) -> None:
        """The ranks have agreed to end, whichever heard of it: from now on signals change nothing."""
        self._requested.set()

    def take(self, number: int) -> None:
        """What a signal means; on the thread that waits for signals."""
        name, now = signal.Signals(number).name, time.monotonic()
        (before, when), self._last = self._last, (number, now)
        if not self._requested.is_set():
            self._requested.set()
            _say(f"{name}: this step is finished and saved, then the run ends; a second signal ends it at once")
        elif now - when >= BURST_SECONDS or number == before == signal.SIGINT:
            _say(f"{name}, the second signal: ended without saving")
            os._exit(128 + number)  # from this thread nothing else ends the process


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Take the signals of this process until the block ends; main thread only. After a request the process is about to
    end when the block does, and further ones change nothing: a launcher sends some when it sees the first rank end."""
    requests = Interrupts()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def wait() -> None:
        while received := os.read(reading, 64):
            for number in received:
                if number in SIGNALS:
                    requests.take(number)

    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    woken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    try:
        yield requests
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            # Python puts the default back in place of its own handlers before it ends, and leaves SIG_IGN
            signal.signal(number, signal.SIG_IGN if requests.is_requested() else handler)
        os.close(writing)
        thread.join()
        os.close(reading)


def end_with_launcher() -> None:
    """A rank gets SIGTERM when its launcher dies; what the one who started it has arranged before is left.

    Call before anything that takes long: of a launcher that has died by then nothing is heard, and the rank goes on.
    """
    if _LAUNCHED_RANK not in os.environ:
        return
    prctl, arranged = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_GET_PARENT_DEATH_SIGNAL, ctypes.byref(arranged))
    if not arranged.value:
        prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
