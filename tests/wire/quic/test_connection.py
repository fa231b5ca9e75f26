"""Streams in the chosen order, windows that do not grow, and the names of aioquic that this rests on."""

import asyncio
import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from aioquic.h3.connection import H3Connection
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, StreamDataReceived
from aioquic.quic.stream import QuicStreamReceiver, QuicStreamSender
from tests.support.virtual.loop import START_S, VirtualLoop
from tests.support.virtual.runner import run
from tests.wire.quic.pair import Pair, connected

from balanceroute.proxy.wire.quic.connection import Carrier, OrderedConnection
from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS, StreamPriority

pytest.importorskip("aioquic", reason="needs the extra h3")


PIECE = 3_000  # More than two packets.
PRIORITIES = {
    0: StreamPriority(0, 9.0),
    4: StreamPriority(2, 7.0),
    8: StreamPriority(0, 5.0),
    12: StreamPriority(1, 6.0),
}


@pytest.fixture
def pair_of(tmp_path: Path) -> Any:
    """Return what connects a client of aioquic to a server that sends in some order."""
    return partial(connected, tmp_path)


def ends(pair: Pair) -> list[int]:
    """Return the streams in the order in which the server's answers end at the client."""
    ended = []
    for _ in range(100):
        pair.to_client()
        ended += [
            event.stream_id
            for event in pair.events(pair.client)
            if isinstance(event, StreamDataReceived) and event.end_stream
        ]
        pair.to_server()
        if len(ended) == len(PRIORITIES):
            return ended
    raise AssertionError(ended)


def opened(pair: Pair) -> None:
    """Let the client open the streams, one after the other."""
    for number in PRIORITIES:
        pair.client.send_stream_data(number, b"?", end_stream=True)
    pair.exchange()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", [0, 4, 8, 12]),
        ("edf", [8, 12, 4, 0]),
        ("abs", [4, 12, 0, 8]),
        ("ml", [12, 4, 0, 8]),
    ],
)
def test_streams_are_sent_in_the_order(pair_of: Any, order: str, expected: list[int]) -> None:
    pair = pair_of(order)
    opened(pair)
    for number, priority in PRIORITIES.items():
        pair.server.prioritise(number, priority)
        pair.server.send_stream_data(number, bytes(PIECE), end_stream=True)
    assert ends(pair) == expected


def test_the_first_byte_is_due_by_a_deadline_of_its_own(pair_of: Any) -> None:
    # The first packet of 4 is due before all others, the rest of it last; 8 never has the earlier one.
    due = {
        0: StreamPriority(0, 6.0),
        4: StreamPriority(0, begin_s=1.0),
        8: StreamPriority(0, 8.0, begin_s=9.0),
    }
    pair = pair_of("edf")
    opened(pair)
    for number, priority in due.items():
        pair.server.prioritise(number, priority)
        pair.server.send_stream_data(number, bytes(PIECE), end_stream=True)
    got: list[StreamDataReceived] = []
    while sum(one.end_stream for one in got) < len(due):
        pair.to_client()
        got += [one for one in pair.events(pair.client) if isinstance(one, StreamDataReceived)]
        pair.to_server()
    assert got[0].stream_id == 4
    assert [one.stream_id for one in got if one.end_stream] == [0, 8, 4]


def test_every_order_is_tested() -> None:
    assert set(STREAM_ORDERS) == {"rr", "fcfs", "edf", "abs", "ml"}


@pytest.mark.parametrize("order", ["rr", "ml"])
def test_turns_are_a_packet_each(pair_of: Any, order: str) -> None:
    pair = pair_of(order)
    opened(pair)
    for number in PRIORITIES:
        pair.server.send_stream_data(number, bytes(PIECE), end_stream=True)
    pair.to_client()
    got = dict.fromkeys(PRIORITIES, 0)
    for event in pair.events(pair.client):
        if isinstance(event, StreamDataReceived):
            got[event.stream_id] += len(event.data)
    assert max(got.values()) - min(got.values()) <= 1_200


def test_a_stream_that_rises_overtakes(pair_of: Any) -> None:
    pair = pair_of("abs")
    opened(pair)
    for number in PRIORITIES:
        pair.server.send_stream_data(number, bytes(20_000), end_stream=True)
    pair.to_client()
    pair.server.prioritise(12, StreamPriority(level=1))
    pair.to_server()
    assert ends(pair)[0] == 12


def test_what_waits_is_told(pair_of: Any) -> None:
    pair = pair_of()
    opened(pair)
    pair.server.send_stream_data(0, bytes(100_000), end_stream=True)
    assert pair.server.unsent(0) == pair.server.unacknowledged(0) == 100_000
    pair.to_client()
    assert 0 < pair.server.unsent(0) < 100_000
    assert pair.server.unacknowledged(0) == 100_000
    pair.exchange()
    assert pair.server.unsent(0) == pair.server.unacknowledged(0) == 0
    assert pair.server.is_sent(0)


def test_a_window_does_not_grow_with_what_nobody_took(pair_of: Any) -> None:
    """A gap at the beginning, then as far ahead as allowed, again and again."""
    pair = pair_of(window=65_536)
    stream = pair.client._get_or_create_stream_for_send(0)
    stream.sender.write(bytes(1 << 20))
    stream.sender._pending.subtract(0, 1)  # Never sent.
    for _ in range(50):
        pair.exchange()
    receiver = pair.server._streams[0].receiver
    assert receiver.highest_offset == 65_536
    assert len(receiver._buffer) <= 65_536
    assert pair.server._local_max_data.value == 2 * 65_536
    assert not [e for e in pair.events(pair.server) if isinstance(e, ConnectionTerminated)]
    stream.sender._pending.add(0, 1)
    stream.sender.buffer_is_empty = False
    pair.exchange()
    assert sum(len(e.data) for e in pair.events(pair.server)) == 1 << 20


def test_a_window_moves_with_what_was_taken(pair_of: Any) -> None:
    pair = pair_of(window=65_536)
    for number in (0, 4, 8):
        pair.client.send_stream_data(number, bytes(1 << 20), end_stream=True)
    for _ in range(50):
        pair.exchange()
    assert sum(len(event.data) for event in pair.events(pair.server)) == 3 << 20


def test_no_more_streams_than_allowed(pair_of: Any) -> None:
    pair = pair_of(streams=3)
    for number in range(0, 40, 4):
        pair.client.send_stream_data(number, b"?", end_stream=True)
    pair.exchange()
    assert len({event.stream_id for event in pair.events(pair.server)}) == 3
    for number in (0, 4, 8):
        pair.server.send_stream_data(number, b"!", end_stream=True)
    pair.exchange()
    assert len({event.stream_id for event in pair.events(pair.server)}) == 3


# The canary: each of these names is used, and is not public.


def test_aioquic_still_has_the_names_that_are_used() -> None:
    pair_methods = {
        QuicConnection: {
            "_write_application": {"builder", "network_path", "now"},
            "_write_stream_frame": {"builder", "space", "stream", "max_offset"},
            "_write_stream_limits": {"builder", "space", "stream"},
            "_write_connection_limits": {"builder", "space"},
            "_idle_timeout": set(),
        },
        H3Connection: {
            "_init_connection": set(),
            "_get_local_settings": set(),
            "_validate_settings": {"settings"},
            "_receive_request_or_push_data": {"stream", "data", "stream_ended"},
        },
    }
    for owner, methods in pair_methods.items():
        for name, parameters in methods.items():
            found = set(inspect.signature(getattr(owner, name)).parameters) - {"self"}
            assert found == parameters, f"{owner.__name__}.{name}"


def test_aioquic_still_sends_from_its_queue(pair_of: Any) -> None:
    source = inspect.getsource(QuicConnection._write_application)
    assert "for stream in self._streams_queue" in source
    assert "self._write_stream_frame" in source
    assert isinstance(vars(OrderedConnection)["_streams_queue"], property)
    pair = pair_of()
    assert {
        "_streams",
        "_local_max_data",
        "_local_max_streams_bidi",
        "_local_max_streams_uni",
    } <= set(vars(pair.server))
    assert {"_buffer", "_buffer_stop", "_reset_error_code", "highest_offset", "is_finished"} <= set(
        vars(QuicStreamSender(0, writable=True))
    )
    assert {"_stop_error_code", "highest_offset", "is_finished"} <= set(
        vars(QuicStreamReceiver(0, readable=True))
    )


# The timer of a connection.


pytest.importorskip("aioquic", reason="needs the extra h3")


_STEP_S = math.ulp(START_S)
SENT_S = START_S + _STEP_S
# Behind the first sum the clock has no room for the half, behind the difference neither.
DELAY_S = 100_001.5 * _STEP_S


class OnePacket:
    """What a connection does that waits for one packet to be lost, with the arithmetic of aioquic."""

    def __init__(self) -> None:
        self.asked = 0
        self.lost = False

    def get_timer(self) -> float | None:
        return None if self.lost else SENT_S + DELAY_S

    def handle_timer(self, now: float) -> None:
        self.asked += 1
        assert self.asked < 1_000, "the timer is set for the same time again and again"
        self.lost = now - DELAY_S >= SENT_S

    def next_event(self) -> None:
        return None

    def datagrams_to_send(self, now: float) -> list[Any]:
        del now
        return []


class Nobody:
    """Whom the connection is for."""

    def on_event(self, event: object) -> None: ...

    def on_progress(self) -> None: ...


def test_a_timer_whose_time_is_rounded_down_fires_once() -> None:
    assert SENT_S + DELAY_S - DELAY_S < SENT_S
    packet = OnePacket()

    async def main(loop: VirtualLoop) -> None:
        carrier = Carrier(cast("OrderedConnection", packet), cast("Any", None), loop)
        carrier.carried = Nobody()
        carrier.send_soon()
        await asyncio.sleep(1.0)

    run(main, seed=0)
    assert packet.lost
    assert packet.asked == 1
