"""Addresses of engines, small exchanges with them, and how these fail.

An address is `http://host:port`, or `http://host:port@rank` for one of several ranks.

An address carries no credentials and no path. Error messages here read on from the name of the
setting, and never show what stands before an `@`, which may be a password.
"""

import errno
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from ssl import SSLCertVerificationError
from urllib.parse import urlsplit

from balanceroute import __version__
from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.wire.http1.client import Endpoint, ResponseRoom, fetch
from balanceroute.proxy.wire.messages import Headers, Response, WireError, WireFault, bracketed
from balanceroute.topologies import MAX_RANKS

DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"(https?)://", re.IGNORECASE)
# RFC 1123, and underscores, which container networks use.
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_DIGITS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, order=True)
class EngineUrl:
    """The address of an engine, or of one data-parallel rank behind it."""

    scheme: str  # "http" or "https".
    host: str  # A name in lower case, or an IP address, without brackets.
    port: int  # From 1 to 65535.
    # The rank to name in the `X-data-parallel-rank` header; None if the address is all.
    rank: int | None = None

    @property
    def base(self) -> str:
        """The URL of the server, as in `http://[::1]:8000`."""
        return f"{self.scheme}://{bracketed(self.host)}:{self.port}"

    @property
    def name(self) -> str:
        """Its name in messages and metrics: the URL, with `@rank` if it has one."""
        return self.base if self.rank is None else f"{self.base}@{self.rank}"

    def __str__(self) -> str:
        return self.name

    def at(self, rank: int | None) -> "EngineUrl":
        """Return the address of a rank behind the same server."""
        return replace(self, rank=rank)

    @classmethod
    def parse(cls, text: str) -> "EngineUrl":
        """Read an address. Raises ConfigError."""
        scheme = _SCHEME.match(text)
        if scheme is None:
            raise _error(text, "must begin with http:// or https://")
        if "," in text:
            raise _error(text, "has a comma: give several with spaces between them")
        authority, cut, rest = _split_path(text[scheme.end() :])
        rank = None
        before, at, last = authority.rpartition("@")
        if at and _DIGITS.fullmatch(last):
            authority, rank = before, int(last)
        if "@" in authority:
            raise _error(text, "must not carry credentials")
        if rank is not None and rank >= MAX_RANKS:
            raise _error(text, f"has a rank beyond {MAX_RANKS - 1}")
        if cut and (cut != "/" or rest or rank is not None):
            raise _error(text, "must end after the port: no path, no query")
        try:
            host, port = _host_and_port(authority)
        except ConfigError as error:
            raise _error(text, str(error)) from None
        name = scheme[1].lower()
        return cls(name, host, DEFAULT_PORTS[name] if port is None else port, rank)


def valid_host(text: str) -> str:
    """Return an IP address (without brackets) or a host name in its usual spelling. Raises ConfigError."""
    if ":" in text:
        try:
            address = IPv6Address(text)
        except ValueError:
            raise ConfigError("has a host that is not an IPv6 address") from None
        if address.scope_id is not None:
            raise ConfigError("has an IPv6 address with a zone, which no Host header can carry")
        return str(address)
    labels = text.lower().removesuffix(".").split(".")
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError("has a host that is neither a name nor an IP address")
    # A name that ends in a number is read as an IPv4 address, in odd spellings too (2130706433).
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        try:
            return str(IPv4Address(text))
        except ValueError:
            raise ConfigError("has a host that is not an IPv4 address") from None
    return ".".join(labels)


def _split_path(rest: str) -> tuple[str, str, str]:
    """Cut before the first character that ends an authority (RFC 3986, §3.2)."""
    cut = re.search(r"[/?#\\]", rest)
    if cut is None:
        return rest, "", ""
    return rest[: cut.start()], cut[0], rest[cut.end() :]


def _host_and_port(authority: str) -> tuple[str, int | None]:
    if authority.startswith("["):
        inner, closed, port = authority[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            raise ConfigError("has a broken IPv6 address")
        if ":" not in inner:
            raise ConfigError("has a host in brackets that is not an IPv6 address")
        return valid_host(inner), _port(port[1:]) if port else None
    host, colon, port = authority.partition(":")
    if ":" in port:
        raise ConfigError("has an IPv6 address without brackets, or two ports")
    if not host:
        raise ConfigError("has no host")
    return valid_host(host), _port(port) if colon else None


def _port(text: str) -> int:
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= 65_535:
        raise ConfigError("has a port that is not from 1 to 65535")
    return int(text)


def _error(text: str, reason: str) -> ConfigError:
    return ConfigError(f"is {_shown(text)!r}: it {reason}")


def _shown(text: str) -> str:
    """Return an address without what may be secret in it: credentials, path, query."""
    scheme, slashes, rest = text.partition("://") if "://" in text else ("", "", text)
    before, at, last = rest.rpartition("@")
    authority, cut, _ = _split_path(last)
    return f"{scheme}{slashes}{'***' if before else ''}{at}{authority}{cut and '/…'}"


class Fault(Enum):
    """How an exchange with an engine failed."""

    CONNECT = "connect"  # Refused, or its certificate is another's: the engine is not there.
    UNREACHABLE = "unreachable"  # No route, no such name, or no TLS.
    CONNECT_TIMEOUT = "connect_timeout"
    RESET = "reset"  # Closed before a complete answer.
    TIMEOUT = "timeout"  # Connected, then silent for too long.
    SERVER_ERROR = "server_error"  # An answer of 5xx.
    PROTOCOL = "protocol"  # An answer that is not HTTP, or not what was asked for.
    # Ours: no file descriptor, memory or port left, or no resolver. Says nothing of the engine.
    LOCAL = "local"


# The system's errors that mean a want of this process. A proxy that blamed the engines for them
# would quarantine all of them at once.
_LOCAL_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
_FAULTS = {
    WireFault.CONNECT: Fault.UNREACHABLE,
    WireFault.NO_ADDRESS: Fault.LOCAL,
    WireFault.CONNECT_TIMEOUT: Fault.CONNECT_TIMEOUT,
    WireFault.RESET: Fault.RESET,
    WireFault.STALE: Fault.RESET,
    WireFault.PROTOCOL: Fault.PROTOCOL,
    WireFault.TOO_LARGE: Fault.PROTOCOL,
    WireFault.TIMEOUT: Fault.TIMEOUT,
    WireFault.TOO_LATE: Fault.LOCAL,
}


def fault_of(error: WireError) -> Fault:
    """Return what a broken exchange says of its engine."""
    if error.kind is WireFault.CONNECT and is_refused(error):
        return Fault.CONNECT
    if is_local(error):
        return Fault.LOCAL
    return _FAULTS[error.kind]


def is_local(error: BaseException) -> bool:
    """Return whether an error comes, through any chain of causes, from a want of this process."""
    return any(isinstance(one, OSError) and one.errno in _LOCAL_ERRORS for one in _causes(error))


def is_refused(error: BaseException) -> bool:
    """Return whether an error comes, through any chain of causes, from a refusal of either side."""
    refusals = ConnectionRefusedError, SSLCertVerificationError
    return any(isinstance(one, refusals) for one in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and whatever it comes from."""
    seen: set[int] = set()
    open_ends: list[BaseException | None] = [error]
    while open_ends:
        cause = open_ends.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        open_ends += [cause.__cause__, cause.__context__]
        if isinstance(cause, BaseExceptionGroup):
            open_ends += cause.exceptions


class FetchError(BalanceRouteError):
    """A request to an engine that got no usable answer."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(f"{fault.value}: {message}")
        self.fault = fault


# The client for the small exchanges with engines: health probes, scrapes, discovery.
#
# Engines are addressed as configured and nowhere else: no redirects, no proxies or credentials
# from the environment, no cookies kept. Answers are bounded in size and never decompressed.
# Connections are the fetcher's own: what a request does to its connection says nothing of the
# engine.

# A health page says nothing beyond its status.
_HEALTH_BYTES = 65_536
_HEADERS: Headers = [
    (b"user-agent", f"balanceroute/{__version__}".encode()),
    (b"accept", b"*/*"),
    # A compressed page could be a thousand times its size.
    (b"accept-encoding", b"identity"),
]
_JSON: Headers = [(b"content-type", b"application/json")]


class Fetcher:
    """Gets small pages of engines, and gives them orders.

    Args:
        connect: Makes the connections to an engine, which it also limits in time.
        timeout_s: Until a page is complete, connecting included. If it is longer than `connect`'s own
            limit, an error says which of the two took too long.
        room: Bounds the bytes of all pages that are being read.
    """

    def __init__(
        self,
        connect: Callable[[EngineUrl], Endpoint],
        *,
        timeout_s: float,
        key: bytes | None,
        room: ResponseRoom,
    ) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._room = room
        self._endpoints: dict[EngineUrl, Endpoint] = {}
        self.use_key(key)

    def use_key(self, key: bytes | None) -> None:
        self._headers = (
            _HEADERS if key is None else [*_HEADERS, (b"authorization", b"Bearer " + key)]
        )

    async def status(self, url: str) -> int:
        """GET a page and return its status, whatever that is. Raises FetchError: no answer came."""
        return (await self._get(url, _HEALTH_BYTES, cut=True)).status

    async def body(self, url: str, *, max_bytes: int) -> bytes:
        """GET a page and return its body as it came.

        Raises:
            FetchError: No answer came, its status is not 200, or it is longer than `max_bytes`.
        """
        response = await self._get(url, max_bytes)
        if response.status != 200:
            fault = Fault.SERVER_ERROR if response.status >= 500 else Fault.PROTOCOL
            raise FetchError(fault, f"status {response.status}")
        return response.body

    async def order(
        self, url: str, body: bytes, *, max_bytes: int, timeout_s: float | None = None
    ) -> Response:
        """POST a JSON object and return the answer, whatever its status, cut at `max_bytes`.

        It may take `timeout_s`; None for as long as any page.

        Raises:
            FetchError: No answer came.
        """
        return await self._exchange(b"POST", url, max_bytes, body, cut=True, timeout_s=timeout_s)

    def forget(self, url: str) -> None:
        """Close the connections to an engine that is there no more."""
        endpoint = self._endpoints.pop(_address(url), None)
        if endpoint is not None:
            endpoint.close()

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()

    async def _get(self, url: str, max_bytes: int, *, cut: bool = False) -> Response:
        return await self._exchange(b"GET", url, max_bytes, b"", cut=cut)

    async def _exchange(
        self,
        method: bytes,
        url: str,
        max_bytes: int,
        body: bytes,
        *,
        cut: bool,
        timeout_s: float | None = None,
    ) -> Response:
        parts, address = urlsplit(url), _address(url)
        if address not in self._endpoints:
            self._endpoints[address] = self._connect(address)
        try:
            return await fetch(
                self._endpoints[address],
                method,
                (f"{parts.path}?{parts.query}" if parts.query else parts.path).encode(),
                [*self._headers, *_JSON] if body else self._headers,
                body,
                timeout_s=self._timeout_s if timeout_s is None else timeout_s,
                max_bytes=max_bytes,
                cut=cut,
                room=self._room,
            )
        except WireError as error:
            raise FetchError(fault_of(error), str(error)) from error


def _address(url: str) -> EngineUrl:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return EngineUrl(parts.scheme, parts.hostname, parts.port)
