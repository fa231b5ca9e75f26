"""How a request goes on when a leg of it fails: the table of docs/failures.md as code.

Pure: the session passes what happened, `triage` returns what to blame and how to continue.

A KV cache is offered to another rank only if the first one provably never took the request. A rank
that took it may have pulled the KV cache before it failed: the prefiller frees pulled blocks, and a
second pull reads whatever they hold by then, which may be another prompt's KV. No error reports that
(seen with vLLM's NIXL connector: 200, and the other prompt's answer).
"""

from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from balanceroute.proxy.live.engines.engine_url import Fault, fault_of
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Target
from balanceroute.proxy.live.openai.errors import (
    JSON_HEADERS,
    EngineError,
    error_words,
    is_error,
    says_dead,
)
from balanceroute.proxy.live.openai.shape import OPTIONAL_APIS, Api
from balanceroute.proxy.live.request.leg_settings import LegSettings
from balanceroute.proxy.live.request.shared import MOST_DEATHS
from balanceroute.proxy.live.telemetry.record import Leg
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

# Answers of an engine that another one may not give. They say "busy", not "broken".
_BUSY = frozenset({429, 503})
# What servers say of a path, or of a method there, that they do not know.
_NO_ROUTE = frozenset({404, 405})


class What(Enum):
    """How it failed."""

    REFUSED = "4xx"
    NO_ROUTE = "404 or 405 that is no error of the API, as of an engine without the route"
    BUSY = "429 or 503, as an error of the API"
    UNAVAILABLE = "429 or 503 that is no error of the API, as from a gateway before the engine"
    SERVER_ERROR = "another 5xx"
    NO_ANSWER = "a status below 400 that is not 200"
    UNREADABLE = "an unreadable answer"
    NO_KV = "no usable KV parameters"
    ERROR_EVENT = "an error of 5xx as the first event, or with the status 200"
    ABORTED = "the engine aborted the request, as one that is told to stop does"
    NOT_SENT = "no connection"
    TOO_LATE = "not sent before the end of the lease"
    STALE = (
        "a reused connection lost before any byte of the answer, though the engine takes new ones"
    )
    BROKEN = "connection lost after the request was sent"
    TIMED_OUT = "timed out"
    NO_PREFILL = "the prefill that the decode rank requested failed"


LOSSES = frozenset({What.BROKEN, What.NOT_SENT, What.TIMED_OUT})
"""Failures by which a leg is lost with its engine, if that is down. An error that an engine answers may be
common to all engines."""


class Blame(Enum):
    """Which check counts it against an engine."""

    NONE = "none"
    ENGINE = "health checks"
    PULL = "KV transfers"


class Next(Enum):
    """How the request goes on."""

    RELAY = "the client gets the engine's answer"
    OTHER_PREFILLER = "another prefiller"
    OTHER_RANK = "another rank, the same KV cache"
    NEW_KV = "prefilled again"
    NEW_KV_ELSEWHERE = "prefilled again, by another prefiller"
    CONTINUE = "prefilled again with what was emitted, and continued by another rank"
    FAIL = "an error"


@dataclass(frozen=True, slots=True)
class Failure:
    """One leg's failure."""

    what: What  # How it failed.
    fault: Fault  # The same in the terms of health checks and of the metric of retries.
    reason: str  # For the log, and for the client if nothing mends it.
    # What the engine answered, if that is what the client gets in the end.
    answer: tuple[int, Headers, bytes] | None = None
    blamed: Target | None = None  # The instance at fault, if it is not the engine of the leg.

    @property
    def is_death(self) -> bool:
        """Whether the engine seems to have died: the request may have killed it."""
        return self.what is What.BROKEN and (self.fault is Fault.RESET or self.says_dead)

    @property
    def says_dead(self) -> bool:
        """Whether that is the engine's own word: its server lives."""
        return self.what is What.BROKEN and self.fault is Fault.SERVER_ERROR

    def as_error(self, leg: Leg) -> tuple[int, str]:
        """Return the status and the reason that the client gets if it cannot have `answer`."""
        if self.answer is not None:  # The status of a resumed answer was sent long ago.
            return 502, f"the engine answered {self.answer[0]}"
        if self.what in (What.BROKEN, What.NOT_SENT, What.STALE):
            return 502, f"{leg.value} failed: {self.reason}"
        return 504 if self.what is What.TIMED_OUT else 502, self.reason


@dataclass(frozen=True, slots=True)
class Rule:
    """How to react to a failure."""

    # Which check counts it. A failure where a rank was to pull a KV cache may be the prefiller's.
    blame: Blame
    # Whether idle connections to the engine are closed: one may be an answer behind.
    close_idle: bool
    then: Next  # How the request goes on, if attempts and the retry budget allow.


RULES = {
    (Leg.PREFILL, What.REFUSED): Rule(Blame.NONE, False, Next.RELAY),
    (Leg.PREFILL, What.NO_ROUTE): Rule(Blame.NONE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.BUSY): Rule(Blame.NONE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.UNAVAILABLE): Rule(Blame.NONE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.SERVER_ERROR): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.NO_ANSWER): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.UNREADABLE): Rule(Blame.ENGINE, True, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.ABORTED): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.NO_KV): Rule(Blame.NONE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.NOT_SENT): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.BROKEN): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.PREFILL, What.TIMED_OUT): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.DECODE, What.REFUSED): Rule(Blame.NONE, False, Next.RELAY),
    # No engine read the request, so none pulled the KV cache.
    (Leg.DECODE, What.NO_ROUTE): Rule(Blame.NONE, False, Next.OTHER_RANK),
    (Leg.DECODE, What.BUSY): Rule(Blame.NONE, False, Next.OTHER_RANK),
    (Leg.DECODE, What.UNAVAILABLE): Rule(Blame.NONE, False, Next.NEW_KV),
    (Leg.DECODE, What.SERVER_ERROR): Rule(Blame.PULL, False, Next.NEW_KV_ELSEWHERE),
    (Leg.DECODE, What.NO_ANSWER): Rule(Blame.ENGINE, True, Next.NEW_KV),
    (Leg.DECODE, What.UNREADABLE): Rule(Blame.ENGINE, True, Next.NEW_KV),
    # What vLLM does when it cannot pull the KV cache.
    (Leg.DECODE, What.ERROR_EVENT): Rule(Blame.PULL, False, Next.NEW_KV_ELSEWHERE),
    (Leg.DECODE, What.ABORTED): Rule(Blame.ENGINE, False, Next.NEW_KV),
    (Leg.DECODE, What.NOT_SENT): Rule(Blame.ENGINE, False, Next.OTHER_RANK),
    (Leg.DECODE, What.TOO_LATE): Rule(Blame.NONE, False, Next.NEW_KV),
    # It may have pulled the KV cache.
    (Leg.DECODE, What.STALE): Rule(Blame.NONE, False, Next.NEW_KV),
    (Leg.DECODE, What.BROKEN): Rule(Blame.ENGINE, False, Next.NEW_KV),
    (Leg.DECODE, What.TIMED_OUT): Rule(Blame.PULL, False, Next.NEW_KV_ELSEWHERE),
    (Leg.DECODE, What.NO_PREFILL): Rule(Blame.NONE, False, Next.NEW_KV),
    (Leg.DIRECT, What.REFUSED): Rule(Blame.NONE, False, Next.RELAY),
    (Leg.DIRECT, What.NO_ROUTE): Rule(Blame.NONE, False, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.BUSY): Rule(Blame.NONE, False, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.UNAVAILABLE): Rule(Blame.NONE, False, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.SERVER_ERROR): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.NO_ANSWER): Rule(Blame.ENGINE, True, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.UNREADABLE): Rule(Blame.ENGINE, True, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.ERROR_EVENT): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.ABORTED): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.NOT_SENT): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.BROKEN): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
    (Leg.DIRECT, What.TIMED_OUT): Rule(Blame.ENGINE, False, Next.OTHER_PREFILLER),
}


def triage(
    leg: Leg,
    failure: Failure,
    *,
    stream_open: bool,
    continuable: bool,
    pulls: bool,
    offers: int,
    deaths: int,
) -> Rule:
    """Return what to do about a failure.

    Args:
        leg: Which leg failed.
        failure: How.
        stream_open: Whether the client has the head of its answer.
        continuable: Whether another rank could go on with what the client has.
        pulls: Whether the engine was to pull a KV cache, and has given no sign that it has.
        offers: How many ranks this KV cache was offered to.
        deaths: How many engines died under the prompt, or broke off otherwise, this one included.
    """
    rule = RULES[leg, failure.what]
    blame, then = rule.blame, rule.then
    if blame is Blame.PULL and not pulls:
        blame = Blame.ENGINE
    ends = leg is not Leg.PREFILL or then is Next.RELAY
    if deaths >= MOST_DEATHS and then is not Next.RELAY:
        then = Next.FAIL
    elif stream_open and ends:
        then = Next.CONTINUE if continuable and then is not Next.RELAY else Next.FAIL
    elif then is Next.OTHER_RANK and offers > 1 and failure.what is not What.NO_ROUTE:
        then = Next.NEW_KV
    return Rule(blame, rule.close_idle, then)


ABORTED = Failure(What.ABORTED, Fault.SERVER_ERROR, "the engine aborted the request")


def lacks_route(status: int, body: bytes) -> bool:
    """Return whether an answer is that of a server without the route, not of the API itself."""
    return status in _NO_ROUTE and not is_error(body)


def refusal(status: int, headers: Headers, body: bytes) -> Failure:
    """Return the failure that an answer with another status than 200 is."""
    answer, reason = (status, headers, body), _said(status, error_words(body))
    if status < 400:
        return Failure(What.NO_ANSWER, Fault.PROTOCOL, f"the engine answered {status}")
    if status >= 500 and says_dead(body):
        # As if the connection were lost: soon it will be.
        return Failure(What.BROKEN, Fault.SERVER_ERROR, reason, answer)
    if lacks_route(status, body):
        return Failure(What.NO_ROUTE, Fault.SERVER_ERROR, reason, answer)
    if status in _BUSY:
        what = What.BUSY if is_error(body) else What.UNAVAILABLE
        return Failure(what, Fault.SERVER_ERROR, reason, answer)
    if status < 500:
        return Failure(What.REFUSED, Fault.SERVER_ERROR, reason, answer)
    return Failure(What.SERVER_ERROR, Fault.SERVER_ERROR, reason, answer)


def reported(error: EngineError, body: bytes) -> Failure:
    """Return the failure for an error that an engine sent in `body` with the status 200."""
    what = What.REFUSED if error.status < 500 else What.ERROR_EVENT
    if error.status == 429:
        # Another one may take it. This one may have begun: it said 200 first.
        what = What.UNAVAILABLE
    if error.is_death:
        what = What.BROKEN  # As if the connection were lost: soon it will be.
    answer = (error.status, JSON_HEADERS, body)
    return Failure(what, Fault.SERVER_ERROR, _said(error.status, error.words), answer)


def _said(status: int, words: str) -> str:
    return f"status {status}: {words}" if words else f"status {status}"


def breakage(error: WireError) -> Failure:
    """Return the failure that an exchange without a complete answer is."""
    what = What.BROKEN if error.sent else What.NOT_SENT
    if error.kind is WireFault.TOO_LATE:
        what = What.TOO_LATE
    elif error.kind is WireFault.STALE:
        what = What.STALE
    return Failure(what, fault_of(error), str(error))


# Whether an attempt that failed is followed by another, and which engine the failure counts
# against.


# Then an engine is asked again for a route that it lacked: it may have been replaced behind its address.
_LACKS_S = 60.0
# Leases of one request that may end on the way to a rank as they may in the pool, so that no clock makes it
# try for ever.
_MOST_LAPSES = 2


@dataclass(frozen=True, slots=True)
class Retry:
    """How a request goes on after a failure."""

    then: Next  # What it is to try next.
    same_rank: bool  # Whether the rank that failed may be tried again.
    delay_s: float  # How long it waits before.
    # Whether no engine failed: the request goes on at once, and takes nothing from the retry budget.
    free: bool = False


class Recovery(Struct, eq=False):
    """The failures of one request so far."""

    _legs: LegSettings
    tries: dict[Leg, int] = {}  # Attempts of each leg.
    _broken: int = 0  # Engines that broke off under it and live.
    _lapses: int = 0  # Leases that ended on the way to a rank.
    # The engines without its route, with what they said; None for those that were passed over.
    lacking: dict[Prefiller | Rank, Failure | None] = {}

    def may_try_again(self, leg: Leg) -> bool:
        """Return whether one more attempt is left, if the retry budget allows it too."""
        return self.tries.get(leg, 0) < self._legs.retry_attempts

    def note_lacking(
        self, engine: Prefiller | Rank, api: Api, failure: Failure, now_s: float
    ) -> None:
        self.lacking[engine] = failure
        if api in OPTIONAL_APIS:
            engine.lacks[api.value] = now_s + _LACKS_S

    def foresee(
        self, leg: Leg, engine: Prefiller | Rank, api: Api, now_s: float
    ) -> Retry | Failure | None:
        """Return the outcome of an attempt if it is known beforehand.

        Returns:
            How to go on, if the engine is known to lack the route; its failure, if it is the earliest of
            all that there are; None if it is to be asked.
        """
        if engine in self.lacking:
            # None: all engines were passed over. This one may have the route by now.
            return self.lacking[engine]
        if engine.lacks.get(api.value, 0.0) <= now_s:
            return None
        self.lacking[engine] = None
        then = Next.OTHER_RANK if leg is Leg.DECODE else Next.OTHER_PREFILLER
        return Retry(then, False, 0.0)

    def note_broken(self, leg: Leg, failure: Failure) -> int:
        """Note a failure; return how many engines have broken off under the request and live."""
        if leg is not Leg.PREFILL and failure.what is What.BROKEN and not failure.is_death:
            self._broken += 1
        return self._broken

    def after(self, leg: Leg, failure: Failure, then: Next) -> Retry | None:
        """Return how to go on, if the retry budget allows it; None if nothing mends the failure."""
        free = failure.what in (What.STALE, What.NO_ROUTE)
        if failure.what is What.TOO_LATE:
            self._lapses += 1
            free = self._lapses <= _MOST_LAPSES
        if free and failure.what is not What.NO_ROUTE:
            self.tries[leg] -= 1  # A stale one once, as the next legs go on new connections.
        if then in (Next.RELAY, Next.FAIL) or not self.may_try_again(leg):
            return None
        tried, legs = self.tries[leg], self._legs
        # A rank that fails again, with another prefiller, is at fault itself. One that hangs is slow to.
        same_rank = failure.what is not What.TIMED_OUT and tried == 1
        return Retry(
            then,
            same_rank,
            min(legs.retry_backoff_limit_s, legs.retry_backoff_s * 2 ** (tried - 1)),
            free,
        )
