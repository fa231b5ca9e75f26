"""Gives the datagrams of one address to the connections of its clients.

A client is made to show that it receives at its address (Retry, RFC 9000 section 8.1.2) while many
handshakes are open: before that it has cost no memory, and no signature. At a higher number of open
handshakes a newcomer takes the place of the oldest one of the address that has most of them.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from typing import cast

from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import (
    ConnectionIdIssued,
    ConnectionIdRetired,
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
)
from aioquic.quic.packet import (
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler

from balanceroute.proxy.wire.quic.connection import (
    Carried,
    Carrier,
    Datagrams,
    NetworkAddress,
    OrderedConnection,
)

_ID_BYTES = 8
_LEAST_INITIAL_BYTES = 1200
_LONG_HEADER = 0x80
# At this many times the number from which the server answers with Retry, one ends for each that begins.
_MOST_HANDSHAKES = 8

Make = Callable[[Carrier, NetworkAddress], Carried]
"""Returns the user of a new client's connection, given its address."""


class QuicEndpoint(asyncio.DatagramProtocol):
    """The server's side of one UDP socket.

    Args:
        configuration: Returns that of the next connection.
        accepts: Whether newcomers are taken now.
        order: In which the streams of a connection are sent; see `STREAM_ORDERS`.
        streams: How many of them a client may have open.
        handshakes: From so many open handshakes on, newcomers have to show their address.
        handshake_s: How long a handshake may take.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        configuration: Callable[[], QuicConfiguration],
        make: Make,
        accepts: Callable[[], bool],
        *,
        order: str,
        streams: int,
        handshakes: int,
        handshake_s: float,
    ) -> None:
        self.retries = 0  # Newcomers that had to show their address.
        self.dropped = 0  # Handshakes that ended for a newcomer's.
        self.late = 0  # Those whose handshake took too long.
        self.failed = 0  # Those whose handshake ended otherwise, without a connection.
        self._loop = loop
        self._configuration = configuration
        self._make = make
        self._accepts = accepts
        self._order = order
        self._streams = streams
        self._most_unshown = handshakes
        self._handshake_s = handshake_s
        self._tokens = QuicRetryTokenHandler()
        self._carriers: dict[bytes, _Client] = {}
        self._handshakes: dict[_Client, asyncio.TimerHandle] = {}
        self._datagrams: Datagrams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to send through a socket."""
        self._datagrams = cast("Datagrams", transport)

    @property
    def handshakes(self) -> int:
        return len(self._handshakes)

    def close(self) -> None:
        """Forget every connection; send waiting data, such as its close."""
        for timer in self._handshakes.values():
            timer.cancel()
        self._handshakes.clear()
        for client in dict.fromkeys(self._carriers.values()):
            client.carrier.send()
            client.carrier.stop()
        self._carriers.clear()

    def datagram_received(self, data: bytes, addr: NetworkAddress) -> None:
        if not data:
            return
        if not data[0] & _LONG_HEADER:
            client = self._carriers.get(data[1 : 1 + _ID_BYTES])
            if client is not None:
                client.carrier.receive(data, addr)
            return
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=_ID_BYTES)
        except ValueError:
            return
        client = self._carriers.get(header.destination_cid)
        if client is None:
            client = self._newcomer(header, len(data), addr)
        if client is not None:
            client.carrier.receive(data, addr)

    def _newcomer(self, header: QuicHeader, size: int, address: NetworkAddress) -> "_Client | None":
        configuration = self._configuration()
        if size < _LEAST_INITIAL_BYTES or not self._accepts():
            return None
        if header.packet_type is QuicPacketType.VERSION_NEGOTIATION or header.version is None:
            return None
        if header.version not in configuration.supported_versions:
            self._datagrams.sendto(
                encode_quic_version_negotiation(
                    source_cid=header.destination_cid,
                    destination_cid=header.source_cid,
                    supported_versions=configuration.supported_versions,
                ),
                address,
            )
            return None
        if header.packet_type is not QuicPacketType.INITIAL:
            return None
        original = self._shown(header, address)
        waiting = len(self._handshakes)
        if original is None and waiting >= self._most_unshown:
            if not header.token:
                self._retry(header, address)
            return None
        if waiting >= _MOST_HANDSHAKES * self._most_unshown:
            self._make_room()
        quic = OrderedConnection(
            order=self._order,
            streams=self._streams,
            configuration=configuration,
            original_destination_connection_id=original or header.destination_cid,
            retry_source_connection_id=None if original is None else header.destination_cid,
        )
        carrier = Carrier(quic, self._datagrams, self._loop)
        client = _Client(self, carrier, address[0], {header.destination_cid, quic.host_cid})
        client.inner = self._make(carrier, address)
        carrier.carried = client
        for one in client.ids:
            self._carriers[one] = client
        self._handshakes[client] = self._loop.call_later(self._handshake_s, self._give_up, client)
        return client

    def _shown(self, header: QuicHeader, address: NetworkAddress) -> bytes | None:
        """Return the first id that a client used which has shown its address; None if it has not."""
        if not header.token:
            return None
        try:
            return self._tokens.validate_token(
                address=address,
                destination_cid=header.destination_cid,
                token=header.token,
                now=self._loop.time(),
            )
        except ValueError:
            return None

    def _retry(self, header: QuicHeader, address: NetworkAddress) -> None:
        assert header.version is not None
        self.retries += 1
        own_id = os.urandom(_ID_BYTES)
        token = self._tokens.create_token(
            address=address,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=own_id,
            now=self._loop.time(),
        )
        self._datagrams.sendto(
            encode_quic_retry(
                version=header.version,
                source_cid=own_id,
                destination_cid=header.source_cid,
                original_destination_cid=header.destination_cid,
                retry_token=token,
            ),
            address,
        )

    # Called by the connections.

    def issued(self, client: "_Client", one: bytes) -> None:
        """Route the datagrams of an id to a client's connection."""
        client.ids.add(one)
        self._carriers[one] = client

    def retired(self, client: "_Client", one: bytes) -> None:
        client.ids.discard(one)
        self._carriers.pop(one, None)

    def shaken(self, client: "_Client") -> None:
        timer = self._handshakes.pop(client, None)
        if timer is not None:
            timer.cancel()

    def ended(self, client: "_Client") -> None:
        self.failed += client in self._handshakes
        self.shaken(client)
        client.carrier.stop()
        for one in client.ids:
            self._carriers.pop(one, None)

    def _make_room(self) -> None:
        """End the oldest handshake of the address that has most of them."""
        counts = Counter(client.host for client in self._handshakes)
        self.dropped += 1
        busiest = max(counts, key=counts.__getitem__)
        oldest = next(client for client in self._handshakes if client.host == busiest)
        self._end(oldest, "too many handshakes")

    def _give_up(self, client: "_Client") -> None:
        self.late += 1
        self._end(client, "the handshake took too long")

    def _end(self, client: "_Client", reason: str) -> None:
        client.carrier.quic.close(reason_phrase=reason)
        client.carrier.send()
        self.shaken(client)
        self.ended(client)


class _Client:
    """A connection of a client: its user, its address, and its ids."""

    inner: Carried

    def __init__(
        self, endpoint: QuicEndpoint, carrier: Carrier, host: str, ids: set[bytes]
    ) -> None:
        self.carrier = carrier
        self.host = host
        self.ids = ids
        self._endpoint = endpoint

    def on_event(self, event: QuicEvent) -> None:
        match event:
            case ConnectionIdIssued():
                self._endpoint.issued(self, event.connection_id)
            case ConnectionIdRetired():
                self._endpoint.retired(self, event.connection_id)
            case HandshakeCompleted():
                self._endpoint.shaken(self)
                self.inner.on_event(event)
            case ConnectionTerminated():
                self.inner.on_event(event)
                self._endpoint.ended(self)
            case _:
                self.inner.on_event(event)

    def on_progress(self) -> None:
        self.inner.on_progress()
