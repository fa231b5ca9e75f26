"""The seam between one request and the driver: a context to read, and data that goes either way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from balanceroute.proxy.live.request.suspects import Suspects

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.core.events import Event, PrefillerId, RequestId
    from balanceroute.proxy.live.connectors import Connector
    from balanceroute.proxy.live.engines.faults import Fault
    from balanceroute.proxy.live.engines.instances import Prefiller
    from balanceroute.proxy.live.request.leg_settings import LegSettings
    from balanceroute.proxy.live.request.reports import Report
    from balanceroute.proxy.live.request.stall_watch import StallWatch
    from balanceroute.proxy.wire.http1.pump import Pump


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What all sessions of a process share.

    Attributes:
        connector: Says what KV parameters each leg has.
        legs: Time limits and retries.
        lease_s: How long a prefiller keeps a KV cache; None for ever.
        clock: The loop's time, in seconds.
        uptime_s: What leases are measured by; see `Environment`.
        call_later: The loop's.
        unique: Returns a token that no other leg has.
        stalls: Tells what is new from what waited while the process stood still.
        observe_gap: Called with the seconds between two pieces of a stream.
        max_model_len: Returns a context that no engine exceeds for a model; None if one may.
        hand_offs: Called with what a decode rank posts when it calls for a prefill, by transfer.
        suspects: Prompts under which engines have died.
        pump: Moves the ordinary events of streams; None if nobody else does.
    """

    connector: "Connector"
    legs: "LegSettings"
    lease_s: float | None
    clock: Callable[[], float]
    uptime_s: Callable[[], float]
    call_later: "Callable[[float, Callable[[], None]], asyncio.TimerHandle]"
    unique: Callable[[], str]
    stalls: "StallWatch"
    observe_gap: Callable[[float], None]
    max_model_len: Callable[[str], int | None]
    hand_offs: dict[str, Callable[[Mapping[str, Any]], None]]
    suspects: Suspects = field(default_factory=Suspects)
    pump: "Pump | None" = None


class Host(Protocol):
    """What a session needs of the driver."""

    @property
    def context(self) -> SessionContext: ...  # noqa: D102

    def feed(self, event: "Event", *implied: "Report") -> None:
        """Take note of what an event implies, give it to the scheduler, and perform what it decides.

        A `PrefillDone` implies the `LegSucceeded` of its prefiller, and `PromptCounted` of a prompt
        behind which nothing was emitted; a `DecodeStarted`, and the end of an answer that is no
        stream, the `LegSucceeded` of the engine. No other event implies anything.
        """

    def report(self, report: "Report") -> None:
        """Take note of something."""

    def may_retry(
        self, leg: str, fault: "Fault", *, pulled_from: "PrefillerId | None" = None
    ) -> bool:
        """Return whether the retry budget allows one more attempt, and count it.

        Args:
            leg: What failed.
            fault: How.
            pulled_from: Whose KV cache a rank was to pull: while that prefiller is on trial, the
                attempt takes nothing from the budget.
        """

    def choose_prefiller(
        self, number: "RequestId", other_than: "PrefillerId | None"
    ) -> "Prefiller | None":
        """Return who takes a prefill that a decode rank called for; None if nobody can.

        Whoever it is counts as busy until a `RemotePrefillEnded`.
        """

    def crashed(self, number: "RequestId", request_id: str, what: str, error: Exception) -> None:
        """End a session whose handling failed."""
