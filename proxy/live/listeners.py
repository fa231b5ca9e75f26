"""The listener for clients and the one for administrators, as the settings want them."""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioquic.h3.connection import H3_ALPN
from aioquic.quic.configuration import QuicConfiguration

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.admin import (
    CONNECTIONS,
    MAX_BODY_BYTES,
    Admin,
    Control,
    Orders,
)
from balanceroute.proxy.live.control.pages import GroupOrdering
from balanceroute.proxy.live.frontend.cors import Cors
from balanceroute.proxy.live.frontend.gateway import Gateway, GatewaySettings
from balanceroute.proxy.live.frontend.groups import make_aliases
from balanceroute.proxy.live.frontend.request_head import Clients
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, error_body
from balanceroute.proxy.live.openai.urgency import ANSWER_DUE, FIRST_TOKEN_DUE, deadline_ms, urgency
from balanceroute.proxy.live.security import ServerTls, Tenant, server_context
from balanceroute.proxy.live.telemetry.component_metrics import Handshakes
from balanceroute.proxy.live.telemetry.record import Tracer
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.http3.server import Http3ServerConnection, Priorities
from balanceroute.proxy.wire.quic.endpoint import QuicEndpoint
from balanceroute.proxy.wire.quic.stream_orders import StreamStanding

if TYPE_CHECKING:
    import asyncio
    from ssl import SSLContext

    from balanceroute.proxy.live.frontend.groups import Groups
    from balanceroute.proxy.live.security import Credentials
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.proxy.live.settings.declared import Http3Settings
    from balanceroute.proxy.live.telemetry.record import Log
    from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
    from balanceroute.proxy.wire.http1.heads import RequestHead
    from balanceroute.proxy.wire.http1.service import Common, Service
    from balanceroute.proxy.wire.messages import Headers, Rejection
    from balanceroute.proxy.wire.quic.connection import Carrier, NetworkAddress


# Where clients come in over HTTP/3: as many sockets as HTTP/1.1 has, at the same addresses.
#
# Needs the extra `h3`. What the connections are given to is the HTTP/1.1 server's `Service`.

# How far a client may be ahead of what was read, in one request and in all of a connection.
_STREAM_BYTES, _CONNECTION_BYTES = 256 << 10, 1 << 20
# What the kernel keeps of datagrams that were not read yet, if it lets us.
_SOCKET_BYTES = 4 << 20
_USUAL_URGENCY = 3


class Http3Listener:
    """Serves an application over HTTP/3.

    Args:
        settings: How.
        cert: The certificate chain, PEM.
        key: Its private key, PEM.

    Raises:
        ConfigError: The certificate cannot be used.
    """

    def __init__(self, settings: "Http3Settings", cert: Path, key: Path) -> None:
        self._settings = settings
        self._cert, self._key = cert, key
        self._configuration = _configuration(cert, key, inf)
        self._priorities = Priorities(
            standing_of, lambda value: _level([(b"priority", value)]), settings.http3_hard_deadlines
        )
        self._endpoints: list[QuicEndpoint] = []
        self._transports: list[asyncio.DatagramTransport] = []

    async def start(self, service: "Service", addresses: "Sequence[tuple[str, int]]") -> None:
        """Receive at these addresses.

        Raises:
            OSError: One of them cannot be bound.
        """
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

    def handshakes(self) -> Handshakes:
        """Return what became of handshakes so far."""
        endpoints = self._endpoints
        return Handshakes(
            sum(one.handshakes for one in endpoints),
            sum(one.retries for one in endpoints),
            {
                "crowd": sum(one.dropped for one in endpoints),
                "late": sum(one.late for one in endpoints),
                "failed": sum(one.failed for one in endpoints),
            },
        )

    def load_certificate(self) -> None:
        """Serve new connections with the newest certificate.

        Raises:
            ConfigError: It is bad; then the present one stays.
        """
        idle_s = self._configuration.idle_timeout
        self._configuration = _configuration(self._cert, self._key, idle_s)

    def close(self) -> None:
        """Close the sockets."""
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


def standing_of(headers: "Headers", now_s: float) -> StreamStanding:
    """Return how a request's answer is to be sent, by its own word; what cannot be read is ignored."""

    def due_s(name: bytes) -> float:
        ms = deadline_ms(headers, name)
        return inf if ms is None else now_s + ms / 1_000

    return StreamStanding(_level(headers), due_s(ANSWER_DUE), due_s(FIRST_TOKEN_DUE))


def _level(headers: "Headers") -> int:
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


# Of the admin listener: who gives orders is near.
_HEADER_TIMEOUT_S = 2.0
# How long a client may believe that HTTP/3 is spoken.
_ALTERNATIVE_S = 86_400


class PublicListener:
    """Where clients come in.

    Attributes:
        tls: What it serves https with; None for http.
        http3: Serves the same over HTTP/3; None if that is off.
    """

    def __init__(
        self,
        config: "ProxyConfig",
        groups: "Groups",
        *,
        metrics: "RequestMetrics",
        page_of_metrics: Callable[[], bytes],
        log: "Log",
        unix_s: Callable[[], float],
        random_bits: Callable[[int], int],
    ) -> None:
        self._config = config
        listening = config.listening
        gateway = self.gateway = Gateway(
            groups,
            metrics=metrics,
            page_of_metrics=page_of_metrics,
            log=log,
            settings=_gateway_settings(config),
            aliases=make_aliases(config.aliases, groups, groups.context.clock),
            clients=clients_of(config, config.credentials),
            unix_s=unix_s,
            tracer=None if config.tracing is None else Tracer(config.tracing.share, random_bits),
        )
        self.http3 = None
        commons: list[Common] = []
        if config.http3.http3:
            # Here, so that nothing of it is loaded where it is off: an extra.

            assert listening.tls_cert is not None
            assert listening.tls_key is not None
            self.http3 = Http3Listener(config.http3, listening.tls_cert, listening.tls_key)
            commons.append(self._alternative)
        origins = listening.cors_origin
        cors = Cors(origins, gateway, gateway.admit) if origins else None
        self.server = Server(
            cors or gateway,
            limits=config.server_limits,
            refuse=gateway.refusals.render,
            admit=gateway.admit if cors is None else cors.admit,
            common=_joined([*commons, *([] if cors is None else [cors.fields])]),
        )
        self.tls = None
        if listening.tls_cert is not None and listening.tls_key is not None:
            self.tls = ServerTls(listening.tls_cert, listening.tls_key)

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen on sockets that are bound, or else at the address of the settings.

        Raises:
            ConfigError: It cannot be bound.
        """
        if sockets:
            await self.server.start_on(sockets, ssl=self._context)
            return
        host, port = self._config.listening.host, self._config.listening.port
        try:
            await self.server.start(host, port, ssl=self._context)
        except OSError as error:
            raise not_bound("--host {} --port {}", host, port, error) from None
        if self.http3 is not None:
            try:
                await self.http3.start(self.server.service, self.server.addresses)
            except OSError as error:
                self.close()
                self.server.close()
                place = "--http3: UDP at --host {} --port {}"
                raise not_bound(place, host, self.server.port, error) from None

    def close(self) -> None:
        """Close the sockets of HTTP/3, behind the server's."""
        if self.http3 is not None:
            self.http3.close()

    def load_certificate(self) -> None:
        """Serve with the newest certificate, if with any.

        Raises:
            ConfigError: It is bad; then the present one stays.
        """
        if self.tls is not None:
            listening = self._config.listening
            assert listening.tls_cert is not None
            assert listening.tls_key is not None
            newest = server_context(listening.tls_cert, listening.tls_key)
            if self.http3 is not None:
                self.http3.load_certificate()
            self.tls.use(newest)

    @property
    def _context(self) -> "SSLContext | None":
        return None if self.tls is None else self.tls.context

    def _alternative(self, headers: "Headers") -> "Headers":
        """Return where HTTP/3 is spoken (RFC 7838)."""
        del headers
        return [(b"alt-svc", b'h3=":%d"; ma=%d' % (self.server.port, _ALTERNATIVE_S))]

    def use(self, credentials: "Credentials") -> None:
        """Take newer keys from the next request on."""
        self.gateway.use_keys(clients_of(self._config, credentials), credentials.engine_key)


class AdminListener:
    """Where administrators come in."""

    def __init__(
        self,
        config: "ProxyConfig",
        control: Control,
        engines: Orders,
        page_of_metrics: Callable[[], bytes],
        groups: GroupOrdering | None = None,
    ) -> None:
        self._listening = listening = config.listening
        self.pages = Admin(
            control,
            engines,
            groups=groups,
            page_of_metrics=page_of_metrics,
            config=config.redacted(),
            token=config.credentials.admin_token,
            names={listening.admin_host, *listening.admin_name},
        )
        # Few and its own: it answers when the public listener is full. Nobody holds them without a request
        # that is at work: what else is there makes room, and what holds a place for long is bounded.
        limits = replace(
            config.server_limits,
            body_limit_bytes=MAX_BODY_BYTES,
            connection_limit=CONNECTIONS,
            peer_connection_limit=0,
            unread_gives_way=True,
            header_timeout_s=min(config.server_limits.header_timeout_s, _HEADER_TIMEOUT_S),
        )
        self.server = Server(self.pages, limits=limits, refuse=_refuse)

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen; see `PublicListener.start`."""
        if sockets:
            await self.server.start_on(sockets)
            return
        host, port = self._listening.admin_host, self._listening.admin_port
        try:
            await self.server.start(host, port)
        except OSError as error:
            raise not_bound("--admin-host {} --admin-port {}", host, port, error) from None


def _joined(commons: "Sequence[Common]") -> "Common | None":
    """Return what returns the headers of all of them; None if there are none."""
    if len(commons) < 2:
        return commons[0] if commons else None
    return lambda headers: [field for common in commons for field in common(headers)]


def not_bound(place: str, host: str, port: int, error: OSError) -> ConfigError:
    """Return the error of an address that cannot be bound."""
    # Resolvers have numbers of their own; a failed bind's text repeats the address.
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    if ":" in host and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
        reason = f"this machine has no such IPv6 address: {reason}"
        if host == "::":
            reason = "this machine has no IPv6; 0.0.0.0 is every interface of IPv4"
    return ConfigError(f"{place.format(host, port)}: {reason}")


def clients_of(config: "ProxyConfig", credentials: "Credentials") -> Clients:
    """Return what tells clients apart by keys, which may be newer than the configuration's."""
    admission = config.admission
    everybody = Tenant(
        "",
        client_priority=admission.client_priority,
        client_deadline=admission.client_deadline,
    )
    return Clients(credentials.api_keys, credentials.tenants, everybody=everybody)


def _gateway_settings(config: "ProxyConfig") -> GatewaySettings:
    return GatewaySettings(
        engine_key=config.credentials.engine_key,
        pass_authorization=config.pass_authorization,
        public_metrics=config.listening.public_metrics,
    )


def _refuse(
    rejection: "Rejection", head: "RequestHead | None", peer: str
) -> "tuple[Headers, bytes]":
    del head, peer
    body = error_body(rejection.status, rejection.message, param=rejection.param)
    return [*JSON_HEADERS, *rejection.headers], body
