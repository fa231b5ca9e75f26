"""Looks at the streams: which ranks make tokens, and which do not."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from balanceroute.proxy.core.rank_progress import Sighting
from balanceroute.proxy.live.request.decode_attempt import DecodeAttempt

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RankId, RequestId
    from balanceroute.proxy.live.request.session import Session


class StreamLooks:
    """What is seen of the ranks; see `core.rank_progress`.

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
