"""Many clients that work a plan's visits off."""

import asyncio
from dataclasses import replace

from balanceroute.proxy.testing.chaos.clients import Client
from balanceroute.proxy.testing.chaos.plan import Plan

# Longer than all of the proxy's time limits and retries together.
_HUNG_S = 45.0
# A client waits so long when it is told to come later: else an outage would use all requests up.
_LATER_S = 0.3


class Load:
    """One plan's visits, one after the other, whenever a client is free.

    Attributes:
        lost: Requests that had no end in time, or no connection.
        done: How many requests were sent and have ended.
    """

    def __init__(self, plan: Plan, host: str, port: int) -> None:
        self.plan = plan
        self.clients: list[Client] = []
        self.lost: list[str] = []
        self.done = 0
        self._host = host
        self._port = port
        self._visits = list(reversed(plan.visits))
        self._waiting: list[tuple[float, asyncio.Event]] = []

    async def run(self, clients: int) -> None:
        """Send everything, from so many clients at a time; all their connections are closed then."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._work())

    async def reached(self, plan_s: float) -> None:
        """Wait until the plan's time is `plan_s`, or everything was sent."""
        if self._now_s < min(plan_s, self.plan.calm_s):
            event = asyncio.Event()
            self._waiting.append((plan_s, event))
            await event.wait()

    @property
    def _now_s(self) -> float:
        return self.plan.calm_s * self.done / len(self.plan.requests)

    async def _work(self) -> None:
        while self._visits:
            visit = self._visits.pop()
            client = Client(visit, on_left=lambda _: None)
            self.clients.append(client)
            try:
                async with asyncio.timeout(_HUNG_S):
                    await client.run(self._host, self._port)
            except TimeoutError:
                self.lost += [request.request_id for request in visit.requests]
            if not client.sent:
                self.lost.append(visit.requests[0].request_id)
            ended = max(1, client.sent)
            if rest := visit.requests[ended:]:
                # The proxy closed the connection behind an answer.
                self._visits.append(replace(visit, requests=rest))
            self._advance(ended)
            if client.answers[0].status in (429, 503):
                await asyncio.sleep(_LATER_S)

    def _advance(self, count: int) -> None:
        self.done += count
        now_s = self._now_s
        for plan_s, event in self._waiting:
            if plan_s <= now_s or self.done == len(self.plan.requests):
                event.set()
