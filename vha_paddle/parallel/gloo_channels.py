"""Buffered messages between the ranks of a job, over TCP: `gloo.py` builds point-to-point and all-to-all on them.

Gloo has no buffered send. Its `send` returns once the peer has received, so two ranks that both send first wait
for ever. And it numbers the operations of a group with one counter that only the two ends of a message advance,
so after a message between two members of a larger group its next common operation never matches.

Here every (group, source, destination) has a connection of its own, opened at its first message. A message is
its length (8 bytes, little endian) and its bytes. Sending hands them to a thread and returns; messages of one
channel arrive in the order sent. This module knows nothing of Paddle: it moves numpy arrays of bytes.
"""

from __future__ import annotations

import atexit
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

TOKEN_BYTES = 16
HELLO = struct.Struct(f"<{TOKEN_BYTES}sqq")  # the receiver's token, the group, the source's rank in it
LENGTH = struct.Struct("<q")
HELLO_TIMEOUT = 10.0  # seconds for a new connection to say who it is
PEER_TIMEOUT = 1800.0  # seconds without a byte from a peer that should send: what NCCL groups allow too
FLUSH_TIMEOUT = 30.0  # seconds for the unsent messages when the process ends


class ChannelError(ConnectionError):
    """A message could not be delivered, or did not have the length its receiver expects."""


class _Sender(threading.Thread):
    """Writes the messages of one channel in order. An error is kept, for the main thread to raise."""

    def __init__(self, address: str, group: int, source: int, destination: int) -> None:
        super().__init__(name=f"group {group}, message from rank {source} to rank {destination}", daemon=True)
        self.messages: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        host, port, token = address.rsplit(":", 2)
        self._peer = (host, int(port))
        self._hello = HELLO.pack(bytes.fromhex(token), group, source)
        self.start()

    def run(self) -> None:
        try:
            with socket.create_connection(self._peer, timeout=PEER_TIMEOUT) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(self._hello)
                while (message := self.messages.get()) is not None:
                    connection.sendall(LENGTH.pack(message.nbytes))
                    connection.sendall(message)
        except Exception as error:
            self.error = error


class Channels:
    """A process's end of all its channels: a listening socket for what comes, a thread per channel that leaves."""

    def __init__(self, host: str) -> None:
        """Listen on `host`, by which the other ranks reach this process; `address` is what they need to send."""
        self._token = secrets.token_bytes(TOKEN_BYTES)  # so that no stranger's connection passes for a rank's
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}:{self._token.hex()}"
        self._senders: dict[tuple[int, int], _Sender] = {}  # by group and destination
        self._incoming: dict[tuple[int, int], socket.socket] = {}  # by group and source
        self._arrival = threading.Condition()
        threading.Thread(target=self._accept, name="channels", daemon=True).start()
        atexit.register(self._flush)

    def send(
        self, group: int, source: int, destination: int, message: np.ndarray, address: Callable[[], str]
    ) -> None:
        """Queue bytes for rank `destination` of a group in which this process is rank `source`.

        `message` is a flat uint8 array that must not change any more; `address` gives the peer's, and is called
        at the first message only.

        Raises:
            ChannelError: an earlier message of this process could not be delivered.
        """
        self._raise_failure()
        key = (group, destination)
        if key not in self._senders:
            self._senders[key] = _Sender(address(), group, source, destination)
        self._senders[key].messages.put(message)

    def receive(self, group: int, source: int, out: np.ndarray) -> None:
        """Wait for the next message from rank `source` and write it into `out`, a flat uint8 array of its size.

        Raises:
            ChannelError: the peer is gone or silent, its message has another length, or an earlier send failed.
        """
        self._raise_failure()
        try:
            connection = self._connection(group, source)
            header = bytearray(LENGTH.size)
            _read(connection, memoryview(header))
            (length,) = LENGTH.unpack(header)
            if length != out.nbytes:
                raise ConnectionError(f"{length} bytes were sent, {out.nbytes} are expected")
            _read(connection, memoryview(out))
        except OSError as error:
            self._raise_failure()  # a peer that is gone is often seen first by a sender
            raise ChannelError(f"group {group}, message from rank {source}: {error}") from error

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            hello = bytearray(HELLO.size)
            try:
                connection.settimeout(HELLO_TIMEOUT)
                _read(connection, memoryview(hello))
                token, group, source = HELLO.unpack(hello)
                if not secrets.compare_digest(token, self._token):
                    raise ConnectionError("not a rank of this job")
                connection.settimeout(PEER_TIMEOUT)
            except OSError:
                connection.close()
                continue
            with self._arrival:
                self._incoming[group, source] = connection
                self._arrival.notify_all()

    def _connection(self, group: int, source: int) -> socket.socket:
        deadline = time.monotonic() + PEER_TIMEOUT
        with self._arrival:
            while (group, source) not in self._incoming:
                self._raise_failure()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no connection within {PEER_TIMEOUT:.0f} s")
                self._arrival.wait(1.0)
            return self._incoming[group, source]

    def _raise_failure(self) -> None:
        for sender in self._senders.values():
            if sender.error is not None:
                raise ChannelError(f"{sender.name}: {sender.error}")

    def _flush(self) -> None:
        """At exit: messages sent are messages delivered, unless a peer stops reading."""
        deadline = time.monotonic() + FLUSH_TIMEOUT
        for sender in self._senders.values():
            sender.messages.put(None)
        for sender in self._senders.values():
            sender.join(max(0.0, deadline - time.monotonic()))
            if sender.is_alive() or sender.error is not None:
                print(f"{sender.name}: not delivered: {sender.error or 'the peer stopped reading'}", file=sys.stderr)


def _read(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        buffer = buffer[count:]
