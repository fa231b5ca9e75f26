"""When a peer counts as stalled."""

import socket

import pytest

from balanceroute.proxy.wire.turn_writes import WriteProgress, held_by_kernel


def test_a_peer_that_takes_nothing_stalls_after_the_timeout() -> None:
    writes = WriteProgress(8.0)
    assert writes.check_s == 2.0
    writes.begin(100.0)
    assert not writes.has_stalled(102.0, written=9, waiting=5)
    assert not writes.has_stalled(109.0, written=9, waiting=5)
    assert not writes.has_stalled(109.9, written=12, waiting=8)
    assert writes.has_stalled(110.0, written=12, waiting=8)


def test_a_taken_byte_or_an_empty_buffer_is_progress() -> None:
    writes = WriteProgress(8.0)
    writes.begin(100.0)
    assert not writes.has_stalled(102.0, written=9, waiting=5)
    assert not writes.has_stalled(110.0, written=9, waiting=4)
    assert not writes.has_stalled(120.0, written=9, waiting=0)
    assert not writes.has_stalled(127.0, written=9, waiting=0)
    # Another answer is waited for anew.
    writes.begin(130.0)
    assert not writes.has_stalled(131.0, written=9, waiting=0)
    assert not writes.has_stalled(138.9, written=12, waiting=3)


@pytest.mark.both_loops
def test_what_the_peer_acknowledges_is_progress() -> None:
    writes = WriteProgress(8.0)
    writes.begin(100.0)
    assert not writes.has_stalled(102.0, written=20, waiting=5, held=9)
    assert not writes.has_stalled(110.0, written=20, waiting=5, held=8)
    assert not writes.has_stalled(117.0, written=20, waiting=4, held=9)
    assert writes.has_stalled(118.0, written=20, waiting=4, held=9)


def test_a_connection_without_a_socket_holds_nothing() -> None:
    assert held_by_kernel(None) == 0
    closed = socket.socket()
    closed.close()
    assert held_by_kernel(closed) == 0
