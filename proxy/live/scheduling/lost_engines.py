"""Requests leave an engine that does not answer any more, and KV caches that died with one.

An engine that refuses connections or is silent is quarantined. What it was sent, and has not begun to
answer, would wait there for its own time limit, of minutes: it goes elsewhere at once, as far as
attempts and the retry budget allow, so that a common fault of all engines makes no storm. KV caches
on it are lost, and so are those of an engine that restarted under the same address: what waits in
the pool with one is prefilled again, at the pace at which prefillers take prompts.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from balanceroute.proxy.core.steps import Sighting
from balanceroute.proxy.live.engines.instances import process_of
from balanceroute.proxy.live.request.decode_attempt import DecodeAttempt

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RankId, RequestId
    from balanceroute.proxy.live.engines.instances import Prefiller, Target
    from balanceroute.proxy.live.request.session import Session


def sessions_on(sessions: "Mapping[RequestId, Session]", target: "Target") -> "list[Session]":
    """Return the requests in flight on an instance, of all live ones."""
    return [session for session in sessions.values() if target in session.targets]


def in_flight(sessions: "Mapping[RequestId, Session]") -> "Counter[Target]":
    """Return how many requests are in flight on each instance that has some."""
    return Counter(target for session in sessions.values() for target in {*session.targets})


class LostEngines:
    """Tells the sessions of engines that are lost.

    Args:
        sessions: All live requests.
        call_soon: Calls back from the event loop, so that a session in the middle of a failure is
            notified after it.
    """

    def __init__(
        self,
        sessions: "Mapping[RequestId, Session]",
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._sessions = sessions
        self._call_soon = call_soon
        # To be told of soon: many engines may go at once.
        self._gone: set[Target] = set()
        self._lost_kv = False

    def gone(self, target: "Target") -> None:
        """Note that an engine does not answer."""
        if not self._gone:
            self._call_soon(self._leave)
        self._gone.add(target)

    def kv_lost(self, prefiller: "Prefiller") -> None:
        """Note that the KV caches which a prefiller has handed out so far are no more."""
        prefiller.lost_kv += 1
        if not self._lost_kv:
            self._lost_kv = True
            self._call_soon(self._drop_lost_kv)

    def engine_seen(self, prefiller: "Prefiller", engine_id: str) -> None:
        """Note an id of the engine behind a prefiller's address, which is new with each start."""
        engine = process_of(engine_id)
        if engine in prefiller.engines:
            return
        if prefiller.engines:
            self.kv_lost(prefiller)
        prefiller.engines.add(engine)

    def _leave(self) -> None:
        gone, self._gone = self._gone, set()
        left = [
            (session, target)
            for session in self._sessions.values()
            for target in dict.fromkeys(session.targets)
            if target in gone
        ]
        for session, target in left:
            session.engine_lost(target)

    def _drop_lost_kv(self) -> None:
        self._lost_kv = False
        for session in list(self._sessions.values()):
            session.drop_lost_kv()


# Looks at the streams: which ranks make tokens, and which do not.


class StreamLooks:
    """What is seen of the ranks; see `core.steps`.

    Args:
        sessions: All live requests.
        clock: The loop's time.
        late_s: Between two looks; after more than that this process may have stood still.
    """

    def __init__(
        self,
        sessions: "Mapping[RequestId, Session]",
        clock: Callable[[], float],
        *,
        late_s: float,
    ) -> None:
        self._sessions = sessions
        self._clock = clock
        self._late_s = late_s
        self._looked_s = clock()
        self._late = False

    def look(self) -> tuple[float, list[Sighting]]:
        """Return the time since the last look, as far as it counts, and what is seen.

        What came while this process stood still may be read after this look, so neither this nor the
        next one counts.
        """
        now_s = self._clock()
        elapsed_s = now_s - self._looked_s
        self._looked_s = now_s
        if self._late or elapsed_s > self._late_s:
            self._late = elapsed_s > self._late_s
            elapsed_s = 0.0
        seen: dict[RankId, Sighting] = {}
        for session in self._sessions.values():
            held = session.held
            if type(held) is DecodeAttempt and (look := held.look()) is not None:
                before = seen.get(look.rank)
                if before is not None:
                    look = Sighting(
                        look.rank,
                        look.moved or before.moved,
                        look.still + before.still,
                        max(look.gap_s, before.gap_s),
                    )
                seen[look.rank] = look
        return elapsed_s, list(seen.values())
