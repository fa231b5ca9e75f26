"""What a source tells of the engines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from balanceroute.proxy.live.engines.instances import Target


@dataclass(frozen=True, slots=True)
class Found:
    """An engine, as its source tells it.

    Attributes:
        ranks: The ranks of a decode server; None to ask it.
        bootstrap: The address of a prefiller's bootstrap server; None for the usual one.
        kv_events: Where a prefiller publishes its KV cache events; None if its source does not say.
        kv_replay: Where it sends them again; likewise.
        ready: Whether it serves already. One that is registered stays so either way.
        leaving: Whether it is about to end.
    """

    target: Target
    ranks: int | None = None
    bootstrap: str | None = None
    kv_events: str | None = None
    kv_replay: str | None = None
    ready: bool = True
    leaving: bool = False


View = Mapping[Target, Found]
"""All engines of a source."""


class Source(Protocol):
    """Where engines are found."""

    async def run(self, tell: Callable[[View], None]) -> None:
        """Tell all engines whenever they may have changed. What cannot be read tells nothing.

        The same object means that nothing has changed; what was told is not changed afterwards.
        """
