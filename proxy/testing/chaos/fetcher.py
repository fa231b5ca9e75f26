"""The proxy's small exchanges over `proxy/wire`, which runs in virtual time where httpx does not."""

from urllib.parse import urlsplit

from balanceroute.proxy.live.engines.faults import Fault, FetchError, fault_of
from balanceroute.proxy.wire.client import Endpoint
from balanceroute.proxy.wire.fetch import fetch
from balanceroute.proxy.wire.messages import Response, WireError

_HEALTH_BYTES = 65_536


class WireFetcher:
    """Gets pages of engines; see `balanceroute.proxy.live.proxy.Fetcher`.

    Args:
        timeout_s: Until a page is complete.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._endpoints: dict[tuple[str, int], Endpoint] = {}

    async def status(self, url: str) -> int:
        """GET a page; return its status.

        Raises:
            FetchError: No answer came.
        """
        return (await self._get(url, _HEALTH_BYTES)).status

    async def body(self, url: str, *, max_bytes: int) -> bytes:
        """GET a page; return its body.

        Raises:
            FetchError: No answer came, or its status is not 200.
        """
        response = await self._get(url, max_bytes)
        if response.status != 200:
            fault = Fault.SERVER_ERROR if response.status >= 500 else Fault.PROTOCOL
            raise FetchError(fault, f"status {response.status}")
        return response.body

    def close(self) -> None:
        """Close every connection."""
        for endpoint in self._endpoints.values():
            endpoint.close()

    async def _get(self, url: str, max_bytes: int) -> Response:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        address = parts.hostname, parts.port
        if address not in self._endpoints:
            self._endpoints[address] = Endpoint(*address)
        try:
            return await fetch(
                self._endpoints[address],
                b"GET",
                parts.path.encode(),
                [],
                b"",
                timeout_s=self._timeout_s,
                max_bytes=max_bytes,
            )
        except WireError as error:
            raise FetchError(fault_of(error), str(error)) from error
