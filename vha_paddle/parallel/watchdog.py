"""Notices a rank that has died or hangs, and ends the job with its name, step and phase.

A collective waits for all its ranks: when one dies the others wait for a message that never comes, and whoever looks
at the job sees processes that compute nothing. Here every rank tells the main one every two seconds where it is, over
a connection that nothing else uses, from a thread that goes on while the main thread waits, and at once when it begins
another phase. The main rank decides:

    its connection closes without a farewell          it has died
    it says that it fails, and why                    it has failed: others may not know yet
    nothing is heard of it for `SILENT_SECONDS`       it is stopped, or its host is gone
    it stays in a phase for longer than allowed, and  it hangs: the others wait for it
    does not wait for another rank

and tells all. A rank that hears of it gives its main thread a moment to end by itself, says what happened (and what to
do, unless the rank has failed with an error of its own) in its own log, for the others' may be gone with their host,
and ends with exit code 1. Where the main rank is the one that died, the others hear it from their connection. A rank
that is alone watches itself.

How long a phase may take follows from how long it took before: `hang_seconds`, or five times the longest so far,
whichever is more. A phase that has not ended before, such as the first step, which fills caches, may take
`FIRST_SECONDS` if that is more than `hang_seconds`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import TracebackType

from vha_paddle.errors import RunError, UserError

BEAT_SECONDS = 2.0
TOLD_SECONDS = 0.1
LOOK_SECONDS = 0.5
SILENT_SECONDS = 20.0
STOPPED_SECONDS = 10.0  # the clock is looked at more often, unless the process is stopped
FIRST_SECONDS = 600.0
TIMES_LONGEST = 5.0
OWN_END_SECONDS = 3.0  # for a main thread that fails for the same reason to say so itself
CONNECT_SECONDS = 60.0
HELLO_SECONDS = 2.0
LAST_WORDS_SECONDS = 2.0
MAX_LINE = 4096
FAREWELL = b"bye\n"


class Clock:
    """Seconds that pass while the process runs. A whole job may be stopped for a while, with its container, by a
    scheduler or with Ctrl-Z, and goes on later: then nobody was late. Of one rank that is stopped the others know."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen, self._stopped = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Asked for by some thread at least every `BEAT_SECONDS`."""
        with self._lock:
            now = time.monotonic()
            if now - self._seen > STOPPED_SECONDS:
                self._stopped += now - self._seen
            self._seen = now
            return now - self._stopped


@dataclass
class Beat:
    """Where a rank is."""

    step: int = 0
    """Optimizer step it works on, counted from 1; 0 before the first."""
    phase: str = "start"
    seconds: float = 0.0
    """How long it has been in the phase."""
    allowed: float = FIRST_SECONDS
    """How long it may be."""
    waiting: bool = False
    """Whether it waits for a message of another rank."""

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase


@dataclass
class _Peer:
    """What the main rank knows of another one."""

    rank: int
    heard: float
    """By the main rank's clock."""
    beat: Beat = field(default_factory=Beat)
    unread: bytes = b""


class Watchdog:
    """One rank's end. `enter` is told by the main thread what it begins."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        share: Callable[[str | None], str | None],
        hang_seconds: float,
        advice: Callable[[], str],
        is_waiting: Callable[[], bool] = lambda: False,
        host: str = "127.0.0.1",
    ) -> None:
        """Connect; every rank calls it, at the same time.

        Args:
            share: gives every rank what the main one hands in.
            hang_seconds: the least that a phase may take, once it has ended before.
            advice: what to do when a rank is lost; asked from another thread, and left out if no answer comes.
            is_waiting: whether this rank waits for another one's message; asked from another thread.
            host: by which other ranks reach the main one.
        """
        self.rank, self.num_ranks, self.hang_seconds = rank, num_ranks, hang_seconds
        self.verdict: str | None = None
        self.failure: str | None = None
        self._advice, self._is_waiting = advice, is_waiting
        self.clock = Clock()
        self._place = (0, "start", self.clock.seconds())
        self._longest: dict[str, float] = {}
        self._decided, self._stopped = threading.Event(), threading.Event()
        listener = socket.create_server((host, 0), backlog=num_ranks) if rank == 0 else None
        token = secrets.token_hex(16)  # so that no stranger's connection passes for a rank's
        address = share(None if listener is None else f"{host}:{listener.getsockname()[1]}:{token}")
        if listener is not None:
            part: _Main | _Other = _Main(self, listener, token)
        else:
            assert address is not None, "the main rank's"
            place, port, token = address.rsplit(":", 2)
            connection = socket.create_connection((place, int(port)), timeout=CONNECT_SECONDS)
            connection.sendall(f"{token} {rank}\n".encode())
            part = _Other(self, connection)
        self._wake, self._tell = part.wake, part.tell_soon
        self._thread = threading.Thread(target=part.watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        """The main thread begins a phase of a step; the one before it has ended."""
        _, before, since = self._place
        now = self.clock.seconds()
        self._longest[before] = max(self._longest.get(before, 0.0), now - since)
        self._place = (step, phase, now)
        self._tell()

    def beat(self) -> Beat:
        """Where this rank is now."""
        step, phase, since = self._place
        longest = self._longest.get(phase)
        allowed = max(self.hang_seconds, FIRST_SECONDS if longest is None else TIMES_LONGEST * longest)
        return Beat(step, phase, self.clock.seconds() - since, allowed, self._is_waiting())

    def stop(self, failure: str | None = None) -> None:
        """The rank ends; without a `failure` it is done, and its end concerns nobody."""
        self.failure = failure
        self._stopped.set()
        self._wake()
        self._thread.join(BEAT_SECONDS + 1)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`stop`. What another rank's end has caused here is raised as what happened there."""
        if error is None or isinstance(error, UserError | RunError):  # those speak for themselves
            self.stop(None if error is None else str(error))
            return
        # a broken connection is often seen before it is known whose
        known = self.num_ranks > 1 and self._decided.wait(2 * BEAT_SECONDS)
        self.stop(f"{kind.__name__ if kind else ''}: {error}")
        if known:
            raise RunError(str(self.verdict)) from error

    def with_advice(self, verdict: str) -> str:
        """A verdict with what to do. The advice may need the disk, which may be what does not answer."""
        answers: list[str] = []
        _within(LAST_WORDS_SECONDS, lambda: answers.append(self._advice()))
        return "; ".join([verdict, *answers])

    def decide(self, verdict: str, culprit: int | None) -> None:
        """What has happened; from the watching thread. The process ends unless its main thread does so before."""
        self.verdict = verdict
        self._decided.set()

        def say() -> None:
            if culprit == self.rank:
                faulthandler.dump_traceback(all_threads=True)
            print(f"error: {RunError(verdict)}", file=sys.stderr, flush=True)

        if not self._stopped.wait(OWN_END_SECONDS):
            _within(LAST_WORDS_SECONDS, say)
            os._exit(RunError.exit_code)


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Do what may never return, as where a disk or a terminal does not answer, or fail, as on a full disk."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


class _Main:
    """The main rank's part: it hears all and decides."""

    def __init__(self, dog: Watchdog, listener: socket.socket, token: str) -> None:
        self._dog, self._listener, self._token = dog, listener, token
        now = dog.clock.seconds()
        self._awaited = {rank: _Peer(rank, now) for rank in range(1, dog.num_ranks)}
        """Ranks that have not connected yet."""
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._close_if_all_are_here()

    def wake(self) -> None:
        """It looks twice a second by itself."""

    def tell_soon(self) -> None:
        """Nobody judges the main rank but itself, which knows."""

    def watch(self) -> None:
        told, judged, place = 0.0, 0.0, ""
        while self._awaited or not self._dog._stopped.is_set():
            for key, _ in self._selector.select(timeout=LOOK_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._hear(key.fileobj)
            now, beat = self._dog.clock.seconds(), self._dog.beat()
            if now - told > (BEAT_SECONDS if beat.place == place else LOOK_SECONDS):
                told, place = now, beat.place
                self._tell(json.dumps(asdict(beat)))
            if now - judged > BEAT_SECONDS:
                judged = now
                self._judge()
        failure = self._dog.failure
        self._tell("bye" if failure is None else _verdict(f"rank 0 failed ({self._dog.beat().place}): {failure}", 0))

    def _accept(self) -> None:
        """A connection of one of the ranks, or of a stranger: a port scanner, a rank of another job."""
        connection, _ = self._listener.accept()
        token, _, rank = _first_line(connection).partition(b" ")
        if not secrets.compare_digest(token, self._token.encode()):
            connection.close()
            return
        connection.settimeout(CONNECT_SECONDS)
        self._peers[connection] = peer = self._awaited.pop(int(rank))
        peer.heard = self._dog.clock.seconds()
        self._selector.register(connection, selectors.EVENT_READ)
        self._close_if_all_are_here()

    def _close_if_all_are_here(self) -> None:
        if not self._awaited:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _hear(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        try:
            data = connection.recv(MAX_LINE)
        except OSError:
            data = b""
        peer.heard = self._dog.clock.seconds()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            if line + b"\n" == FAREWELL:
                self._leave(connection)
                return
            message = json.loads(line)
            if "failed" in message:
                self._leave(connection)
                self._decide(f"rank {peer.rank} failed ({peer.beat.place}): {message['failed']}", peer.rank)
                return
            peer.beat = Beat(**message)
        if not data:
            self._leave(connection)
            self._lost(f"rank {peer.rank} died (last heard of in {peer.beat.place})", peer.rank)

    def _leave(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._peers[connection]

    def _judge(self) -> None:
        now = self._dog.clock.seconds()
        peers = [*self._awaited.values(), *self._peers.values()]
        for peer in peers:
            if now - peer.heard > SILENT_SECONDS:
                self._lost(
                    f"rank {peer.rank} has not answered for {now - peer.heard:.0f} s ({peer.beat.place}): stopped, or "
                    "its host is gone",
                    peer.rank,
                )
                return
        if any(now - peer.heard > 3 * BEAT_SECONDS for peer in peers):
            return  # what it does is not known: soon it answers, or it is the one
        beats = {0: self._dog.beat()} | {peer.rank: peer.beat for peer in peers}
        late = {rank: beat for rank, beat in beats.items() if beat.seconds > beat.allowed}
        if not late:
            return
        culprits = {rank: beat for rank, beat in late.items() if not beat.waiting}
        if culprits:
            rank = max(culprits, key=lambda rank: culprits[rank].seconds)
            self._lost(_hangs(rank, beats[rank]), rank)
        elif all(beat.waiting for beat in beats.values()):
            places = "; ".join(f"rank {rank}: {beat.place}" for rank, beat in sorted(beats.items()))
            self._lost(f"every rank waits for another ({places})", None)

    def _lost(self, verdict: str, culprit: int | None) -> None:
        """No error of the run's: the same command may be started again."""
        self._decide(self._dog.with_advice(verdict), culprit)

    def _decide(self, verdict: str, culprit: int | None) -> None:
        self._tell(_verdict(verdict, culprit))
        self._dog.decide(verdict, culprit)

    def _tell(self, line: str) -> None:
        for connection in self._peers:
            try:
                connection.sendall(line.encode() + b"\n")
            except OSError:
                continue  # it is heard of, or not, in its turn


def _hangs(rank: int, beat: Beat) -> str:
    return f"rank {rank} hangs ({beat.place}, for {beat.seconds:.0f} s)"


def _verdict(text: str, culprit: int | None) -> str:
    return json.dumps({"verdict": text, "culprit": culprit})


def _first_line(connection: socket.socket) -> bytes:
    """Without its end; what has come of it within `HELLO_SECONDS`, if the other side does not go on."""
    line, end = b"", time.monotonic() + HELLO_SECONDS
    with contextlib.suppress(OSError):
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            byte = connection.recv(1)
            if byte in (b"", b"\n"):
                break
            line += byte
    return line


class _Other:
    """Any other rank's part: it tells where it is, and hears the verdict."""

    def __init__(self, dog: Watchdog, connection: socket.socket) -> None:
        self._dog, self._connection = dog, connection
        self._main = Beat()
        self._sending, self._told = threading.Lock(), 0.0
        self._heard = dog.clock.seconds()

    def wake(self) -> None:
        """End the wait for the main rank's next word."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def tell_soon(self) -> None:
        """Tell where this rank is, from its main thread, unless it was told a moment ago."""
        if self._dog.clock.seconds() - self._told > TOLD_SECONDS:
            with contextlib.suppress(OSError):  # the other thread will see it
                self._tell()

    def _tell(self) -> None:
        with self._sending:
            self._told = self._dog.clock.seconds()
            self._connection.sendall(json.dumps(asdict(self._dog.beat())).encode() + b"\n")

    def watch(self) -> None:
        self._connection.settimeout(BEAT_SECONDS)
        unread = b""
        while not self._dog._stopped.is_set():
            try:
                self._tell()
                data = self._connection.recv(MAX_LINE)
                closed = not data
            except TimeoutError:
                data, closed = b"", False
            except OSError:
                data, closed = b"", True
            if data:
                self._heard = self._dog.clock.seconds()
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                if line + b"\n" == FAREWELL:
                    self._watch_itself()
                    return
                self._take_in(json.loads(line))
            if closed and not self._dog._stopped.is_set():
                self._lost(f"rank 0 died (last heard of in {self._main.place})")
            elif (silent := self._dog.clock.seconds() - self._heard) > SILENT_SECONDS:
                self._lost(
                    f"rank 0 has not answered for {silent:.0f} s ({self._main.place}): stopped, or its host is gone"
                )
        failure = self._dog.failure
        try:
            self._connection.sendall(FAREWELL if failure is None else json.dumps({"failed": failure}).encode() + b"\n")
        except OSError:
            return  # the main rank has ended before

    def _watch_itself(self) -> None:
        """The main rank is done, and nobody else would notice."""
        while not self._dog._stopped.wait(BEAT_SECONDS):
            beat = self._dog.beat()
            if beat.seconds > beat.allowed:
                self._dog.decide(self._dog.with_advice(_hangs(self._dog.rank, beat)), self._dog.rank)

    def _lost(self, verdict: str) -> None:
        self._dog.decide(self._dog.with_advice(verdict), 0)

    def _take_in(self, message: dict[str, object]) -> None:
        if "verdict" in message:
            culprit = message["culprit"]
            self._dog.decide(str(message["verdict"]), culprit if isinstance(culprit, int) else None)
        else:
            self._main = Beat(**message)  # type: ignore[arg-type]
