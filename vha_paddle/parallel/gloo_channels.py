"""Buffered messages between the ranks of a Gloo group, over TCP, and the operations made of messages.

Gloo has no buffered send. Its `send` returns once the peer has received, so two ranks that both send first
wait for ever. And it numbers the operations of a group with one counter that only the two ends of a message
advance, so after a message between two members of a larger group its next common operation never matches: a
pipeline of three stages hangs.

Here every (group, source, destination) has a connection of its own, opened at its first message. A message
is its length (8 bytes, little endian) and its bytes. Sending copies them, hands the copy to a thread and
returns; messages of one channel arrive in the order sent.
"""

from __future__ import annotations

import atexit
import functools
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from paddle import Tensor

TOKEN_BYTES = 16
HELLO = struct.Struct(f"<{TOKEN_BYTES}sqq")  # the receiver's token, the group, the source's rank in it
LENGTH = struct.Struct("<q")
HELLO_TIMEOUT = 10.0  # seconds for a new connection to say who it is
PEER_TIMEOUT = 1800.0  # seconds without a byte from a peer that should send: what NCCL groups allow too
DIRECT_BYTES = 1 << 18  # up to here an all-reduce sends whole arrays: fewer messages beat fewer bytes
FLUSH_TIMEOUT = 30.0  # seconds for the unsent messages when the process ends


class ChannelError(ConnectionError):
    """A message could not be delivered, or did not have the length its receiver expects."""


class _Sender(threading.Thread):
    """Writes the messages of one channel in order. An error is kept, for the main thread to raise."""

    def __init__(self, address: str, group: int, source: int, destination: int) -> None:
        name = f"group {group}, message from rank {source} to rank {destination}"
        super().__init__(name=name, daemon=True)
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
                    connection.sendall(message.data)
        except Exception as error:  # whatever it is, the main thread must hear of it
            self.error = error


class Channels:
    """A process's end of all its channels: a listening socket, and a thread for each channel that leaves."""

    def __init__(self, host: str) -> None:
        """Listen on `host`, by which other ranks reach this process; `address` is what they need to send."""
        self._token = secrets.token_bytes(TOKEN_BYTES)  # so that no stranger's connection passes for a rank's
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}:{self._token.hex()}"
        self.batch: list[Callable[[], None]] | None = None
        """Receives put off to the end of the batch that is open, if one is."""
        self.waiting = False
        """Whether this process waits for a message; another thread may ask."""
        self._senders: dict[tuple[int, int], _Sender] = {}  # by group and destination
        self._incoming: dict[tuple[int, int], socket.socket] = {}  # by group and source
        self._arrival = threading.Condition()
        threading.Thread(target=self._accept, name="channels", daemon=True).start()
        atexit.register(self._flush)

    def send(self, group: int, source: int, destination: int, message: np.ndarray, address: Callable[[], str]) -> None:
        """Queue flat uint8 bytes for rank `destination` of a group in which this process is rank `source`.

        `message` must not change any more. `address` gives the peer's; only the first message calls it.

        Raises:
            ChannelError: an earlier message of this process could not be delivered.
        """
        self._raise_failure()
        key = (group, destination)
        if key not in self._senders:
            self._senders[key] = _Sender(address(), group, source, destination)
        self._senders[key].messages.put(message)

    def receive(self, group: int, source: int, out: np.ndarray) -> None:
        """Wait for the next message from rank `source` and write it into `out`, flat uint8 of its size.

        Raises:
            ChannelError: the peer is gone or silent, the length differs, or an earlier send failed.
        """
        self._raise_failure()
        self.waiting = True
        try:
            connection = self._connection(group, source)
            header = bytearray(LENGTH.size)
            _read(connection, memoryview(header))
            (length,) = LENGTH.unpack(header)
            if length != out.nbytes:
                raise ConnectionError(f"{length} bytes were sent, {out.nbytes} are expected")
            _read(connection, out.data)
        except OSError as error:
            self._raise_failure()  # a peer that is gone is often seen first by a sender
            raise ChannelError(f"group {group}, message from rank {source}: {error}") from error
        finally:
            self.waiting = False

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
                reason = sender.error or "the peer does not read"
                print(f"{sender.name}: not delivered: {reason}", file=sys.stderr)


def _read(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        buffer = buffer[count:]


class Member:
    """This process as a member of one group: the group's messages, by ranks in the group."""

    def __init__(self, channels: Channels, store: Any, group_id: int, rank: int, size: int) -> None:
        """Tell the others in `store`, which all members share, where to reach this one."""
        self.group_id, self.rank, self.size = group_id, rank, size
        self.channels, self._store = channels, store
        store.set(self._key(rank), channels.address)

    def _key(self, rank: int) -> str:
        return f"gloo/{self.group_id}/channels/{rank}"

    def send(self, peer: int, array: np.ndarray) -> None:
        """Copy the bytes, and return."""
        message = array.view(np.uint8).copy()

        def address() -> str:
            return self._store.get(self._key(peer)).decode()

        self.channels.send(self.group_id, self.rank, peer, message, address)

    def receive(self, peer: int, array: np.ndarray) -> None:
        """Wait for the bytes."""
        self.channels.receive(self.group_id, peer, array.view(np.uint8))

    def receive_in_batch(self, peer: int, array: np.ndarray) -> None:
        """Wait for the bytes, at the end of the batch where one is open."""
        if self.channels.batch is None:
            self.receive(peer, array)
        else:
            self.channels.batch.append(lambda: self.receive(peer, array))

    def exchange(self, outs: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> None:
        """Array i goes to rank i; what rank i sends here lands in out i."""
        self.send_to_others(arrays)
        np.copyto(outs[self.rank], arrays[self.rank])
        for step in range(1, self.size):
            peer = (self.rank - step) % self.size
            self.receive(peer, outs[peer])

    def all_reduce(self, array: np.ndarray, reduce: Callable[..., Any]) -> None:
        """Combine every rank's flat `array` with a numpy operation, in place.

        Ranks are combined in their order, so all get the same bits. Small arrays go to every rank, of large ones
        each rank combines a part and passes it on.
        """
        direct = array.nbytes <= DIRECT_BYTES
        parts = [array] * self.size if direct else np.array_split(array, self.size)
        self.send_to_others(parts)
        self._combine(parts[self.rank], reduce)
        if not direct:
            self.exchange(parts, [parts[self.rank]] * self.size)

    def reduce(self, array: np.ndarray, root: int, reduce: Callable[..., Any]) -> None:
        """As `all_reduce`, the result on rank `root` only; the others keep what they have."""
        if self.rank == root:
            self._combine(array, reduce)
        else:
            self.send(root, array)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """The flat `array` of rank `root` to all, in place."""
        if self.rank == root:
            self.send_to_others([array] * self.size)
        else:
            self.receive(root, array)

    def send_to_others(self, arrays: Sequence[np.ndarray]) -> None:
        """Array i to rank i, apart from this rank's own."""
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            self.send(peer, arrays[peer])

    def _combine(self, array: np.ndarray, reduce: Callable[..., Any]) -> None:
        """What every rank sent, and `array`, into `array`."""
        own, received = array.copy(), np.empty_like(array)
        for rank in range(self.size):
            if rank != self.rank:
                self.receive(rank, received)
            part = own if rank == self.rank else received
            if rank == 0:
                np.copyto(array, part)
            else:
                reduce(array, part, out=array)

    def start_batch(self) -> None:
        """Put receives off until `end_batch`, on every group; sends still leave at once."""
        self.channels.batch = []

    def end_batch(self) -> None:
        """Do the receives of the batch."""
        receives, self.channels.batch = self.channels.batch or [], None
        for receive in receives:
            receive()


# ------------------------------------------------------------------------------------------ memory of tensors


class _Memory:
    """The bytes of a contiguous tensor for `np.asarray`; the array keeps the tensor alive."""

    def __init__(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {list(tensor.shape)} must be contiguous for ranks to write to it")
        self.tensor = tensor
        size = tensor.size * tensor.element_size()
        address = tensor.data_ptr() if size else np.empty(0).ctypes.data
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def memory(tensor: Tensor) -> np.ndarray:
    """A tensor's own memory as flat uint8, where `numpy()` makes a copy: writing to it sets the tensor."""
    return np.asarray(_Memory(tensor))


def array(tensor: Tensor) -> np.ndarray:
    """A tensor's own memory in its shape and dtype, one that numpy has."""
    return memory(tensor).view(str(tensor.dtype).removeprefix("paddle.")).reshape(tensor.shape)


# ------------------------------------------ what takes the place of ProcessGroupGloo's methods of these names

DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True, synchronize=lambda: None)
"""The task of an operation that was finished when its call returned."""

members: dict[Any, Member] = {}
"""By process group."""


_spent = SimpleNamespace(seconds=0.0)


def timed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, whose time counts in `seconds_in_messages`."""

    @functools.wraps(operation)
    def run(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return operation(*arguments, **options)
        finally:
            _spent.seconds += time.perf_counter() - start

    return run


def seconds_in_messages() -> float | None:
    """How long this process has been in operations of its groups, waiting for other ranks included; None where there
    are no other ranks, or where the operations are NCCL's and run beside the host."""
    return _spent.seconds if members else None


def is_waiting() -> bool:
    """Whether this process waits for another rank's message; another thread may ask."""
    return any(member.channels.waiting for member in list(members.values()))


def send(group: Any, tensor: Tensor, peer: int, sync_op: bool = True) -> Any:
    """Buffered: returns before the peer receives."""
    members[group].send(peer, memory(tensor.contiguous()))
    return DONE


def receive(group: Any, tensor: Tensor, peer: int, sync_op: bool = True) -> Any:
    """Into `tensor`; in a batch, at its end."""
    members[group].receive_in_batch(peer, memory(tensor))
    return DONE


def send_partial(group: Any, tensor: Tensor, peer: int, count: int, index: int, sync_op: bool = True) -> Any:
    """Part `index` of `count`: of what all tensor-parallel ranks hold, each passes on a part. Not in Gloo."""
    members[group].send(peer, np.split(memory(tensor.contiguous()), count)[index])
    return DONE


def receive_partial(group: Any, tensor: Tensor, peer: int, count: int, index: int, sync_op: bool = True) -> Any:
    """Part `index` of `count`; the rest of `tensor` is left as it is. Not in Gloo."""
    members[group].receive_in_batch(peer, np.split(memory(tensor), count)[index])
    return DONE


def start_coalescing(group: Any) -> None:
    """Gloo ignores it: ranks whose batches list a receive first, as in interleaved pipelines, all wait."""
    members[group].start_batch()


def end_coalescing(group: Any, tasks: Any = None) -> None:
    """The receives of the batch happen here."""
    members[group].end_batch()


def all_to_all(group: Any, outs: Sequence[Tensor], tensors: Sequence[Tensor], sync_op: bool = True) -> Any:
    """Tensor i goes to rank i. Sizes may differ and be 0. Not in Gloo."""
    members[group].exchange([memory(out) for out in outs], [memory(tensor.contiguous()) for tensor in tensors])
    return DONE


def all_to_all_tensor(group: Any, out: Tensor, tensor: Tensor, sync_op: bool = True) -> Any:
    """Rows of one tensor to rows of another, in equal parts. Not in Gloo."""
    return all_to_all_single(group, out, tensor)


def all_to_all_single(
    group: Any,
    out: Tensor,
    tensor: Tensor,
    out_sizes: Sequence[int] = (),
    sizes: Sequence[int] = (),
    sync_op: bool = True,
) -> Any:
    """Rows of one tensor to rows of another, so many for each rank. Not in Gloo."""
    member = members[group]
    member.exchange(_rows(out, out_sizes, member.size), _rows(tensor.contiguous(), sizes, member.size))
    return DONE


def _rows(tensor: Tensor, sizes: Sequence[int], count: int) -> list[np.ndarray]:
    """The bytes of the first sizes[0] rows, of the next sizes[1], and so on; equal parts without sizes."""
    num_rows = tensor.shape[0]
    sizes = list(sizes) or [num_rows // count] * count
    if len(sizes) != count or sum(sizes) != num_rows:
        raise ValueError(f"{num_rows} rows cannot be split into {sizes} over {count} ranks")
    all_bytes = memory(tensor)
    return np.split(all_bytes, np.cumsum(sizes[:-1]) * (all_bytes.size // max(num_rows, 1)))


def broadcast(group: Any, tensor: Tensor, root: int, sync_op: bool = True) -> Any:
    """Gloo's takes a dtype for bytes only where it knows it, and a few times as long for small tensors."""
    members[group].broadcast(memory(tensor), root)
    return DONE


def all_gather_into_tensor(group: Any, out: Tensor, tensor: Tensor, sync_op: bool = True) -> Any:
    """Every rank's `tensor`, one after the other. As `broadcast`."""
    member = members[group]
    member.exchange(np.split(memory(out), member.size), [memory(tensor.contiguous())] * member.size)
    return DONE


def barrier(group: Any, device_id: int = -1) -> Any:
    """Gloo's gives up when a rank is 30 s late, as all others are while the main one writes a checkpoint."""
    nothing = [np.empty(0, np.uint8)] * members[group].size
    members[group].exchange(nothing, nothing)
    return DONE
