"""The target of a replay: the URL of an OpenAI-compatible endpoint."""

import json
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.replay.faults import from_status
from balanceroute.proxy.wire.addresses import bracketed
from balanceroute.proxy.wire.caller import Caller
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.fetch import fetch
from balanceroute.proxy.wire.messages import Headers

_FETCH_TIMEOUT_S = 30.0
_FETCH_BYTES = 1 << 20


class TargetError(BalanceRouteError):
    """The target's answer is not the expected one; the message has its URL."""


@dataclass(frozen=True, slots=True)
class Target:
    """An HTTP server.

    Attributes:
        host: A name or an address, without brackets.
        tls: Whether to use TLS, verified with the system's authorities.
        prefix: Comes before every path, without the last slash.
    """

    url: str
    host: str
    port: int
    tls: bool
    prefix: str

    def connect(self, *, http3: bool = False) -> Caller:
        """Return what sends requests to it; needs a running loop.

        Args:
            http3: Over one connection of HTTP/3, which needs the extra `h3`; otherwise a pool of those
                of HTTP/1.1.
        """
        if http3:
            # Here, so that nothing of it is loaded without the flag: an extra.
            from balanceroute.proxy.wire.http3.client import Http3Endpoint  # noqa: PLC0415

            return Http3Endpoint(self.host, self.port)
        context = ssl.create_default_context() if self.tls else None
        host = bracketed(self.host)
        default = 443 if self.tls else 80
        header = host if self.port == default else f"{host}:{self.port}"
        return Endpoint(self.host, self.port, ssl=context, host_header=header.encode())

    def path(self, path: str) -> bytes:
        """Return the request target of a path of the API, such as `/v1/models`."""
        return f"{self.prefix}{path}".encode()


def parse_target(flag: str, url: str) -> Target:
    """Parse a URL; a final `/v1` is removed, since the paths of the API begin with it.

    Args:
        flag: The flag that has it, for the message.
        url: `http://host:port` or `https://host:port`, the port may be left out.

    Raises:
        ConfigError: Not such a URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag}: {url!r} is not a URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"{flag}: {url!r} is not of the form http://host:port")
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{flag}: {url!r} has more than scheme, host, port and path")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{flag}: {url!r} has characters that a URL cannot hold")
    tls = parts.scheme == "https"
    return Target(
        url=url,
        host=parts.hostname,
        port=port or (443 if tls else 80),
        tls=tls,
        prefix=parts.path.rstrip("/").removesuffix("/v1").rstrip("/"),
    )


async def call_json(
    endpoint: Caller,
    target: Target,
    method: str,
    path: str,
    headers: Headers,
    *,
    body: bytes = b"",
) -> object:
    """Return the JSON value that a path answers.

    Raises:
        TargetError: The answer is not 200 or not JSON.
        WireError: There is no answer.
    """
    response = await fetch(
        endpoint,
        method.encode(),
        target.path(path),
        headers,
        body,
        timeout_s=_FETCH_TIMEOUT_S,
        max_bytes=_FETCH_BYTES,
    )
    if response.status != 200:
        fault = from_status(response.status, response.body)
        raise TargetError(f"{method} {target.url}{path}: {fault.kind}: {fault.message}")
    try:
        value: object = json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise TargetError(f"{method} {target.url}{path}: the answer is not JSON") from error
    return value


async def first_model(endpoint: Caller, target: Target, headers: Headers) -> str:
    """Return the name of the first model that the target serves.

    Raises:
        TargetError: The target names no model.
        WireError: There is no answer.
    """
    answer = await call_json(endpoint, target, "GET", "/v1/models", headers)
    models = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(models, list) and models and isinstance(models[0], dict):
        name = models[0].get("id")
        if isinstance(name, str):
            return name
    raise TargetError(f"GET {target.url}/v1/models: no model in the answer: name one with --model")
