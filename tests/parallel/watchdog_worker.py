"""One rank under a watchdog. Arguments: rank, number of ranks, a directory to meet in, what happens to which rank."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from vha_paddle.errors import RunError
from vha_paddle.parallel import watchdog

RANK, NUM_RANKS, DIRECTORY, WHAT, VICTIM = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:6]
WHOLE = 60.0  # seconds a rank would go on for

watchdog.BEAT_SECONDS = 6.0 if "slow_beat" in sys.argv else 0.2
watchdog.SILENT_SECONDS, watchdog.STOPPED_SECONDS, watchdog.OWN_END_SECONDS = 8.0, 5.0, 2.0
is_victim = VICTIM == "all" or str(RANK) in VICTIM.split("+")
waiting = False
kept: list[object] = []


def share(address: str | None) -> str | None:
    """The main rank's address, by way of a file."""
    path = DIRECTORY / "address"
    if address is not None:
        path.with_suffix(".tmp").write_text(address)
        path.with_suffix(".tmp").rename(path)
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if "strangers" in sys.argv and address is None:
        come_as_strangers(path.read_text())
    return path.read_text()


def come_as_strangers(address: str) -> None:
    """One says nothing and stays, one says what is no text, one cuts its connection off."""
    host, port, _ = address.split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
    strangers[1].sendall(b"\xff\xfe 1\n")
    strangers[2].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    strangers[2].close()
    kept.extend(strangers[:2])


def log_that_takes_no_line() -> None:
    """Standard error from now on: a file on a full disk, or a terminal that is held."""
    if "full_disk" in sys.argv:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    if "blocked" in sys.argv:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        try:
            while True:
                os.write(writing, bytes(4096))
        except BlockingIOError:
            os.set_blocking(writing, True)
        os.dup2(writing, 2)
        kept.append(reading)


def advice() -> str:
    if "dead_disk" in sys.argv:
        time.sleep(WHOLE)
    return "start again"


log_that_takes_no_line()
dog = watchdog.Watchdog(RANK, NUM_RANKS, share, 4.0, advice, is_waiting=lambda: waiting)
for step in range(1, 4):  # so that the phases have ended once
    for phase in ("data", "backward"):
        dog.enter(step, phase)
        time.sleep(0.05)
if WHAT == "nothing":
    dog.stop()
    sys.exit(0)
dog.enter(4, "backward")
time.sleep(1.0)  # so that everyone has told where it is
if is_victim:
    if WHAT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if WHAT == "wait":
        waiting = True
    if WHAT == "pause":
        (DIRECTORY / f"ready{RANK}").touch()
        time.sleep(0.5)  # and the pause
        dog.stop()
        sys.exit(0)
    if WHAT == "long":  # a phase that has not ended before may take longer
        dog.enter(4, "checkpoint")
        time.sleep(6.0)
else:
    dog.enter(4, "data")  # another place than the victim's
    waiting = True
    if WHAT == "last":  # the others are done
        dog.stop()
        sys.exit(0)
if WHAT == "long":
    if not is_victim:
        dog.enter(4, "checkpoint")
        time.sleep(6.0)
    dog.stop()
    sys.exit(0)
if "explain" in sys.argv:  # what a trainer does: the victim's error, or what a survivor makes of it
    try:
        with dog:
            if is_victim:
                raise RunError("the disk is full")
            time.sleep(0.2)
            raise ConnectionError("the peer closed the connection")
    except RunError as error:
        print(f"explained: {error}", flush=True)
        sys.exit(1)
time.sleep(WHOLE)
