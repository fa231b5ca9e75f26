"""The pages of the admin listener about groups, where there are several."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Protocol

from balanceroute.proxy.live.control.answers import Reply, answering, begin, send_json
from balanceroute.proxy.live.control.orders import Refusal, read_order, text_of
from balanceroute.proxy.wire.messages import Request

_KEYS = frozenset({"model", "connector", "prefill", "decode", "proxy"})
_log = logging.getLogger(__name__)


class GroupOrders(Protocol):
    """Who adds and removes groups; raises as `admin.Control` does."""

    def rows(self) -> list[dict[str, object]]:
        """Return each group."""
        ...

    async def add(self, table: Mapping[str, object]) -> None:
        """Add a group, given what its `[[model]]` table would have."""
        ...

    def drain(self, group: str) -> None:
        """Send nothing new to any engine of a group."""
        ...

    async def remove(self, group: str, *, force: bool) -> None:
        """Forget a group; `force` ends what is in flight there."""
        ...


class GroupPages:
    """Serves them.

    Args:
        groups: Takes the orders.
        tasks: Those that carry out orders.

    Attributes:
        routes: By path and method.
    """

    def __init__(self, groups: GroupOrders, tasks: set[asyncio.Task[None]]) -> None:
        self._groups = groups
        self._tasks = tasks
        self._busy = False
        self.routes: dict[bytes, dict[bytes, Callable[[Request, Reply], None]]] = {
            b"/admin/groups": {b"GET": self._rows, b"POST": self._add},
            b"/admin/groups/drain": {b"POST": self._drain},
            b"/admin/groups/remove": {b"POST": self._remove},
        }

    def _rows(self, _request: Request, reply: Reply) -> None:
        send_json(reply, 200, {"groups": self._groups.rows()})

    def _add(self, request: Request, reply: Reply) -> None:
        order = read_order(request, required={"name"}, optional=_KEYS)
        self._carry_out(request, reply, order, lambda: self._groups.add(order), "added")

    def _drain(self, request: Request, reply: Reply) -> None:
        order = read_order(request, required={"group"})
        self._groups.drain(text_of(order, "group"))
        _note(request, order, "drains")
        self._rows(request, reply)

    def _remove(self, request: Request, reply: Reply) -> None:
        order = read_order(request, required={"group"}, optional={"force"})
        group, force = text_of(order, "group"), order.get("force", False)
        if not isinstance(force, bool):
            raise Refusal(400, "force must be true or false", param="force")
        self._carry_out(
            request, reply, order, lambda: self._groups.remove(group, force=force), "removed"
        )

    def _carry_out(
        self,
        request: Request,
        reply: Reply,
        order: dict[str, object],
        do: Callable[[], Coroutine[None, None, None]],
        word: str,
    ) -> None:
        """Carry out one order at a time: two that begin together might add the same."""
        if self._busy:
            raise Refusal(429, "another order about groups is being carried out")
        self._busy = True

        async def carry_out() -> None:
            with answering(reply):
                try:
                    await do()
                finally:
                    self._busy = False
                _note(request, order, word)
                self._rows(request, reply)

        begin(self._tasks, carry_out())


def _note(request: Request, order: dict[str, object], word: str) -> None:
    fields = {"peer": request.peer, "order": json.dumps(order)}
    _log.info("admin: %s a group", word, extra={"fields": fields})
