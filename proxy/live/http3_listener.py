"""Where clients come in over HTTP/3: as many sockets as HTTP/1.1 has, at the same addresses.

Needs the extra `h3`. What the connections are given to is the HTTP/1.1 server's `Service`.
"""

import socket
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioquic.h3.connection import H3_ALPN
from aioquic.quic.configuration import QuicConfiguration

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.openai.urgency import ANSWER_DUE, FIRST_TOKEN_DUE, deadline_ms, urgency
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.live.telemetry.component_metrics import Http3Counts
from balanceroute.proxy.wire.http1.service import Service
from balanceroute.proxy.wire.http3.server import Http3ServerConnection, Priorities
from balanceroute.proxy.wire.messages import Headers
from balanceroute.proxy.wire.quic.endpoint import QuicEndpoint
from balanceroute.proxy.wire.quic.stream_orders import StreamPriority

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.wire.quic.connection import Carrier, NetworkAddress


# Bytes that a client may send before the proxy has read them, in one request and in a connection.
_STREAM_BYTES, _CONNECTION_BYTES = 256 << 10, 1 << 20
# What the kernel keeps of datagrams that were not read yet, if it lets us.
_SOCKET_BYTES = 4 << 20
_USUAL_URGENCY = 3


class Http3Listener:
    """Serves an application over HTTP/3.

    Raises:
        ConfigError: The certificate cannot be used.
    """

    def __init__(self, settings: Http3Settings, cert: Path, key: Path) -> None:
        self._settings = settings
        self._cert, self._key = cert, key
        self._configuration = _configuration(cert, key, inf)
        self._priorities = Priorities(
            priority_of,
            lambda value: _level([(b"priority", value)]),
            settings.http3_hard_deadlines,
        )
        self._endpoints: list[QuicEndpoint] = []
        self._transports: list[asyncio.DatagramTransport] = []

    async def start(self, service: Service, addresses: Sequence[tuple[str, int]]) -> None:
        """Receive at these addresses. Raises OSError: one of them cannot be bound."""
        limits = service.limits
        self._configuration = replace(self._configuration, idle_timeout=limits.keep_alive_timeout_s)

        def make(carrier: "Carrier", address: "NetworkAddress") -> Http3ServerConnection:
            return Http3ServerConnection(service, carrier, address, self._priorities)

        for address in addresses:
            transport, endpoint = await service.loop.create_datagram_endpoint(
                lambda: QuicEndpoint(
                    service.loop,
                    lambda: self._configuration,
                    make,
                    lambda: not service.stopping,
                    order=self._settings.http3_order,
                    streams=self._settings.http3_streams,
                    handshakes=self._settings.http3_handshakes,
                    handshake_s=limits.header_timeout_s,
                ),
                **_place(*address),
            )
            raw = transport.get_extra_info("socket")
            if raw is not None:  # A loop in virtual time has no sockets.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            self._transports.append(transport)
            self._endpoints.append(endpoint)

    def counts(self) -> Http3Counts:
        endpoints, of_order = self._endpoints, self._priorities.counts
        return Http3Counts(
            sum(one.handshakes for one in endpoints),
            sum(one.retries for one in endpoints),
            {
                "crowd": sum(one.dropped for one in endpoints),
                "late": sum(one.late for one in endpoints),
                "failed": sum(one.failed for one in endpoints),
            },
            self._settings.http3_order,
            of_order.requests.copy(),
            of_order.kept,
            of_order.missed,
        )

    def load_certificate(self) -> None:
        """Serve new connections with the newest certificate.

        Raises:
            ConfigError: It is bad; then the present one stays.
        """
        idle_s = self._configuration.idle_timeout
        self._configuration = _configuration(self._cert, self._key, idle_s)

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()
        for transport in self._transports:
            transport.close()


def _place(host: str, port: int) -> dict[str, Any]:
    """Return where to receive. IPv6 alone, where IPv4 has a socket of its own: the loops do not say so.

    Raises:
        OSError: It cannot be bound.
    """
    if ":" not in host:
        return {"local_addr": (host, port)}
    one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    try:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.setblocking(False)
        one.bind((host, port))
    except OSError:
        one.close()
        raise
    return {"sock": one}


def priority_of(headers: Headers, now_s: float) -> StreamPriority:
    """Return how a request's answer is to be sent, by its own word; what cannot be read is ignored."""

    def due_s(name: bytes) -> float:
        ms = deadline_ms(headers, name)
        return inf if ms is None else now_s + ms / 1_000

    return StreamPriority(_level(headers), due_s(ANSWER_DUE), due_s(FIRST_TOKEN_DUE))


def _level(headers: Headers) -> int:
    return _USUAL_URGENCY - urgency(headers)


def _configuration(cert: Path, key: Path, idle_s: float) -> QuicConfiguration:
    configuration = QuicConfiguration(
        alpn_protocols=H3_ALPN,
        congestion_control_algorithm="cubic",
        idle_timeout=idle_s,
        is_client=False,
        max_data=_CONNECTION_BYTES,
        max_stream_data=_STREAM_BYTES,
    )
    try:
        configuration.load_cert_chain(cert, key)
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"is {cert} with key {key}: {error}") from None
    return configuration
