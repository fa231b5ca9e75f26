"""The listener for clients and the one for administrators, as the settings want them."""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from ssl import SSLContext
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.admin import (
    CONNECTIONS,
    MAX_BODY_BYTES,
    Admin,
)
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.frontend.gateway import Gateway
from balanceroute.proxy.live.frontend.groups import Groups
from balanceroute.proxy.live.frontend.refusals import Limited
from balanceroute.proxy.live.frontend.request_head import UNAUTHORISED, Clients
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, error_body
from balanceroute.proxy.live.openai.routes import CONTROL
from balanceroute.proxy.live.security import Credentials, ServerTls, Tenant, server_context
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.telemetry.record import Tracer
from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
from balanceroute.proxy.wire.http1.heads import RequestHead
from balanceroute.proxy.wire.http1.server import Make, Server
from balanceroute.proxy.wire.http1.server_connection import ServerConnection
from balanceroute.proxy.wire.http1.service import Common
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Rejection, Reply

if TYPE_CHECKING:
    from balanceroute.proxy.live.frontend.cors import Cors
    from balanceroute.proxy.live.picker import Picker
    from balanceroute.proxy.live.select_service import SelectService


# Of the admin listener: administrators are near.
_HEADER_TIMEOUT_S = 2.0
# How long a client may believe that HTTP/3 is spoken.
_ALTERNATIVE_S = 86_400


class PublicListener:
    """Where clients come in; `orders` takes those of administrators, None if they do not come in here."""

    def __init__(
        self,
        config: ProxyConfig,
        groups: Groups,
        environment: Environment,
        *,
        metrics: RequestMetrics,
        page_of_metrics: Callable[[], bytes],
        orders: Admin | None,
    ) -> None:
        self._config = config
        listening, tracing = config.listening, config.tracing
        draw = environment.rng.getrandbits
        gateway = self.gateway = Gateway(
            groups,
            metrics=metrics,
            page_of_metrics=page_of_metrics,
            log=environment.log,
            config=config,
            clients=clients_of(config, config.credentials),
            unix_s=environment.unix_s,
            tracer=None if tracing is None else Tracer(tracing.share, draw),
        )
        self.http3 = None  # Serves the same over HTTP/3; None if that is off.
        commons: list[Common] = []
        if config.http3.http3:
            # Here, so that nothing of it is loaded where it is off: an extra.
            from balanceroute.proxy.live.http3_listener import Http3Listener  # noqa: PLC0415

            assert listening.certificate is not None, "the settings were checked for it"
            self.http3 = Http3Listener(config.http3, *listening.certificate)
            commons.append(self._alternative)
        served: Gateway | ControlRoutes | Cors = gateway
        if orders is not None:
            served = ControlRoutes(orders, gateway, groups.context.unique)
        if listening.cors_origin:
            from balanceroute.proxy.live.frontend import cors  # noqa: PLC0415

            served = cors.Cors(listening.cors_origin, served, served.admit)
            commons.append(served.fields)
        self.server = Server(
            served,
            limits=config.limits,
            refuse=gateway.refusals.render,
            admit=served.admit,
            common=_joined(commons),
            make=_connections(config),
        )
        self.picker = _picker(config, groups, gateway, environment)
        self.tls = None  # What it serves https with; None for http.
        if listening.certificate is not None:
            self.tls = ServerTls(*listening.certificate, http2=config.gateway.http2)

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen on sockets that are bound, or else at the address of the settings. Raises ConfigError."""
        if sockets:
            await self.server.start_on(sockets, ssl=self._context)
            return
        host, port = self._config.listening.host, self._config.listening.port
        await _listen(self.server, "--host {} --port {}", host, port, self._context)
        if self.http3 is not None:
            try:
                await self.http3.start(self.server.service, self.server.addresses)
            except OSError as error:
                await self.close()
                self.server.close()
                place = "--http3: UDP at --host {} --port {}"
                raise not_bound(place, host, self.server.port, error) from None
        if self.picker is not None:
            try:
                await self.picker.start(self.server.service.bodies)
            except ConfigError:
                await self.close()
                self.server.close()
                raise

    async def close(self) -> None:
        """Close the sockets of HTTP/3, behind the server's, and end the streams of gateways."""
        if self.http3 is not None:
            self.http3.close()
        if self.picker is not None:
            await self.picker.close()

    def load_certificate(self) -> None:
        """Serve with the newest certificate, if with any.

        Raises:
            ConfigError: It is bad; then the present one stays.
        """
        files = self._config.listening.certificate
        if self.tls is not None and files is not None:
            newest = server_context(*files, http2=self._config.gateway.http2)
            if self.http3 is not None:
                self.http3.load_certificate()
            self.tls.use(newest)

    @property
    def _context(self) -> SSLContext | None:
        return None if self.tls is None else self.tls.context

    def _alternative(self, headers: Headers) -> Headers:
        """Return where HTTP/3 is spoken (RFC 7838)."""
        del headers
        return [(b"alt-svc", b'h3=":%d"; ma=%d' % (self.server.port, _ALTERNATIVE_S))]

    def use(self, credentials: Credentials) -> None:
        self.gateway.use_keys(clients_of(self._config, credentials), credentials.engine_key)


def _picker(
    config: ProxyConfig,
    groups: Groups,
    gateway: Gateway,
    environment: Environment,
) -> "Picker | None":
    """Return what answers gateways where requests go; None, and nothing of it is imported, where it is off.

    Raises:
        ConfigError: Ranks call for their prefills.
    """
    if config.gateway.pick == "off":
        return None
    if any(group.intake.context.connector.decode_first for group in groups):
        raise ConfigError("--pick: a rank calls for its prefill with this --connector")
    from balanceroute.proxy.live.picker import Choices, Picker  # noqa: PLC0415  # An extra.

    return Picker(config, Choices(config, groups, gateway, environment.unix_s))


class ControlRoutes:
    """The application behind the public listener where that serves orders, too: `CONTROL`, to administrators.

    What `Admin` answers is the same as on the admin listener, its limits as well.
    """

    def __init__(self, pages: Admin, gateway: Gateway, unique: Callable[[], str]) -> None:
        self._pages, self._gateway, self._unique = pages, gateway, unique

    def admit(self, head: RequestHead, peer: str) -> Rejection | None:
        if _control_path(head.path) is None:
            return self._gateway.admit(head, peer)
        if not self._pages.knows(head.headers):
            return _FORBIDDEN if self._gateway.is_client(head.headers) else UNAUTHORISED
        if (head.content_length or 0) > MAX_BODY_BYTES:
            return _TOO_LARGE
        return None

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        path = _control_path(request.path)
        if path is None:
            self._gateway(request, reply)
            return
        refused = None
        if len(request.body) > MAX_BODY_BYTES:  # Its head did not say so.
            refused = _TOO_LARGE
        elif request.method not in _READING and self._pages.going_on >= CONNECTIONS:
            refused = _TOO_MANY  # On the admin listener each has a connection.
        if refused is not None:
            headers, body = self._gateway.refusals.render(refused, request, request.peer)
            reply.send(refused.status, headers, body)
            return
        request.path = path
        reply.more_headers.append((b"x-request-id", self._unique().encode()))
        self._pages(request, reply)


_CONTROL_PATHS = frozenset(one.path.encode() for one in CONTROL if "{id}" not in one.path)
_CONTROL_NAMED = tuple(
    one.path.partition("{id}")[0].encode() for one in CONTROL if "{id}" in one.path
)
_READING = (b"GET", b"HEAD")
_FORBIDDEN = Rejection(
    403, "Forbidden: the key is a client's; this needs the administrators' token"
)
_TOO_LARGE = Limited(413, f"an order may have {MAX_BODY_BYTES} bytes")
_TOO_MANY = Limited(429, f"too many orders go on: {CONNECTIONS} at a time")


def _control_path(path: bytes) -> bytes | None:
    """Return the path of an order as its route has it; None for what is none."""
    if path in _CONTROL_PATHS:
        return path
    bare = path.removesuffix(b"/")
    return bare if bare in _CONTROL_PATHS or bare.startswith(_CONTROL_NAMED) else None


class AdminListener:
    """Where administrators come in, to `pages`."""

    def __init__(self, config: ProxyConfig, pages: Admin) -> None:
        self._listening = config.listening
        # Few and its own: it answers when the public listener is full. A connection without a request at work
        # makes room for a new one, and those that keep a place for long are bounded.
        limits = replace(
            config.limits,
            body_limit_bytes=MAX_BODY_BYTES,
            connection_limit=CONNECTIONS,
            peer_connection_limit=0,
            unread_gives_way=True,
            header_timeout_s=min(config.limits.header_timeout_s, _HEADER_TIMEOUT_S),
        )
        self.server = Server(pages, limits=limits, refuse=_refuse)

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen; see `PublicListener.start`."""
        if sockets:
            await self.server.start_on(sockets)
            return
        host, port = self._listening.admin_host, self._listening.admin_port
        await _listen(self.server, "--admin-host {} --admin-port {}", host, port)


async def serve_selections(
    config: ProxyConfig, groups: Groups, gateway: Gateway, environment: Environment
) -> "SelectService | None":
    """Serve routers that ask for engines; return None, and import nothing of it, where none may.

    Raises:
        ConfigError: The address cannot be bound, or a connector does not prefill first.
    """
    if config.gateway.select_key_file is None:
        return None
    if any(one.intake.context.connector.decode_first for one in groups):
        raise ConfigError(
            "--select-key-file: with this --connector a rank begins, and calls for the prefill"
        )
    from balanceroute.proxy.live import select_service  # noqa: PLC0415
    from balanceroute.proxy.live.selection import Selector  # noqa: PLC0415

    # One router has all connections, and each of its requests that waits for an engine holds one.
    limits = replace(
        config.limits,
        body_limit_bytes=select_service.MAX_BODY_BYTES,
        connection_limit=select_service.CONNECTIONS,
        peer_connection_limit=0,
    )
    service = select_service.SelectService(
        groups,
        Selector(groups, gateway.refusals, environment.unix_s),
        unique=groups.context.unique,
        keys=config.credentials.select_keys,
        limits=limits,
    )
    host, port = config.gateway.select_host, config.gateway.select_port
    await _listen(service.server, "--select-host {} --select-port {}", host, port)
    return service


def _connections(config: ProxyConfig) -> Make:
    if not config.gateway.http2:
        return ServerConnection
    from balanceroute.proxy.wire.http2 import EitherConnection  # noqa: PLC0415  # An extra.

    return partial(EitherConnection, config.gateway.http2_streams)


def _joined(commons: Sequence[Common]) -> Common | None:
    """Return what returns the headers of all of them; None if there are none."""
    if len(commons) < 2:
        return commons[0] if commons else None
    return lambda headers: [field for common in commons for field in common(headers)]


async def _listen(
    server: Server, place: str, host: str, port: int, ssl: SSLContext | None = None
) -> None:
    try:
        await server.start(host, port, ssl=ssl)
    except OSError as error:
        raise not_bound(place, host, port, error) from None


def not_bound(place: str, host: str, port: int, error: OSError) -> ConfigError:
    # Resolvers have numbers of their own; a failed bind's text repeats the address.
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    if ":" in host and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
        reason = f"this machine has no such IPv6 address: {reason}"
        if host == "::":
            reason = "this machine has no IPv6; 0.0.0.0 is every interface of IPv4"
    return ConfigError(f"{place.format(host, port)}: {reason}")


def clients_of(config: ProxyConfig, credentials: Credentials) -> Clients:
    """Return what finds tenants by keys, which may be newer than the configuration's."""
    admission = config.admission
    everybody = Tenant(
        "",
        client_priority=admission.client_priority,
        client_deadline=admission.client_deadline,
    )
    return Clients(credentials.api_keys, credentials.tenants, everybody=everybody)


def _refuse(rejection: Rejection, head: RequestHead | None, peer: str) -> tuple[Headers, bytes]:
    del head, peer
    body = error_body(rejection.status, rejection.message, param=rejection.param)
    return [*JSON_HEADERS, *rejection.headers], body
