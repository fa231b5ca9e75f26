"""The client for the small exchanges with engines: health probes, scrapes, discovery.

Engines are addressed as configured and nowhere else: no redirects, no proxies or credentials from
the environment, no cookies kept. Answers are bounded in size and never decompressed. Connections are
the fetcher's own: what a request does to its connection says nothing of the engine.
"""

from collections.abc import Callable
from urllib.parse import urlsplit

from balanceroute import __version__
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.faults import Fault, FetchError, fault_of
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.fetch import fetch
from balanceroute.proxy.wire.messages import Headers, Response, WireError

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
            limit, an error tells which of the two took too long.
        key: Sent with every request; None for no key.
    """

    def __init__(
        self, connect: Callable[[EngineUrl], Endpoint], *, timeout_s: float, key: bytes | None
    ) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._endpoints: dict[EngineUrl, Endpoint] = {}
        self.use_key(key)

    def use_key(self, key: bytes | None) -> None:
        """Send this key from the next request on."""
        self._headers = (
            _HEADERS if key is None else [*_HEADERS, (b"authorization", b"Bearer " + key)]
        )

    async def status(self, url: str) -> int:
        """GET a page and return its status, whatever that is.

        Raises:
            FetchError: No answer came.
        """
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

    async def order(self, url: str, *, timeout_s: float | None = None) -> int:
        """POST an empty JSON object and return the answer's status, whatever that is.

        It may take `timeout_s`; None for as long as any page.

        Raises:
            FetchError: No answer came.
        """
        answer = await self._exchange(
            b"POST", url, _HEALTH_BYTES, b"{}", cut=True, timeout_s=timeout_s
        )
        return answer.status

    def forget(self, url: str) -> None:
        """Close the connections to an engine that is there no more."""
        endpoint = self._endpoints.pop(_address(url), None)
        if endpoint is not None:
            endpoint.close()

    def close(self) -> None:
        """Close every connection."""
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
            )
        except WireError as error:
            raise FetchError(fault_of(error), str(error)) from error


def _address(url: str) -> EngineUrl:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return EngineUrl(parts.scheme, parts.hostname, parts.port)
