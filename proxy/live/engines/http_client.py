"""The client for the small exchanges with engines: health probes, scrapes, discovery.

Engines are addressed as configured and nowhere else: no redirects, no proxies or credentials from
the environment, no cookies kept. Answers are bounded in size and never decompressed. Token streams
do not pass here; `proxy/wire` carries them.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from balanceroute import __version__
from balanceroute.proxy.live.engines.faults import (
    Fault,
    FetchError,
    is_local,
    is_refused,
    is_unresolved,
)

# httpx sweeps its idle connections at each request, in quadratic time: 4 ms for 256 of them.
_MAX_IDLE_CONNECTIONS = 32
# uvicorn closes idle connections after 5 s; one that is about to close is not used again.
_KEEP_ALIVE_S = 4.0
# A health page says nothing beyond its status.
_HEALTH_BYTES = 65_536


def make_http_client(
    context: ssl.SSLContext,
    *,
    timeout_s: float,
    max_connections: int = 256,
    headers: dict[str, str] | None = None,
) -> httpx.AsyncClient:
    """Return a client; close it with `aclose`.

    Args:
        context: For https engines.
        timeout_s: Limit for each of connect, read, write and the wait for a connection.
        max_connections: Exchanges at a time; more wait.
        headers: Sent with every request, such as the engines' API key.
    """
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        verify=context,
        timeout=httpx.Timeout(timeout_s),
        limits=httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=_MAX_IDLE_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_S,
        ),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        headers={
            "user-agent": f"balanceroute/{__version__}",
            # A compressed page could be a thousand times its size.
            "accept-encoding": "identity",
            **(headers or {}),
        },
    )


async def fetch_status(client: httpx.AsyncClient, url: str) -> int:
    """GET a page and return its status, whatever that is.

    Raises:
        FetchError: No answer came.
    """
    with _faults():
        async with client.stream("GET", url) as response:
            # Read to its end, so that the connection can be used again.
            received = 0
            async for piece in response.aiter_raw():
                received += len(piece)
                if received > _HEALTH_BYTES:
                    break
            return response.status_code


async def fetch_body(client: httpx.AsyncClient, url: str, *, max_bytes: int) -> bytes:
    """GET a page and return its body as it came.

    Raises:
        FetchError: No answer came, its status is not 200, or it is longer than `max_bytes`.
    """
    with _faults():
        async with client.stream("GET", url) as response:
            status = response.status_code
            if status != 200:
                fault = Fault.SERVER_ERROR if status >= 500 else Fault.PROTOCOL
                raise FetchError(fault, f"status {status}")
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > max_bytes:
                    raise FetchError(Fault.PROTOCOL, f"more than {max_bytes} bytes")
            return bytes(body)


@contextmanager
def _faults() -> Iterator[None]:
    """Map httpx's errors to ours."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise FetchError(Fault.CONNECT_TIMEOUT, str(error)) from error
    except httpx.PoolTimeout as error:
        raise FetchError(Fault.LOCAL, "too many exchanges at a time") from error
    except httpx.TimeoutException as error:
        raise FetchError(Fault.TIMEOUT, str(error)) from error
    except httpx.NetworkError as error:
        if is_local(error) or is_unresolved(error):
            fault = Fault.LOCAL
        elif isinstance(error, httpx.ConnectError):
            fault = Fault.CONNECT if is_refused(error) else Fault.UNREACHABLE
        else:
            fault = Fault.RESET
        raise FetchError(fault, str(error)) from error
    except httpx.HTTPError as error:
        raise FetchError(Fault.PROTOCOL, str(error)) from error
