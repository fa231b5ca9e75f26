"""Engines as training frameworks list, add and remove them at a router: `/workers` of the admin listener.

    GET    /workers       all: {"workers": [..], "total"}
    POST   /workers       add one: {"url", "worker_type": "prefill" or "decode", "ranks"?, "bootstrap_port"?}
    GET    /workers/ID    one
    DELETE /workers/ID    nothing new goes there; it is forgotten when nothing is in flight there any more

The paths and members are those of sgl-model-gateway, and 202 is its answer to an order. A name is made of
an engine's role and address, so that it stays over restarts.
"""

import asyncio
from collections.abc import Callable, Mapping
from hashlib import sha256
from math import inf
from typing import Any, Protocol

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.errors import ConflictError, UnknownInstanceError
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role, Status
from balanceroute.proxy.wire.addresses import bracketed

PATH = b"/workers"
# What this router finds out by itself, or does not need, may be told.
MORE_OF_A_WORKER = frozenset(
    {"ranks", "bootstrap_port", "cost", "labels", "model_id", "priority", "runtime"}
)
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_ID_DIGITS = 16
_STEP_S = 0.25


class Engines(Protocol):
    """Who adds and removes engines; see `Roster`."""

    async def add(self, role: Role, url: str, *, ranks: int | None, bootstrap: str | None) -> None:
        """Add an instance, or take a draining one back."""
        ...

    def drain(self, role: Role, url: str) -> None:
        """Send nothing new to an instance."""
        ...

    def move_away(self, role: Role, url: str) -> None:
        """Have requests on an instance that is drained go on elsewhere, as far as they can."""
        ...

    def remove(self, role: Role, url: str, *, force: bool) -> None:
        """Forget an instance."""
        ...


class Rows:
    """The rows of all instances, made once for all that wait for some of them.

    Args:
        make: Returns a row for each instance; see `instance_rows`.
    """

    def __init__(self, make: Callable[[], list[dict[str, object]]]) -> None:
        self._make = make
        self._rows: list[dict[str, object]] = []
        self._made_s = -inf

    def after(self, looked_s: float | None) -> list[dict[str, object]]:
        """Return rows that were made after a time of the loop's clock; None for now."""
        if looked_s is None or self._made_s <= looked_s:
            self._rows, self._made_s = self._make(), asyncio.get_running_loop().time()
        return self._rows


class Workers:
    """Lists, adds and removes engines.

    Args:
        engines: Takes the orders.
        rows: Of all instances.
    """

    def __init__(self, engines: Engines, rows: Rows) -> None:
        self._engines = engines
        self._rows = rows

    def all(self) -> dict[str, object]:
        """Return every worker."""
        found = list(map(_worker, self._rows.after(None)))
        return {"workers": found, "total": len(found)}

    def one(self, path: bytes) -> dict[str, object]:
        """Return the worker of a path. Raises UnknownInstanceError."""
        return _worker(self._row(path))

    async def add(self, order: Mapping[str, Any]) -> dict[str, object]:
        """Add an engine.

        Raises:
            ConfigError: A member is wrong, or the engine cannot be added.
            ConflictError: It is there already.
        """
        url, kind, ranks = order.get("url"), order.get("worker_type"), order.get("ranks")
        if not isinstance(url, str):
            raise ConfigError("url must be a text")
        role = _ROLES.get(kind) if isinstance(kind, str) else None
        if role is None:
            raise ConfigError(f"worker_type is {kind!r}, must be prefill or decode")
        if ranks is not None and (type(ranks) is not int or ranks < 1):
            raise ConfigError("ranks must be a positive integer")
        address = EngineUrl.parse(url)
        bootstrap = _bootstrap(address, order.get("bootstrap_port"))
        await self._engines.add(role, url, ranks=ranks, bootstrap=bootstrap)
        return _accepted(role.value, address.base)

    def begin_removal(self, path: bytes) -> tuple[dict[str, object], Role, str]:
        """Drain the engine of a path; return the answer, and what `end_removal` needs.

        Raises:
            UnknownInstanceError: There is none.
        """
        row = self._row(path)
        role, url = Role(row["role"]), str(row["url"])
        self._engines.drain(role, url)
        self._engines.move_away(role, url)
        return _accepted(role.value, url), role, url

    async def end_removal(self, role: Role, url: str) -> None:
        """Forget an engine as soon as nothing is in flight on it, unless it was taken back."""
        looked_s: float | None = None
        while True:
            all_rows = self._rows.after(looked_s)
            looked_s = asyncio.get_running_loop().time()
            rows = [row for row in all_rows if (row["role"], row["url"]) == (role.value, url)]
            if not rows or rows[0]["status"] != Status.DRAINING.value:
                return
            try:
                self._engines.remove(role, url, force=False)
            except ConflictError:
                await asyncio.sleep(_STEP_S)
            except UnknownInstanceError:
                return

    def _row(self, path: bytes) -> dict[str, object]:
        worker_id = path[len(PATH) + 1 :].decode("latin-1")
        for row in self._rows.after(None):
            if _id(row["role"], row["url"]) == worker_id:
                return row
        raise UnknownInstanceError(f"there is no worker {worker_id}")


def _bootstrap(address: EngineUrl, port: object) -> str | None:
    if port is None:
        return None
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ConfigError("bootstrap_port must be from 1 to 65535")
    return f"http://{bracketed(address.host)}:{port}"


def _id(role: object, url: object) -> str:
    return sha256(f"{role} {url}".encode()).hexdigest()[:_ID_DIGITS]


def _accepted(role: str, url: str) -> dict[str, object]:
    name = _id(role, url)
    return {"status": "accepted", "worker_id": name, "url": url, "location": f"/workers/{name}"}


def _worker(row: Mapping[str, object]) -> dict[str, object]:
    return {
        "id": _id(row["role"], row["url"]),
        "url": row["url"],
        "worker_type": row["role"],
        "is_healthy": row["status"] == Status.UP.value,
        "status": row["status"],
        "load": row["in_flight"],
    }
