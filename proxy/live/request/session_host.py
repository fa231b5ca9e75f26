"""What a session needs of its surroundings: the seam between one request and the driver."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVarTuple

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.core.events import Event, RequestId
    from balanceroute.proxy.live.connectors import Connector
    from balanceroute.proxy.live.engines.faults import Fault
    from balanceroute.proxy.live.engines.instances import Prefiller, Target
    from balanceroute.proxy.live.engines.kv_transfers import KvTransfers
    from balanceroute.proxy.live.request.hand_off import HandOff
    from balanceroute.proxy.live.request.leg_settings import LegSettings
    from balanceroute.proxy.live.request.lost_engines import LostEngines
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.request.stall_watch import StallWatch

_Arguments = TypeVarTuple("_Arguments")


class Host(Protocol):
    """What a session needs of the driver."""

    @property
    def connector(self) -> "Connector": ...  # noqa: D102
    @property
    def legs(self) -> "LegSettings": ...  # noqa: D102
    @property
    def transfers(self) -> "KvTransfers": ...  # noqa: D102
    @property
    def lost(self) -> "LostEngines": ...  # noqa: D102
    @property
    def lease_s(self) -> float | None: ...  # noqa: D102
    @property
    def stalls(self) -> "StallWatch": ...  # noqa: D102

    @property
    def hand_offs(self) -> "dict[str, HandOff]": ...  # noqa: D102

    def clock(self) -> float:
        """Return the loop's time, in seconds."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "asyncio.TimerHandle":
        """Call back after a delay."""

    def guarded(
        self, session: "Session", what: str, do: Callable[[*_Arguments], object]
    ) -> Callable[[*_Arguments], None]:
        """Return a callback that ends the session if it fails."""

    def crashed(self, session: "Session", what: str, error: Exception) -> None:
        """End a session whose handling failed."""

    def feed(self, event: "Event") -> None:
        """Give the scheduler an event and perform what it decides."""

    def unique(self) -> str:
        """Return a token that no other leg has."""

    def choose_prefiller(
        self, number: "RequestId", other_than: "Prefiller | None"
    ) -> "Prefiller | None":
        """Return who takes a prefill that a decode rank called for; None if nobody can."""

    def may_retry(self, leg: str, fault: "Fault", *, free: bool = False) -> bool:
        """Return whether the retry budget allows one more attempt, and count it.

        One that is `free` is counted, but takes nothing from the budget.
        """

    def leg_failed(self, target: "Target", fault: "Fault", reason: str) -> None:
        """Note that a leg failed through its engine's fault."""

    def leg_succeeded(self, target: "Target") -> None:
        """Note that a leg worked."""

    def counted(self, session: "Session", prompt_tokens: int) -> None:
        """Note how many tokens its prompt really has."""

    def observe_gap(self, gap_s: float) -> None:
        """Note the time between two pieces of a stream."""

    def started(self, session: "Session") -> None:
        """Note that the session is in its rank's batch."""

    def ended(self, session: "Session") -> None:
        """Note that the session is over."""
