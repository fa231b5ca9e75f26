"""The seam between one request and the driver: a context to read, and data that goes either way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId
from balanceroute.proxy.live.connectors import MissingKv
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.request.suspects import Suspects
from balanceroute.proxy.live.telemetry.record import RequestRecord

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.core.events import Event
    from balanceroute.proxy.live.connectors import Connector
    from balanceroute.proxy.live.engines.instances import Prefiller
    from balanceroute.proxy.live.request.leg_settings import LegSettings
    from balanceroute.proxy.wire.http1.pump import Pump


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What all sessions of a process share.

    Attributes:
        connector: Says what KV parameters each leg has.
        legs: Time limits and retries.
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


# What sessions report about engines, prompts and themselves, besides the scheduler's events.
#
# Reports are data. Health checks, retry budget, predictors and metrics are shared by all
# sessions, so they take reports instead of calls from inside a session.


class LegFailed(Struct, frozen=True):
    """A leg failed through its engine's fault."""

    target: Target
    fault: Fault
    reason: str


class LegSucceeded(Struct, frozen=True):
    """An engine answered.

    Attributes:
        target: Which.
        pull: Whose KV cache it has pulled, and which rank it is; None if there was none to pull.
    """

    target: Target
    pull: tuple[PrefillerId, RankId] | None = None


class PullFailed(Struct, frozen=True):
    """A rank failed where it was to pull a KV cache; see `KvTransfers`."""

    request: RequestId
    prefiller: PrefillerId
    rank: RankId
    fault: Fault
    reason: str


class EngineSeen(Struct, frozen=True):
    """A prefill answer named the engine that runs behind a prefiller's address."""

    prefiller: PrefillerId
    engine_id: str


class KvMissing(Struct, frozen=True):
    """A prefiller computed a prompt and left no KV cache that a rank could pull, though it had to."""

    prefiller: PrefillerId
    kind: MissingKv
    reason: str


class PromptCounted(Struct, frozen=True):
    """A prefiller counted the tokens of a prompt."""

    request: RequestId
    prompt_tokens: int


class KvAbandoned(Struct, frozen=True):
    """No rank will pull a KV cache: it is "lost", its lease has "lapsed", or was left to: "cheaper"."""

    how: str


class RemotePrefillEnded(Struct, frozen=True):
    """A prefiller that was chosen by `Host.choose_prefiller` is done, whatever came of it."""

    prefiller: PrefillerId


class StreamLent(Struct, frozen=True):
    """The pump moves a request's stream from now on; `slot` is the stream's number there."""

    request: RequestId
    slot: int


class StreamReturned(Struct, frozen=True):
    """It does so no more, and the number may become another stream's."""

    request: RequestId
    slot: int


class SessionEnded(Struct, frozen=True):
    """A session is over."""

    request: RequestId
    record: RequestRecord


Report = (
    LegFailed
    | LegSucceeded
    | PullFailed
    | EngineSeen
    | KvMissing
    | PromptCounted
    | KvAbandoned
    | RemotePrefillEnded
    | StreamLent
    | StreamReturned
    | SessionEnded
)


# What a prefill leaves behind for the rank.


class KvHandle:
    """A KV cache on a prefiller.

    Attributes:
        prefiller: Who computed it.
        params: How a rank pulls it, as JSON; None if none can, so that the rank computes the prompt itself.
        expires_s: The machine's uptime from which on no rank may be asked to pull it; None for never.
        offers: How many ranks it was offered to.
    """

    __slots__ = ("_losses", "expires_s", "offers", "params", "prefiller")

    def __init__(
        self,
        prefiller: "Prefiller",
        params: bytes | None,
        expires_s: float | None = None,
    ) -> None:
        self.prefiller = prefiller
        self.params = params
        self.expires_s = expires_s
        self.offers = 0
        self._losses = prefiller.lost_kv

    @property
    def is_lost(self) -> bool:
        """Whether it went with its engine's process."""
        return self.params is not None and self.prefiller.lost_kv != self._losses


# Since when something that is read now may have been waiting to be read.


class StallWatch:
    """Tells what came just now from what may have come while this process stood still.

    A process is suspended, a host paused, a loop blocked: afterwards everything that came meanwhile is
    read at once. A prefill answer among it may be as old as its lease, and a KV cache that is pulled
    after its lease is another prompt's.

    Args:
        interval_s: Time between two calls of `tick`, in seconds of the clock.
        clock: The machine's uptime, which counts what the loop's clock does not: a suspended machine.

    Attributes:
        woke: Whether the last tick was the first after a standstill: what came meanwhile has yet to be
            read, so nothing is overdue. Not twice in a row: a loop may be late for ever.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._late_s = 2 * interval_s
        self._clock = clock
        self.woke = False
        self._ticked_s = self._stalled_s = self._over_s = clock()

    def begin(self) -> None:
        """Note that ticks come from now on."""
        self._ticked_s = self._clock()

    def tick(self) -> None:
        """Note that this process runs."""
        now_s = self._clock()
        stood_still = now_s - self._ticked_s > self._late_s
        self.woke = stood_still and not self.woke
        if stood_still:
            # What waited is read after the timers that came due: for a while nothing counts as new.
            self._stalled_s, self._over_s = self._ticked_s, now_s + self._late_s
        self._ticked_s = now_s

    def waiting_since_s(self) -> float:
        """Return since when what is read now may have been here, by the clock."""
        now_s = self._clock()
        if now_s - self._ticked_s > self._late_s:
            return self._ticked_s
        return self._stalled_s if now_s < self._over_s else now_s
