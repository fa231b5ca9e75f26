"""What relays say before each has told a new scheduler process of its running requests.

Nothing may be decided before they are known: the slots and KV budgets that they hold would be given to
others. So messages are kept until every relay is here and has told, or the time is up.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from balanceroute.proxy.live.processes.from_relay import FromRelay, Live, Resumed

GATHERING_S = 0.5
"""Relays come within 0.1 s, on two busy cores. One that was killed too has nothing to tell."""


class Teller(Protocol):
    """Takes what one relay says; see `RelayDesk`."""

    def take_one(self, message: FromRelay) -> None:
        """Take a message."""


class Gathering:
    """Keeps messages, and passes them on when it is over.

    Args:
        relays: How many relays there are to be.
        call_later: The loop's.

    Attributes:
        over: Whether messages can be taken as they come.
    """

    def __init__(
        self,
        relays: int,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self.over = False
        self._untold = relays
        self._kept: list[tuple[Teller, FromRelay]] = []
        self._timer = call_later(GATHERING_S, self._end)

    def keep(self, teller: Teller, message: FromRelay) -> None:
        """Keep a message, which may be the last that was waited for."""
        self._kept.append((teller, message))
        if isinstance(message, Resumed):
            self._untold -= 1
            if not self._untold:
                self._end()

    def forget(self, teller: Teller) -> None:
        """Forget what a relay said that is gone; another takes its place."""
        gone = [message for whose, message in self._kept if whose is teller]
        self._untold += sum(isinstance(message, Resumed) for message in gone)
        self._kept = [one for one in self._kept if one[0] is not teller]

    def close(self) -> None:
        """Pass nothing on any more."""
        self._timer.cancel()

    def _end(self) -> None:
        """Pass everything on: the running requests in the order in which they came, then the rest."""
        self._timer.cancel()
        self.over = True
        kept, self._kept = self._kept, []
        lives = [(whose, message) for whose, message in kept if isinstance(message, Live)]
        lives.sort(key=lambda one: one[1].arrival.record.arrived_ns)
        for whose, live in lives:
            whose.take_one(live)
        for whose, message in kept:
            if not isinstance(message, Live):
                whose.take_one(message)
