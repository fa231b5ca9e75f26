"""Posts JSON to another server: from a decode rank to the metaserver."""

import asyncio
import logging
import ssl
from urllib.parse import urlsplit

from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.fetch import fetch
from balanceroute.proxy.wire.messages import WireError

_LOG = logging.getLogger(__name__)
_TRIES = 3  # As vllm-ascend's layerwise connector.
# The metaserver may answer only when the prefill is done.
_TIMEOUT_S = 3_600.0
_MAX_BYTES = 1 << 20
_PORTS = {"http": 80, "https": 443}


class HttpPoster:
    """Posts JSON over HTTP or HTTPS.

    Args:
        trust: Whom to trust over HTTPS; None for everybody.
    """

    def __init__(self, trust: ssl.SSLContext | None = None) -> None:
        self._trust = trust
        self._endpoints: dict[tuple[str, str, int], Endpoint] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, url: str, body: bytes) -> None:
        """Post `body`, with retries if there is no answer."""
        task = asyncio.get_running_loop().create_task(self._post(url, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel posts in progress and close the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for endpoint in self._endpoints.values():
            endpoint.close()

    async def _post(self, url: str, body: bytes) -> None:
        parts = urlsplit(url)
        try:
            address = parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            _LOG.warning("no metaserver at %r", url)
            return
        if address not in self._endpoints:
            secure = parts.scheme == "https"
            self._endpoints[address] = Endpoint(*address[1:], ssl=self._tls() if secure else None)
        target = (parts.path or "/").encode()
        headers = [(b"content-type", b"application/json")]
        for _ in range(_TRIES):
            try:
                await fetch(
                    self._endpoints[address],
                    b"POST",
                    target,
                    headers,
                    body,
                    timeout_s=_TIMEOUT_S,
                    max_bytes=_MAX_BYTES,
                )
            except WireError as error:
                _LOG.warning("the metaserver %s did not answer: %s", url, error)
            else:
                return

    def _tls(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = ssl.create_default_context()
            self._trust.check_hostname = False
            self._trust.verify_mode = ssl.CERT_NONE
        return self._trust
