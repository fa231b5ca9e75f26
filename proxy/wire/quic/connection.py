"""A QUIC connection of aioquic whose streams are sent in a chosen order, within fixed windows.

aioquic sends streams in turns, and doubles what a peer may send as soon as half of it was used, whether
or not anybody has taken the data: a peer that leaves a gap can so make it hold any amount. Both are
changed here, by names of aioquic that are not public. So the extra `h3` allows one minor version, and
tests/wire/quic/test_connection.py fails if one of these names goes or changes its meaning.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Protocol

from aioquic.quic.connection import QuicConnection, stream_is_unidirectional
from aioquic.quic.events import QuicEvent
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS, USUAL, StreamPriority

_UNIDIRECTIONAL_STREAMS = 16
"""HTTP/3 has three of each side; a peer may try further ones (RFC 9114, section 6.2.3)."""

# Turns of streams that are gone.
_FORGOTTEN_TOGETHER = 64


class _Queue(list[QuicStream]):
    """The streams, sorted whenever they are gone through after a change."""

    def __init__(self, streams: Iterable[QuicStream], owner: "OrderedConnection") -> None:
        super().__init__(streams)
        self.changed = True
        self._owner = owner

    def __iter__(self) -> Iterator[QuicStream]:
        if self.changed:
            self.changed = False
            self.sort(key=self._owner.key_of)
        return super().__iter__()

    def append(self, stream: QuicStream) -> None:
        self.changed = True
        super().append(stream)

    def extend(self, streams: Iterable[QuicStream]) -> None:
        self.changed = True
        super().extend(streams)


class OrderedConnection(QuicConnection):
    """A connection that sends its streams in an order of `STREAM_ORDERS`.

    Args:
        streams: How many streams the peer may have open at a time.
        options: See `QuicConnection`. Its configuration's `max_data` and `max_stream_data` are how many
            bytes a peer may be ahead of what was taken, in all and in one stream.
    """

    def __init__(self, *, order: str, streams: int = 128, **options: Any) -> None:
        self._order = STREAM_ORDERS[order]
        self._priorities: dict[int, StreamPriority] = {}
        self._turns: dict[int, int] = {}
        self._next_turn = count()
        super().__init__(**options)
        for limit, most in (
            (self._local_max_streams_bidi, streams),
            (self._local_max_streams_uni, _UNIDIRECTIONAL_STREAMS),
        ):
            limit.value = limit.sent = most

    # The order.

    def prioritise(self, stream_id: int, priority: StreamPriority) -> None:
        """Send a stream by this priority until `drop_priority`."""
        self._priorities[stream_id] = priority
        self._queue.changed = True

    def drop_priority(self, stream_id: int) -> None:
        self._priorities.pop(stream_id, None)

    def priority(self, stream_id: int) -> StreamPriority:
        return self._priorities.get(stream_id, USUAL)

    def key_of(self, stream: QuicStream) -> tuple[float, ...]:
        number = stream.stream_id
        assert number is not None
        if stream_is_unidirectional(number):
            return ()  # HTTP/3's own go first: without them the peer can read nothing.
        turn = self._turns.get(number)
        if turn is None:
            turn = self._turns[number] = next(self._next_turn)
        priority = self._priorities.get(number, USUAL)
        if priority.begin_s < priority.deadline_s and not stream.sender.highest_offset:
            priority = priority._replace(deadline_s=priority.begin_s)
        return self._order(priority, number, turn)

    # What waits.

    def unsent(self, stream_id: int) -> int:
        """Return the bytes of a stream that were never sent."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender._reset_error_code is not None:
            return 0
        return stream.sender._buffer_stop - stream.sender.highest_offset

    def unacknowledged(self, stream_id: int) -> int:
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender._reset_error_code is not None:
            return 0
        return len(stream.sender._buffer)

    def is_sent(self, stream_id: int) -> bool:
        """Return whether the peer has the whole stream, with its end."""
        stream = self._streams.get(stream_id)
        return stream is None or stream.sender.is_finished

    def refuse_data(self, stream_id: int, error_code: int) -> None:
        """Ask the peer to send nothing more of a stream, unless it has sent all."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.receiver.is_finished:
            stream.receiver.stop(error_code)

    @property
    def streams_left(self) -> int:
        """How many more streams a client may open now.

        Of one that it has opened beyond that it must send nothing, not even that it gives it up.
        """
        return self._remote_max_streams_bidi - self._local_next_stream_id_bidi // 4

    @property
    def idle_timeout_s(self) -> float:
        """The silence after which one of the sides ends the connection."""
        return self._idle_timeout()

    @property
    def stream_limit(self) -> int:
        """How many streams the peer has been allowed to open so far."""
        return self._local_max_streams_bidi.value

    # In place of aioquic's own.

    def send_stream_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:
        """Send more of a stream, unless the peer has asked for no more: its event may be still to come."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender._reset_error_code is None:
            super().send_stream_data(stream_id, data, end_stream)

    @property
    def _streams_queue(self) -> list[QuicStream]:
        return self._queue

    @_streams_queue.setter
    def _streams_queue(self, streams: list[QuicStream]) -> None:
        self._queue = _Queue(streams, self)
        if len(self._turns) > 2 * len(self._streams) + _FORGOTTEN_TOGETHER:
            self._turns = {one: turn for one, turn in self._turns.items() if one in self._streams}

    def _write_stream_frame(
        self,
        builder: QuicPacketBuilder,
        space: QuicPacketSpace,
        stream: QuicStream,
        max_offset: int,
    ) -> int:
        before = builder.remaining_flight_space
        used = super()._write_stream_frame(
            builder=builder, space=space, stream=stream, max_offset=max_offset
        )
        if builder.remaining_flight_space != before and stream.stream_id is not None:
            self._turns[stream.stream_id] = next(self._next_turn)
        return used

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        receiver, window = stream.receiver, self._configuration.max_stream_data
        wanted = not receiver.is_finished and receiver._stop_error_code is None
        if stream.max_stream_data_local and wanted:
            limit = receiver.starting_offset() + window
            if limit - stream.max_stream_data_local >= window // 2:
                stream.max_stream_data_local = limit
        if stream.max_stream_data_local_sent == stream.max_stream_data_local:
            return
        # It doubles the limit where half of it was used.
        highest, receiver.highest_offset = receiver.highest_offset, 0
        try:
            super()._write_stream_limits(builder=builder, space=space, stream=stream)
        finally:
            receiver.highest_offset = highest

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        limit, window = self._local_max_data, self._configuration.max_data
        if limit.used + window - limit.value >= window // 2:
            held = sum(
                one.receiver.highest_offset - one.receiver.starting_offset()
                for one in self._streams.values()
                if not one.receiver.is_finished
            )
            limit.value = max(limit.value, limit.used - held + window)
        # As above.
        used, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder=builder, space=space)
        finally:
            limit.used = used


# Carries one QUIC connection: its datagrams, its timer, its events.

_LOG = logging.getLogger(__name__)

NetworkAddress = tuple[Any, ...]

# Added to the time of a timer: far above the rounding of a clock, far below QUIC's own times.
_LATE_S = 1e-6


class Datagrams(Protocol):
    """Sends datagrams."""

    def sendto(self, data: bytes, addr: NetworkAddress | None = None) -> None:
        """Send one."""


class Carried(Protocol):
    """The user of a connection."""

    def on_event(self, event: QuicEvent) -> None:
        """Handle an event."""

    def on_progress(self) -> None:
        """Note that something was sent or acknowledged."""


class Carrier:
    """Drives a connection."""

    carried: Carried  # Takes its events; set before the first datagram.

    def __init__(
        self, quic: OrderedConnection, datagrams: Datagrams, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.quic = quic
        self.received_s = loop.time()  # When a datagram of the peer came last.
        self._datagrams = datagrams
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        self._sending: asyncio.Handle | None = None
        self._stopped = False

    def receive(self, data: bytes, address: NetworkAddress) -> None:
        self.received_s = self._loop.time()
        try:
            self.quic.receive_datagram(data, address, now=self.received_s)
        except Exception:
            # A datagram that the library stumbles over is no reason to harm other connections.
            _LOG.exception("a datagram could not be read")
            self.quic.close(error_code=1, reason_phrase="internal error")
        self._pass_on()
        self.send_soon()

    def send_soon(self) -> None:
        """Send waiting data, at the end of the loop's turn."""
        if self._sending is None and not self._stopped:
            self._sending = self._loop.call_soon(self._send)

    def send(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self._send()

    def stop(self) -> None:
        self._stopped = True
        for handle in (self._timer, self._sending):
            if handle is not None:
                handle.cancel()
        self._timer = self._sending = None

    def _send(self) -> None:
        self._sending = None
        if self._stopped:
            return
        for data, address in self.quic.datagrams_to_send(now=self._loop.time()):
            self._datagrams.sendto(data, address)
        self._set_timer()
        self.carried.on_progress()

    def _set_timer(self) -> None:
        at_s = self.quic.get_timer()
        if at_s == self._timer_at_s and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = None if at_s is None else self._loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        assert self._timer_at_s is not None
        # A loop's timer may be early by its resolution. A timer of QUIC may find that its time has not
        # come, as `sent + delay - delay` is not always `sent`, and would be set for the same time again.
        now_s = max(self._timer_at_s + _LATE_S, self._loop.time())
        self._timer = self._timer_at_s = None
        self.quic.handle_timer(now=now_s)
        self._pass_on()
        self.send()

    def _pass_on(self) -> None:
        while (event := self.quic.next_event()) is not None:
            self.carried.on_event(event)
