"""Requests leave an engine that does not answer any more, and KV caches that died with one.

An engine that refuses connections or is silent is quarantined. What it was sent, and has not begun to
answer, would wait there for its own time limit, of minutes: it goes elsewhere at once, as far as
attempts and the retry budget allow, so that a common fault of all engines makes no storm. KV caches
on it are lost, and so are those of an engine that restarted under the same address: what waits in
the pool with one is prefilled again, at the pace at which prefillers take prompts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.live.engines.instances import process_of

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.engines.instances import Prefiller, Target
    from balanceroute.proxy.live.request.live_request import LiveRequest


def sessions_on(
    sessions: "Mapping[RequestId, LiveRequest]", target: "Target"
) -> "list[LiveRequest]":
    """Return the requests in flight on an instance, of all live ones."""
    return [session for session in sessions.values() if session.is_on(target)]


class LostEngines:
    """Tells the sessions of engines that are lost.

    Args:
        sessions: All live requests.
        call_soon: Calls back from the event loop, so that a session in the middle of a failure is
            notified after it.
    """

    def __init__(
        self,
        sessions: "Mapping[RequestId, LiveRequest]",
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._sessions = sessions
        self._call_soon = call_soon

    def gone(self, target: "Target") -> None:
        """Note that an engine does not answer."""
        self._call_soon(partial(self._leave, target))

    def kv_lost(self, prefiller: "Prefiller") -> None:
        """Note that the KV caches which a prefiller has handed out so far are no more."""
        prefiller.lost_kv += 1
        self._call_soon(self._drop_lost_kv)

    def engine_seen(self, prefiller: "Prefiller", engine_id: str) -> None:
        """Note an id of the engine behind a prefiller's address, which is new with each start."""
        engine = process_of(engine_id)
        if engine in prefiller.engines:
            return
        if prefiller.engines:
            self.kv_lost(prefiller)
        prefiller.engines.add(engine)

    def _leave(self, target: "Target") -> None:
        for session in sessions_on(self._sessions, target):
            session.engine_lost(target)

    def _drop_lost_kv(self) -> None:
        for session in list(self._sessions.values()):
            session.drop_lost_kv()
