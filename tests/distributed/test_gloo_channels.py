"""The channels by themselves: two ends in one process."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from vha_paddle.parallel.gloo_channels import ChannelError, Channels

GROUP, SOURCE, DESTINATION = 5, 0, 1


@pytest.fixture
def ends() -> tuple[Channels, Channels]:
    return Channels("127.0.0.1"), Channels("127.0.0.1")


def message(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def send(ends: tuple[Channels, Channels], array: np.ndarray, group: int = GROUP) -> None:
    ends[0].send(group, SOURCE, DESTINATION, array, lambda: ends[1].address)


def received(ends: tuple[Channels, Channels], length: int, group: int = GROUP) -> list[int]:
    out = np.zeros(length, np.uint8)
    ends[1].receive(group, SOURCE, out)
    return out.tolist()


def test_messages_wait_for_their_receiver_and_keep_their_order(ends: tuple[Channels, Channels]) -> None:
    send(ends, message(1, 2, 3))
    send(ends, message())
    send(ends, message(4))
    assert (received(ends, 3), received(ends, 0), received(ends, 1)) == ([1, 2, 3], [], [4])


def test_groups_do_not_mix_their_messages(ends: tuple[Channels, Channels]) -> None:
    send(ends, message(1), group=1)
    send(ends, message(2), group=2)
    assert (received(ends, 1, group=2), received(ends, 1, group=1)) == ([2], [1])


def test_a_message_larger_than_any_buffer_is_delivered(ends: tuple[Channels, Channels]) -> None:
    large = np.random.default_rng(0).integers(0, 256, 20_000_000, np.uint8)
    send(ends, large)
    out = np.zeros_like(large)
    ends[1].receive(GROUP, SOURCE, out)
    assert np.array_equal(out, large)


def test_another_length_than_expected_is_an_error_with_both(ends: tuple[Channels, Channels]) -> None:
    send(ends, message(1, 2, 3))
    with pytest.raises(ChannelError, match="group 5, message from rank 0: 3 bytes were sent, 4 are expected"):
        received(ends, 4)


def test_a_message_that_cannot_be_delivered_is_an_error_at_the_next_operation(
    ends: tuple[Channels, Channels],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    ends[0].send(GROUP, SOURCE, DESTINATION, message(1), lambda: f"127.0.0.1:{port}:{'00' * 16}")
    deadline = time.monotonic() + 10
    with pytest.raises(ChannelError, match="group 5, message from rank 0 to rank 1: .*refused"):
        while time.monotonic() < deadline:
            send(ends, message(2), group=6)
            time.sleep(0.01)


def test_a_peer_that_is_gone_is_an_error_and_not_a_wait(ends: tuple[Channels, Channels]) -> None:
    send(ends, message(1))
    assert received(ends, 1) == [1]
    ends[0]._flush()
    with pytest.raises(ChannelError, match="message from rank 0: the peer closed the connection"):
        received(ends, 1)


def test_a_stranger_is_not_taken_for_a_rank(ends: tuple[Channels, Channels]) -> None:
    host, port, _ = ends[1].address.rsplit(":", 2)
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"?" * 32)
        assert stranger.recv(1) == b""
    send(ends, message(7))
    assert received(ends, 1) == [7]
