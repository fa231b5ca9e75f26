"""When a peer counts as stalled."""

from balanceroute.proxy.wire.write_progress import WriteProgress


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
