"""The seam between one request and the driver: a context to read, and data that goes either way."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from balanceroute.proxy.core.events import Event, PrefillerId, RankId, RequestId, Ticket
from balanceroute.proxy.live.connectors import Connector, MissingKv
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Target
from balanceroute.proxy.live.openai.body import RequestBody, dump
from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS, SAMPLING, Api
from balanceroute.proxy.live.request.leg_settings import LegSettings
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.wire.http1.pump import Pump

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.continued import Continued


# Prompts that may be what kills engines: under which engines have died, for five minutes each.
#
# A prompt whose engine dies is tried on one engine more. Of two deaths under one prompt the
# prompt is the likeliest cause, and it is refused from then on, whoever sends it. All other prompts that
# were on a dead engine are suspects as well, until the prompt that explains that death is found.
# Where more than `FEW` prompts have died twice with one engine, or only after a long time, none
# of them is refused: then the engines are the likelier cause. See docs/failures.md.
#
# Prompts are known by hashes with a key of this process.

MOST_DEATHS = 2
"""Engines that may die under one prompt."""

KEPT_S = 300.0
"""How long a prompt is remembered after the last death under it."""

FEW = 4
"""Prompts that are refused at a time: one death explains no more of them."""

SOON_S = 30.0
"""A prompt that was on an engine for longer than that before it died is not the likeliest cause."""

MOST_PROMPTS = 4096
"""Prompts that are remembered; then the one is forgotten that was hit longest ago."""

REASON = "two engines died while they worked on this prompt, so it is not tried again for now"

SUSPECTED = "poison"
"""The `RequestRecord.refused_for` of a request whose prompt may kill engines."""

# All that was on an engine loses its connection within this time, as its system closes them at once; what
# is lost later is lost otherwise.
_TOGETHER_S = 0.5
# Wait this long for the other requests on a dead engine before deciding which prompt is refused.
_SETTLED_S = 0.1
# vLLM's server answers for some seconds after its engine has died: a request of that time did not kill it.
_DEAD_S = 10.0
_KEY_BYTES = 32
_HASH_BYTES = 16
# Members that change nothing in what an engine computes of the prompt: the form of the answer, who
# asks, how much is asked for, and how tokens are drawn. All other ones may matter, also unknown ones. The
# model does, but a client that falls back on another one has the same prompt try other engines.
_BESIDE = INTERNAL_FIELDS | {
    "cache_salt",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "metadata",
    "model",
    "n",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "seed",
    "service_tier",
    "session_id",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
}


class Copy(Protocol):
    """One request with a prompt under which an engine has died."""

    def prompt_refused(self) -> None:
        """Take note that the prompt is not to be tried any more."""


class EngineDied(Struct, frozen=True):
    """An engine died while it worked on a prompt: the connection broke, or the engine says so."""

    fingerprint: bytes  # Of the prompt.
    request_id: str  # Of the request.
    target: Target  # The engine.
    group: Target  # The first decode server of those that end together; the engine itself if it stands alone.
    sent_s: float  # When it was sent the prompt, by the loop's clock.
    died_s: float  # When it was seen to be dead.
    said: bool  # Whether the engine's server lives, and says so.


class Death(Struct, eq=False):
    """One engine's death."""

    target: Target
    at_s: float
    hit: dict[bytes, float] = {}  # When each prompt was sent there that was there.
    ids: list[str] = []  # Of their requests.
    # Whether all requests there have reported, and which prompts are refused is decided.
    judged: bool = False
    # Whether one of these prompts is refused for it, so that no other one is a suspect.
    explained: bool = False


class _Suspect(Struct, eq=False):
    """One prompt; `copies` are requests with it that were sent to engines since the first death."""

    until_s: float
    deaths: list[Death] = []
    refused: bool = False
    copies: dict[Copy, None] = {}  # For its order.

    @property
    def count(self) -> int:
        return sum(not death.explained for death in self.deaths)

    @property
    def is_judged(self) -> bool:
        return all(death.judged for death in self.deaths)


class Suspects:
    """Remembers the prompts under which engines died.

    Attributes:
        on_refused: Called with a death and the number of prompts that are refused for it.
        prompts: The suspects, by fingerprint; the one hit longest ago first. While there is none it does
            not matter which prompt a request has.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        self.on_refused: Callable[[Death, int], None] = lambda death, count: None
        self._clock = clock
        self._call_later = call_later
        self.prompts: dict[bytes, _Suspect] = {}
        self._latest: dict[Target, Death] = {}
        self._first_of: dict[Target, Death] = {}  # By group.

    def of(self, endpoint: str, body: RequestBody) -> bytes:
        """Return what names a prompt: a hash of all that an engine computes of a request."""
        beside, sampling = _BESIDE, b""
        if endpoint == Api.GENERATE.value:  # There they stand in a member of their own.
            beside, given = _BESIDE | {SAMPLING}, body.values.get(SAMPLING)
            if isinstance(given, dict):
                rest = sorted(given.keys() - _BESIDE)
                given = {name: given[name] for name in rest}
            sampling = dump(given)
        hashed = b"\0".join((endpoint.encode(), sampling, body.texts_without(beside)))
        return blake2b(hashed, digest_size=_HASH_BYTES, key=self._key).digest()

    def of_bytes(self, endpoint: str, body: bytes, boundary: bytes = b"") -> bytes:
        """Return what names a request that is not read; a form's boundary is another one each time."""
        hashed = blake2b(endpoint.encode() + b"\0", digest_size=_HASH_BYTES, key=self._key)
        hashed.update(body.replace(boundary, b"") if boundary else body)
        return hashed.digest()

    def deaths(self, fingerprint: bytes) -> int:
        """Return how many engines died under a prompt, as far as nothing else explains that."""
        suspect = self._find(fingerprint)
        return 0 if suspect is None else suspect.count

    def refuses(self, fingerprint: bytes) -> bool:
        """Return whether a prompt is not to be tried any more."""
        suspect = self._find(fingerprint)
        if suspect is None or suspect.refused or suspect.is_judged:
            return suspect is not None and suspect.refused
        if suspect.count >= MOST_DEATHS:
            return True
        twice = self._twice(suspect.deaths[-1])
        return suspect in twice and len(twice) <= FEW

    def sends(self, fingerprint: bytes, copy: Copy) -> None:
        """Note that an engine is to be sent a prompt, until `ended`, unless no engine died under it."""
        suspect = self._find(fingerprint)
        if suspect is not None:
            suspect.copies[copy] = None

    def ended(self, fingerprint: bytes, copy: Copy) -> None:
        suspect = self._find(fingerprint)
        if suspect is not None:
            suspect.copies.pop(copy, None)

    def died(self, report: EngineDied) -> None:
        """Take note of an engine that died under a prompt."""
        self._forget()
        death = self._death(report)
        if death is None or report.fingerprint in death.hit:
            return
        death.hit[report.fingerprint] = report.sent_s
        if len(death.ids) < FEW:
            death.ids.append(report.request_id)
        suspect = self.prompts.pop(report.fingerprint, None) or _Suspect(0.0)
        suspect.until_s = self._clock() + KEPT_S
        suspect.deaths.append(death)
        self.prompts[report.fingerprint] = suspect
        self._judge_soon(death)
        if len(self.prompts) > MOST_PROMPTS:
            del self.prompts[next(iter(self.prompts))]

    def group_returned(self, group: Target) -> None:
        """Note that an engine of a group serves again: if one ends now, that is another death."""
        self._first_of.pop(group, None)

    def _death(self, report: EngineDied) -> Death | None:
        """Return which death it was; None if the prompt has no part in it."""
        at_s, known = report.died_s, self._latest.get(report.target)
        first = self._first_of.get(report.group)
        if first is not None and first.target != report.target and at_s < first.at_s + _DEAD_S:
            # Its requests may be the cause if both engines ended in one moment. One that ended later did so
            # because the first had, whatever its requests were.
            at_once = at_s < first.at_s + _TOGETHER_S and report.sent_s < first.at_s
            return first if at_once else None
        if known is not None:
            if report.sent_s < known.at_s and at_s < known.at_s + (
                _DEAD_S if report.said else _TOGETHER_S
            ):
                return known
            if report.said and at_s < known.at_s + _DEAD_S:
                return None
        death = self._latest[report.target] = Death(report.target, at_s)
        self._first_of[report.group] = death
        return death

    def _judge_soon(self, death: Death) -> None:
        if self._call_later is not None and (death.judged or len(death.hit) == 1):
            self._call_later(_SETTLED_S, lambda: self._judge(death))
        death.judged = False

    def _judge(self, death: Death) -> None:
        """Decide which of the prompts on a dead engine are refused, once all requests there have reported."""
        death.judged = True
        twice = self._twice(death)
        if not twice:
            return
        late = [n for n, sent_s in death.hit.items() if death.at_s - sent_s > SOON_S]
        known = [self.prompts.get(name) for name in late]
        guilty = [one for one in twice if not (one.refused or one in known)]
        if guilty and len(twice) <= FEW:
            for suspect in guilty:
                suspect.refused = True
                for one in suspect.deaths:
                    one.explained = True
            self.on_refused(death, len(guilty))
            for copy in [copy for suspect in guilty for copy in suspect.copies]:
                copy.prompt_refused()

    def _twice(self, death: Death) -> list[_Suspect]:
        """Return the prompts on a dead engine under which another one had died.

        If something else explains all of those deaths, it may have been this prompt nevertheless: of two
        that kill, and were on one engine, only one was found.
        """
        there = [one for name in death.hit if (one := self._find(name)) is not None]
        twice = [one for one in there if one.count >= MOST_DEATHS]
        return twice or [one for one in there if len(one.deaths) >= MOST_DEATHS]

    def _find(self, fingerprint: bytes) -> _Suspect | None:
        self._forget()
        return self.prompts.get(fingerprint)

    def _forget(self) -> None:
        now_s, suspects = self._clock(), self.prompts
        while suspects and suspects[first := next(iter(suspects))].until_s <= now_s:
            del suspects[first]
        for deaths in (self._latest, self._first_of):
            for target in [t for t, one in deaths.items() if one.at_s + KEPT_S <= now_s]:
                del deaths[target]


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The parts that all sessions of a process share."""

    connector: Connector  # Says what KV parameters each leg has.
    legs: LegSettings  # Time limits and retries.
    clock: Callable[[], float]  # The loop's time, in seconds.
    uptime_s: Callable[[], float]  # What leases are measured by; see `Environment`.
    call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle]  # The loop's.
    unique: Callable[[], str]  # Returns a token that no other leg has.
    stalls: "StallWatch"  # Tells new data from data that waited while the process stood still.
    observe_gap: Callable[[float], None]  # Called with the seconds between two pieces of a stream.
    # Returns a context that no engine exceeds for a model; None if one may.
    max_model_len: Callable[[str], int | None]
    # Called with what a decode rank posts when it calls for a prefill, by transfer.
    hand_offs: dict[str, Callable[[Mapping[str, Any]], None]] = field(default_factory=dict)
    suspects: Suspects = field(default_factory=Suspects)  # Prompts under which engines have died.
    # Returns the header line that names a prompt to prefillers; None if their events name none.
    name_prompt: Callable[[Api, RequestBody, Ticket], bytes] | None = None
    # Keeps what the client has of an answer that may go on elsewhere; None if none may.
    resuming: "type[Continued] | None" = None
    pump: Pump | None = None  # Moves the ordinary events of streams.


class Host(Protocol):
    """The driver, as a session calls it."""

    @property
    def context(self) -> SessionContext: ...

    def feed(self, event: Event, *implied: "Report") -> None:
        """Take note of what an event implies, give it to the scheduler, and perform what it decides.

        A `PrefillDone` implies the `LegSucceeded` of its prefiller, and `PromptCounted` of a prompt
        behind which nothing was emitted; a `DecodeStarted`, and the end of an answer that is no
        stream, the `LegSucceeded` of the engine. No other event implies anything.
        """

    def report(self, report: "Report") -> None:
        """Take note of something."""

    def may_retry(
        self,
        leg: str,
        fault: Fault,
        *,
        lost_with: Target | None = None,
        pulled_from: PrefillerId | None = None,
    ) -> bool:
        """Return whether the retry budget allows one more attempt, and count it.

        Args:
            leg: What failed.
            fault: How.
            lost_with: The engine that the attempt ended with. While that is down and another one
                of its role takes requests, this takes nothing from the budget.
            pulled_from: Whose KV cache a rank was to pull: while that prefiller is on trial, or down
                as above, the attempt takes nothing from the budget.
        """

    def choose_prefiller(
        self, number: RequestId, other_than: PrefillerId | None
    ) -> Prefiller | None:
        """Return the prefiller for a prefill that a decode rank called for; None if none can take it.

        It counts as busy until a `RemotePrefillEnded`.
        """

    def group_of(self, engine: Prefiller | Rank) -> Target:
        """Return what names all engines that end with one: the first of them."""

    def crashed(self, number: RequestId, request_id: str, what: str, error: Exception) -> None:
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
    says_dead: bool = False  # Whether its server says that it has died.


class LegSucceeded(Struct, frozen=True):
    """An engine answered."""

    target: Target  # Which.
    # Whose KV cache it has pulled, and which rank it is; None if there was none to pull.
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
    """The pump no longer moves it, and the number may become another stream's."""

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
    """A KV cache on a prefiller."""

    __slots__ = ("_losses", "expires_s", "offers", "params", "prefiller")

    def __init__(
        self,
        prefiller: Prefiller,
        params: bytes | None,
        expires_s: float | None = None,
    ) -> None:
        self.prefiller = prefiller  # The one that computed it.
        # How a rank pulls it, as JSON; None if none can, so that the rank computes the prompt
        # itself.
        self.params = params
        # The machine's uptime from which on no rank may be asked to pull it; None for never.
        self.expires_s = expires_s
        self.offers = 0  # How many ranks it was offered to.
        self._losses = prefiller.lost_kv

    @property
    def is_lost(self) -> bool:
        """Whether it went with its engine's process."""
        return self.params is not None and self.prefiller.lost_kv != self._losses


# Since when something that is read now may have been waiting to be read.


class StallWatch:
    """Tells data that came just now from data that may have come while this process stood still.

    A process is suspended, a host paused, a loop blocked: afterwards everything that came meanwhile is
    read at once. A prefill answer among it may be as old as its lease, and a KV cache that is pulled
    after its lease is another prompt's.

    Args:
        interval_s: Time between two calls of `tick`, in seconds of the clock.
        clock: The machine's uptime, which counts what the loop's clock does not: a suspended machine.

    Attributes:
        woke: Whether the last tick was the first after a standstill: the loop has yet to read the data of
            that time, so nothing is overdue. Not twice in a row: a loop may be late for ever.
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
        now_s = self._clock()
        stood_still = now_s - self._ticked_s > self._late_s
        self.woke = stood_still and not self.woke
        if stood_still:
            # The loop reads waiting data after due timers: for a while no data counts as new.
            self._stalled_s, self._over_s = self._ticked_s, now_s + self._late_s
        self._ticked_s = now_s

    def waiting_since_s(self) -> float:
        """Return since when data that is read now may have been here, by the clock."""
        now_s = self._clock()
        if now_s - self._ticked_s > self._late_s:
            return self._ticked_s
        return self._stalled_s if now_s < self._over_s else now_s
