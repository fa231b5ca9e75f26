"""How far a relay's streams are, and the gaps between their pieces: told in small intervals."""

import asyncio
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.live.processes import from_relay
from balanceroute.proxy.live.telemetry.registry import TOKEN_GAP_BOUNDS_S, Histogram

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.wire.http1.pump import Pump

PROGRESS_S = 0.025
"""Between two tellings of progress: of a step of 50 ms it delays the count by half at most."""

_TICKS_PER_GAPS = 10


class StreamCounts:
    """Follows the streams that have begun.

    Args:
        send: Sends a message to the scheduler process.
        behind: Returns whether that reads too slowly: then it is told later, and of the latest alone.
        pump: Moves some of them; None if nobody else does.
    """

    def __init__(
        self,
        send: Callable[[from_relay.FromRelay], None],
        behind: Callable[[], bool],
        pump: "Pump | None" = None,
    ) -> None:
        self._send = send
        self._behind = behind
        self._loop = asyncio.get_running_loop()
        self._gaps = Histogram(TOKEN_GAP_BOUNDS_S)
        self.observe_gap = self._gaps.observe
        # By row, with the tokens told last.
        self._started: dict[int, tuple[Session, int]] = {}
        self._away: _Away | None = None
        if pump is not None:
            self._away = _Away(pump.tokens)
            self._gaps.beside = pump.new_gaps
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0

    @property
    def idle(self) -> bool:
        """Whether no stream is followed."""
        return not (self._started or self._away)

    def started(self, row: int, session: "Session") -> None:
        """Follow a stream; what it has emitted before is told otherwise."""
        self._started[row] = session, session.emitted.tokens
        if self._timer is None:
            self._wait()

    def left(self, row: int) -> None:
        """Follow a stream no more, if it is followed."""
        self._started.pop(row, None)

    def lent(self, row: int, slot: int) -> None:
        """Read how far a stream is in a slot of the pump, if it is followed."""
        started = self._started.pop(row, None)
        if started is not None:
            assert self._away is not None
            self._away.lent(row, slot, *started)

    def returned(self, slot: int) -> None:
        """Ask the session of a slot again."""
        assert self._away is not None
        if slot in self._away.sessions:
            row, session, told = self._away.returned(slot)
            self._started[row] = session, told

    def forget(self) -> None:
        """Follow no stream any more: nobody knows their rows."""
        self._started.clear()
        if self._away is not None:
            self._away.forget()

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
            if self._ticks % _TICKS_PER_GAPS == 0 or not (self._started or self._away):
                self._tell_gaps()
        if self._started or self._away:
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
        if self._away:
            moved = self._away.moved()
            if moved.rows:
                self._send(moved)

    def _tell_gaps(self) -> None:
        counts, total_s, refused = self._gaps.take()
        if refused or any(counts):
            self._send(from_relay.Gaps(tuple(counts), total_s, refused))


class _Away:
    """The streams that the pump moves, in arrays by slot.

    Args:
        tokens: int[slots], of their bindings; the pump writes it.

    Attributes:
        sessions: Their sessions, by slot.
    """

    def __init__(self, tokens: "NDArray[np.uint32]") -> None:
        self.sessions: dict[int, Session] = {}
        self._tokens = tokens
        self._is_away = np.zeros(len(tokens), np.bool_)
        self._rows = np.zeros(len(tokens), np.uint32)
        self._before = np.zeros(len(tokens), np.uint32)  # Tokens of earlier bindings.
        self._told = np.zeros(len(tokens), np.uint32)

    def __len__(self) -> int:
        return len(self.sessions)

    def lent(self, row: int, slot: int, session: "Session", told: int) -> None:
        """Read how far a stream is in a slot."""
        self.sessions[slot] = session
        self._is_away[slot] = True
        self._rows[slot], self._told[slot] = row, told
        self._before[slot] = session.emitted.tokens

    def returned(self, slot: int) -> "tuple[int, Session, int]":
        """Read a slot no more; return its row, its session, and the tokens told last."""
        self._is_away[slot] = False
        return self._rows.item(slot), self.sessions.pop(slot), self._told.item(slot)

    def forget(self) -> None:
        """Read no slot any more."""
        self.sessions.clear()
        self._is_away[:] = False

    def moved(self) -> from_relay.Progress:
        """Return how far those are that have moved since they were told last."""
        slots = np.flatnonzero(self._is_away)
        emitted = self._before[slots] + self._tokens[slots]
        moved = emitted != self._told[slots]
        slots, emitted = slots[moved], emitted[moved]
        self._told[slots] = emitted
        rows = self._rows[slots].astype("<u4").tobytes()
        return from_relay.Progress(rows, emitted.astype("<u4").tobytes())


def _packed(values: "array[int]") -> bytes:
    if _BIG_ENDIAN:
        values.byteswap()
    return values.tobytes()


_BIG_ENDIAN = array("I", [1]).tobytes()[0] == 0
assert array("I").itemsize == 4
