"""All live requests, and the names under which engines know them."""

import asyncio
import random
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import RequestId

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.telemetry.record import RequestRecord


class SessionTable:
    """Adds requests and forgets them; `live` has them in order of arrival."""

    def __init__(self, rng: random.Random) -> None:
        self.live: dict[RequestId, Session] = {}
        self._rng = rng
        self._arrived = 0
        self._ids: dict[str, int] = {}  # Client request ids in use, and by how many.
        self._waiting: set[RequestId] = set()  # Those that no engine was given yet.
        self._empty = asyncio.Event()
        self._empty.set()

    def next_number(self) -> RequestId:
        """Return the number of a request that arrives."""
        number = RequestId(self._arrived)
        self._arrived += 1
        return number

    def add(self, session: "Session") -> None:
        """Take in a request."""
        self.live[session.number] = session
        self._waiting.add(session.number)
        request_id = session.record.request_id
        self._ids[request_id] = self._ids.get(request_id, 0) + 1
        self._empty.clear()

    def begin(self, number: RequestId) -> bool:
        """Note that an engine is given a request; return whether that is the first time."""
        waited = number in self._waiting
        self._waiting.discard(number)
        return waited

    def remove(self, number: RequestId, record: "RequestRecord") -> bool:
        """Forget a request that is over; return whether an engine was given it."""
        del self.live[number]
        others = self._ids.pop(record.request_id) - 1
        if others:
            self._ids[record.request_id] = others
        if not self.live:
            self._empty.set()
        return not self.begin(number)

    def engine_id(self, request_id: str) -> str:
        """Return what a request is called at the engines: its id, unless that is in use.

        Two requests of one name would be one to some engines.
        """
        if request_id in self._ids:
            return f"{request_id}-{self._rng.getrandbits(32):08x}"
        return request_id

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request, past or present."""
        return not (self.live or self._ids or self._waiting)

    async def drained(self) -> None:
        """Wait until no request is left."""
        await self._empty.wait()
