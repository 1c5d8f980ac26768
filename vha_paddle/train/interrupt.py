"""SIGTERM and SIGINT: a run saves after the step under way and ends; a second signal ends it at once.

A handler in Python runs when the main thread next executes Python, and that thread may be in a collective for long. So
signals are taken by a thread of their own, which Python wakes through a pipe at once (`signal.set_wakeup_fd`). The
handlers also take the place of Paddle's, which print "FatalError: Termination signal" and end the process.

Paddle's launcher sends each rank SIGTERM three times, 0.2 s apart, and means one request: what follows a SIGTERM within
`BURST_SECONDS` counts with it. 30 s later it sends SIGKILL. A launcher that is killed itself sends nothing, and its
ranks would go on without it: they ask the kernel for a SIGTERM then.
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

from vha_paddle.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BURST_SECONDS = 2.0
_LAUNCHED_RANK = "PADDLE_TRAINER_ID"  # Paddle's launcher sets it for each rank
_SET_PARENT_DEATH_SIGNAL, _GET_PARENT_DEATH_SIGNAL = 1, 2  # of prctl(2)


class Interrupts:
    """The requests of this process. Ranks hear of them at different times, or not: they must agree (`is_requested`
    of any)."""

    def __init__(self) -> None:
        self._requested, self._is_training = threading.Event(), False
        self._last = (0, 0.0)  # number of the last signal, and when it came

    def is_requested(self) -> bool:
        """Whether the run is to save and end."""
        return self._requested.is_set()

    def training_begins(self) -> None:
        """From now on there is something to save; until now a signal ends the process at once."""
        self._is_training = True

    def agreed(self) -> None:
        """The ranks have agreed to end, whichever heard of it: from now on signals change nothing."""
        self._requested.set()

    def take(self, number: int) -> None:
        """What a signal means; on the thread that waits for signals."""
        name, now = signal.Signals(number).name, time.monotonic()
        (before, when), self._last = self._last, (number, now)
        if not self._is_training:
            _end(f"{name} before training began: nothing to save", Interrupted.exit_code)
        if not self._requested.is_set():
            self._requested.set()
            _say(f"{name}: this step is finished and saved, then the run ends; a second signal ends it at once")
        elif not (number == before == signal.SIGTERM and now - when < BURST_SECONDS):
            _end(f"{name}, the second signal: ended without saving", 128 + number)


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

    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
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
    """A rank gets SIGTERM when its launcher dies; what the one who started it has arranged before is left."""
    if _LAUNCHED_RANK not in os.environ:
        return
    prctl, arranged = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_GET_PARENT_DEATH_SIGNAL, ctypes.byref(arranged))
    if not arranged.value:
        prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end(text: str, code: int) -> None:
    _say(text)
    os._exit(code)  # from this thread nothing else ends the process
