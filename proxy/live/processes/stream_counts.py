"""How far a relay's streams are, and the gaps between their pieces: told in small intervals."""

import asyncio
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.live.processes import from_relay
from balanceroute.proxy.live.telemetry.registry import TOKEN_GAP_BOUNDS_S, Histogram

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session

PROGRESS_S = 0.025
"""Between two tellings of progress: of a step of 50 ms it delays the count by half at most."""

_TICKS_PER_GAPS = 10


class StreamCounts:
    """Follows the streams that have begun.

    Args:
        send: Sends a message to the scheduler process.
        behind: Returns whether that reads too slowly: then it is told later, and of the latest alone.
    """

    def __init__(
        self, send: Callable[[from_relay.FromRelay], None], behind: Callable[[], bool]
    ) -> None:
        self._send = send
        self._behind = behind
        self._loop = asyncio.get_running_loop()
        self._gaps = Histogram(TOKEN_GAP_BOUNDS_S)
        self.observe_gap = self._gaps.observe
        # By row, with the tokens told last.
        self._started: dict[int, tuple[Session, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0

    @property
    def idle(self) -> bool:
        """Whether no stream is followed."""
        return not self._started

    def started(self, row: int, session: "Session") -> None:
        """Follow a stream; what it has emitted before is told otherwise."""
        self._started[row] = session, session.emitted.tokens
        if self._timer is None:
            self._wait()

    def left(self, row: int) -> None:
        """Follow a stream no more, if it is followed."""
        self._started.pop(row, None)

    def forget(self) -> None:
        """Follow no stream any more: nobody knows their rows."""
        self._started.clear()

    def stop(self) -> None:
        """Tell nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_later(PROGRESS_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        self._ticks += 1
        if not self._behind():
            self._tell_progress()
            if self._ticks % _TICKS_PER_GAPS == 0 or not self._started:
                self._tell_gaps()
        if self._started:
            self._wait()

    def _tell_progress(self) -> None:
        rows, emitted = array("I"), array("I")
        for row, (session, told) in self._started.items():
            tokens = session.emitted_tokens
            if tokens != told:
                self._started[row] = session, tokens
                rows.append(row)
                emitted.append(tokens)
        if rows:
            self._send(from_relay.Progress(_packed(rows), _packed(emitted)))

    def _tell_gaps(self) -> None:
        counts, total_s, refused = self._gaps.take()
        if refused or any(counts):
            self._send(from_relay.Gaps(tuple(counts), total_s, refused))


def _packed(values: "array[int]") -> bytes:
    if _BIG_ENDIAN:
        values.byteswap()
    return values.tobytes()


_BIG_ENDIAN = array("I", [1]).tobytes()[0] == 0
assert array("I").itemsize == 4
