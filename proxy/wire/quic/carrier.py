"""Carries one QUIC connection: its datagrams, its timer, its events."""

import asyncio
import logging
from typing import Any, Protocol

from aioquic.quic.events import QuicEvent

from balanceroute.proxy.wire.quic.connection import OrderedConnection

_LOG = logging.getLogger(__name__)

NetworkAddress = tuple[Any, ...]

# By which a timer is told to be late: far above the rounding of a clock, far below QUIC's own times.
_LATE_S = 1e-6


class Datagrams(Protocol):
    """What datagrams are sent over."""

    def sendto(self, data: bytes, addr: NetworkAddress | None = None) -> None:
        """Send one."""


class Carried(Protocol):
    """What a connection is for."""

    def on_event(self, event: QuicEvent) -> None:
        """Take what happened."""

    def on_progress(self) -> None:
        """Note that something was sent or acknowledged."""


class Carrier:
    """Drives a connection.

    Args:
        quic: The connection.
        datagrams: What it is sent over.
        loop: Its clock and timers.

    Attributes:
        carried: Takes its events; set before the first datagram.
        heard_s: When a datagram of the peer came last.
    """

    carried: Carried

    def __init__(
        self, quic: OrderedConnection, datagrams: Datagrams, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.quic = quic
        self.heard_s = loop.time()
        self._datagrams = datagrams
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        self._sending: asyncio.Handle | None = None
        self._stopped = False

    def receive(self, data: bytes, address: NetworkAddress) -> None:
        """Take a datagram."""
        self.heard_s = self._loop.time()
        try:
            self.quic.receive_datagram(data, address, now=self.heard_s)
        except Exception:
            # A datagram that the library stumbles over is no reason to harm other connections.
            _LOG.exception("a datagram could not be read")
            self.quic.close(error_code=1, reason_phrase="internal error")
        self._pass_on()
        self.send_soon()

    def send_soon(self) -> None:
        """Send what waits, at the end of the loop's turn."""
        if self._sending is None and not self._stopped:
            self._sending = self._loop.call_soon(self._send)

    def send(self) -> None:
        """Send what waits."""
        if self._sending is not None:
            self._sending.cancel()
        self._send()

    def stop(self) -> None:
        """Do nothing any more."""
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
