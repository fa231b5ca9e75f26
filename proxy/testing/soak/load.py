"""Many clients that work a list of requests off."""

import asyncio
from collections.abc import Sequence

from balanceroute.proxy.testing.soak.client import Connection
from balanceroute.proxy.testing.soak.plans import Plan
from balanceroute.proxy.testing.soak.verdict import Verdict, judge


class Load:
    """One list of requests.

    Args:
        host: The proxy's address.
        port: Its port.
        plans: What to send.

    Attributes:
        verdicts: By the request's name.
        started: Requests sent so far.
    """

    def __init__(self, host: str, port: int, plans: Sequence[Plan]) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self.started = 0
        self._host = host
        self._port = port
        self._plans = plans
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    async def run(self, clients: int) -> None:
        """Send everything, from so many clients at a time; all their connections are closed then."""
        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, len(self._plans))):
                group.create_task(self._client())

    async def reached(self, share: float) -> None:
        """Wait until this share of the requests was sent."""
        mark = share * len(self._plans)
        if self.started < mark:
            sent = asyncio.get_running_loop().create_future()
            self._waiting.append((mark, sent))
            await sent

    def _next(self) -> Plan | None:
        if self.started == len(self._plans):
            return None
        plan = self._plans[self.started]
        self.started += 1
        for mark, sent in self._waiting:
            if mark <= self.started and not sent.done():
                sent.set_result(None)
        return plan

    async def _client(self) -> None:
        connection: Connection | None = None
        loop = asyncio.get_running_loop()
        while (plan := self._next()) is not None:
            if connection is not None and (plan.fresh or connection.closed):
                connection.close()
                connection = None
            if connection is None:
                _, connection = await loop.create_connection(Connection, self._host, self._port)
            self.verdicts[plan.name] = judge(plan, await connection.perform(plan))
        if connection is not None:
            connection.close()
