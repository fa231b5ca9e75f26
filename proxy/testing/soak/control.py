"""Small exchanges with a server's own pages."""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.fetch import fetch

_TIMEOUT_S = 10.0
_PAGE_BYTES = 1 << 24


class ControlError(BalanceRouteError):
    """A page that was refused."""


class Control:
    """The pages of one server. Their methods raise ControlError, and WireError if no answer came."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._endpoint = Endpoint(parts.hostname, parts.port)

    async def get(self, path: str) -> Any:
        """Return the JSON of a page."""
        return json.loads(await self.text(path))

    async def text(self, path: str) -> str:
        """Return a page."""
        return await self._exchange(b"GET", path, b"")

    async def post(self, path: str, values: Mapping[str, object]) -> None:
        """Give an order."""
        await self._exchange(b"POST", path, json.dumps(values, default=_plain).encode())

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    async def _exchange(self, method: bytes, path: str, body: bytes) -> str:
        response = await fetch(
            self._endpoint,
            method,
            path.encode(),
            [(b"content-type", b"application/json")],
            body,
            timeout_s=_TIMEOUT_S,
            max_bytes=_PAGE_BYTES,
        )
        if response.status != 200:
            raise ControlError(f"{self._endpoint.name}{path}: {response.status} {response.body!r}")
        return response.body.decode()


def _plain(value: object) -> object:
    assert isinstance(value, Enum)
    return value.value
