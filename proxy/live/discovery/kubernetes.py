"""Engines in EndpointSlices: listed, then watched, at the API server of Kubernetes.

A watch ends after some minutes, and goes on from the last version that was told. When the server no
longer knows that version (410 Gone), everything is listed again. What was told last holds meanwhile.
"""

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from balanceroute import __version__
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.discovery.endpoint_slices import ExpiredError, Slices, WatchError
from balanceroute.proxy.live.discovery.line_stream import LineStream
from balanceroute.proxy.wire.http1.fetch import fetch
from balanceroute.proxy.wire.messages import Headers, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balanceroute.proxy.live.discovery.found import View
    from balanceroute.proxy.live.engines.instances import Role
    from balanceroute.proxy.wire.http1.client import Endpoint

_log = logging.getLogger(__name__)
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAGE_ITEMS = 500
_PAGE_BYTES = 32 << 20
_LIST_S = 30.0
_WATCH_S = (240, 300)
# Beyond that a watch has stopped without a word.
_OVERDUE_S = 30.0
_SHORT_S = 1.0
_BACKOFF_S = (0.5, 30.0)
_GONE = 410


class KubernetesSlices:
    """The EndpointSlices that a selector names.

    Args:
        selector: Of labels.
        namespace: None for the one of the account.
        role: What the engines do; None for what the slices' label says.
        connect: Makes the connections to the API server. Raises ConfigError.
        account: The folder of the service account.
        rng: Spreads the watches and the tries after an error.
    """

    def __init__(
        self,
        selector: str,
        namespace: str | None,
        role: "Role | None",
        *,
        connect: "Callable[[], Endpoint]",
        account: Path,
        rng: random.Random,
    ) -> None:
        self._selector, self._namespace = selector, namespace
        self._slices = Slices(role)
        self._connect, self._account, self._rng = connect, account, rng
        self._endpoint: Endpoint | None = None
        self._backoff_s = _BACKOFF_S[0]

    async def run(self, tell: "Callable[[View], None]") -> None:
        """List, then watch, and tell all engines after each change."""
        try:
            while True:
                try:
                    if not self._slices.version:
                        await self._list()
                        tell(self._slices.view())
                    if not await self._watch(tell):
                        await self._wait()  # A server that ends each watch at once.
                except ExpiredError as error:
                    _log.debug("listed again", extra={"fields": {"reason": str(error)}})
                    self._slices.version = ""
                    await self._wait()
                except (WireError, OSError, WatchError, ConfigError) as error:
                    fields = {"selector": self._selector, "reason": str(error)}
                    _log.warning("EndpointSlices cannot be watched", extra={"fields": fields})
                    if isinstance(error, WatchError):
                        self._slices.version = ""
                    await self._wait()
        finally:
            if self._endpoint is not None:
                self._endpoint.close()

    async def _wait(self) -> None:
        await asyncio.sleep(self._backoff_s * self._rng.uniform(0.5, 1.0))
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])

    async def _list(self) -> None:
        pages: list[Mapping[str, Any]] = []
        following = ""
        while True:
            more = {"continue": following} if following else {}
            response = await fetch(
                self._server(),
                b"GET",
                self._target(limit=_PAGE_ITEMS, **more),
                self._headers(),
                b"",
                timeout_s=_LIST_S,
                max_bytes=_PAGE_BYTES,
            )
            _check(response.status, response.body)
            try:
                page = json.loads(response.body)
                pages.append(page)
                following = page["metadata"].get("continue") or ""
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise WatchError(f"no list of EndpointSlices: {error!r}") from None
            if not following:
                break
        self._slices.replace(pages)

    async def _watch(self, tell: "Callable[[View], None]") -> bool:
        """Take changes until the server ends the watch; return whether it was one of some length."""
        clock = asyncio.get_running_loop().time
        began_s, limit_s = clock(), self._rng.randint(*_WATCH_S)
        target = self._target(
            watch=1,
            allowWatchBookmarks="true",
            resourceVersion=self._slices.version,
            timeoutSeconds=limit_s,
        )
        stream = LineStream()
        call = self._server().request(b"GET", target, self._headers(), b"", stream)
        changed = False
        try:
            async with asyncio.timeout(limit_s + _OVERDUE_S):
                while (line := await stream.next()) is not None:
                    _check(stream.status, line)
                    changed |= self._slices.apply(line)
                    # What has come together is one reading.
                    if changed and not stream.waiting:
                        changed = False
                        tell(self._slices.view())
                    self._backoff_s = _BACKOFF_S[0]
                _check(stream.status, b"")
        except TimeoutError:
            _log.debug("a watch of EndpointSlices ended without a word")
        finally:
            call.abort()
            if changed:  # A line behind it could not be used.
                tell(self._slices.view())
        if clock() - began_s < _SHORT_S:
            return False
        self._backoff_s = _BACKOFF_S[0]
        return True

    def _server(self) -> "Endpoint":
        if self._endpoint is None:
            self._endpoint = self._connect()
        return self._endpoint

    def _target(self, **query: object) -> bytes:
        namespace = self._namespace or self._read("namespace")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices"
        return f"{path}?{urlencode({'labelSelector': self._selector, **query})}".encode()

    def _headers(self) -> Headers:
        headers = [
            (b"user-agent", f"balanceroute/{__version__}".encode()),
            (b"accept", b"application/json"),
            (b"accept-encoding", b"identity"),
        ]
        # Read each time: tokens are replaced before they expire. A local proxy of kubectl needs none.
        if self._server().name.startswith("https://"):
            headers.append((b"authorization", f"Bearer {self._read('token')}".encode()))
        return headers

    def _read(self, name: str) -> str:
        return (self._account / name).read_text(encoding="utf-8").strip()


def _check(status: int, body: bytes) -> None:
    """Raise an error unless the answer is 200."""
    if status == 200:
        return
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = ""
    text = f"status {status}{message and ': '}{message}"
    raise ExpiredError(text) if status == _GONE else WatchError(text)
