"""Whether the scheduler process's ledger has the streams that the relays have, and nothing else.

Messages take their time, so the two may differ for a moment. What differs for longer is a violation:
above all a stream that a new scheduler process did not take over.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balanceroute.proxy.core.lifecycle import State
from balanceroute.proxy.live.request.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balanceroute.proxy.core.lifecycle import Request
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.testing.chaos.split_world import SplitWorld

_LOOK_S = 0.1
# A new scheduler process waits for its relays, and three messages pass until it knows a stream.
_MAY_BE_UNKNOWN_S = 1.5
# One message passes at most until it hears of a change.
_MAY_DIFFER_S = 0.5
# So many looks old may be what it knows of a stream's tokens: they are told, travel, and are looked at.
_LATE_LOOKS = 8
# Tokens of each sequence that the step clock may be off.
_TOLERANCE = 5


@dataclass(slots=True)
class _Followed:
    """A stream.

    Attributes:
        tokens: At the latest looks, the present one last.
        began_under: The scheduler process at the first.
        wrong_since_s: Since when it differs; infinite once that was reported.
    """

    tokens: deque[int]
    began_under: object
    wrong_since_s: float | None = None


class LedgerWatch:
    """Looks again and again while it runs.

    Attributes:
        taken_over: How often a stream was found in the ledger of a scheduler process that was not there
            when it began.
        found: What differed for too long.
    """

    def __init__(self, world: "SplitWorld") -> None:
        self.taken_over = 0
        self.found: list[str] = []
        self._world = world
        self._followed: dict[Session, _Followed] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def _look(self) -> None:
        world, before = self._world, self._followed
        quiet = not world.is_whole or world.plane.deployment.driver.draining
        # A proxy that stands still is told nothing.
        quiet |= world.loop.time() < world.loop.held_until_s + _MAY_DIFFER_S
        self._followed = {}
        for place, session in self._streams():
            followed = before.get(session) or _Followed(deque(maxlen=_LATE_LOOKS), world.app)
            self._followed[session] = followed
            followed.tokens.append(session.emitted_tokens)
            if quiet:
                followed.wrong_since_s = None
            else:
                self._compare(place, session, followed)

    def _streams(self) -> "Iterator[tuple[int, Session]]":
        for place, relay in enumerate(self._world.relays):
            for session in relay.host.sessions.values():
                if session.phase is Phase.STREAMING and session.decodes:
                    yield place, session

    def _compare(self, place: int, session: "Session", followed: _Followed) -> None:
        request = self._request(place, session)
        if request is None:
            wrong, may_last_s = "the scheduler process does not know it", _MAY_BE_UNKNOWN_S
        else:
            wrong, may_last_s = self._difference(request, session, followed.tokens), _MAY_DIFFER_S
        now_s = self._world.loop.time()
        if not wrong:
            followed.wrong_since_s = None
            if followed.began_under is not self._world.app:
                followed.began_under = self._world.app
                self.taken_over += 1
        elif followed.wrong_since_s is None:
            followed.wrong_since_s = now_s
        elif now_s - followed.wrong_since_s > may_last_s:
            self.found.append(f"ledger: {session.record.request_id} is streamed, and {wrong}")
            followed.wrong_since_s = float("inf")

    def _request(self, place: int, session: "Session") -> "Request | None":
        desk = self._world.app.hub.desks.get(place)
        mine = None if desk is None else desk.requests.get(session.number)
        return None if mine is None else self._world.scheduler.requests.get(mine.number)

    def _difference(self, request: "Request", session: "Session", tokens: deque[int]) -> str:
        """Return how the ledger differs from a stream; empty if it does not."""
        if request.state is not State.DECODING or request.rank is None or not request.started:
            return f"{request.state.name} for the scheduler process"
        rank = self._world.plane.deployment.instances.ranks[request.rank].name
        if rank != session.record.rank:
            return f"bound to {rank}, not to {session.record.rank}"
        within = _TOLERANCE * session.shape.sequences
        counted = self._world.scheduler.emitted(request.request) + session.emitted.tokens
        least = tokens[0] if len(tokens) == _LATE_LOOKS else session.emitted.tokens
        if least - within <= counted <= tokens[-1] + within:
            return ""
        return f"has {least} to {tokens[-1]} tokens, and {counted} in the ledger"
