"""Which requests are accepted at all: the interface for overload control.

A driver asks before it feeds `RequestArrived`, so that a rejected request never exists for the
scheduler. The number of waiting requests is bounded here and not in the scheduler, because only the
driver can reject one. An admission rule is one new file here and a line in the registry.
"""

from dataclasses import dataclass
from math import exp
from typing import Protocol

from msgspec import Struct

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import Ticket


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is rejected, as its client is answered.

    Attributes:
        status: Of the answer.
        reason: For the client.
        retry_after_s: When to come again; None for never, as it is.
        cause: The reason in a word, of which there are few.
    """

    status: int
    reason: str
    retry_after_s: int | None
    cause: str = "overload"


class Load(Struct, frozen=True):
    """How busy the deployment is.

    Attributes:
        waiting: `Scheduler.waiting`, the requests that no engine answers yet.
        first_token_ns: The expected time to first token of the request that arrives; None if it is
            not known or not measured.
        idle: Whether nothing waits or runs.
    """

    waiting: int
    first_token_ns: float | None = None
    idle: bool = False


class Ending(Struct, frozen=True):
    """How an accepted request ended.

    Attributes:
        served: Whether it was answered in full.
        first_token_ns: Time from its arrival to its first token; None if there was none.
        output_tokens: Tokens that were answered.
        prompt_tokens: Of its prompt, as an engine counted them; 0 if none did.
        began: Whether an engine had begun it.
    """

    served: bool
    first_token_ns: int | None
    output_tokens: int
    prompt_tokens: int = 0
    began: bool = True


class Admission(Protocol):
    """Decides whether a request is accepted."""

    @property
    def follows(self) -> bool:
        """Whether it learns from what is told of accepted requests; if not, nobody need tell."""
        ...

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Return why a request that arrives now is rejected, or None to accept it."""
        ...

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Note that an accepted request was given to an engine; called once at most for each."""
        ...

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Note how an accepted request ended; called once for each."""
        ...


# `bounded`: requests are accepted until a given number wait.

_TOO_MANY_REQUESTS = 429


class BoundedQueue:
    """Accepts requests until `limit` of them wait.

    Raises:
        ConfigError: A bound is below 1.
    """

    follows = False

    def __init__(self, limit: int, *, retry_after_s: int = 1) -> None:
        for name, value in (("limit", limit), ("retry_after_s", retry_after_s)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        self._limit = limit
        self._retry_after_s = retry_after_s

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Reject once `limit` requests wait."""
        del ticket, now_ns
        if load.waiting < self._limit:
            return None
        reason = f"{load.waiting} requests wait already"
        return Refusal(_TOO_MANY_REQUESTS, reason, self._retry_after_s)

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Do nothing."""

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Do nothing: the rule depends on the present load only."""


# When the first token of a request that arrives now is to be expected.
#
# Three parts: the wait before prefill, by the requests ahead in the queue's order and the
# measured rate at which they start; the prefill, by its prompt and the measured time per token;
# and the rest (pool, KV transfer, first step), as it was lately. Those whose first token may be
# the prefiller's have a rest of their own, which is none if it is. All are means, so half of the
# requests take longer.

_S = 1_000_000_000
# Time with a queue that the rate of starts covers, and how much of it is needed to know the rate.
_WINDOW_NS = 10 * _S
_LEAST_NS = 1 * _S
# Requests that the other means cover.
_WINDOW_REQUESTS = 64


class _Mean:
    """A mean at first, an exponential average later; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, _WINDOW_REQUESTS)
        before = value if self.value is None else self.value
        self.value = before + (value - before) / self._count


class FirstTokens:
    """Measures what the time to first token consists of."""

    def __init__(self) -> None:
        # Starts of requests that had waited, and the time in which any waited; both decay.
        self._starts = self._backlog_ns = 0.0
        self._since_ns: int | None = None
        self._prefill_ns_per_token = _Mean()
        self._rest_ns = {early: _Mean() for early in (False, True)}

    def advance(self, now_ns: int, *, waiting: bool) -> None:
        """Note the time; `waiting` is whether anything waited before prefill until now."""
        since_ns, self._since_ns = self._since_ns, now_ns
        if waiting and since_ns is not None:
            passed_ns = now_ns - since_ns
            keep = exp(-passed_ns / _WINDOW_NS)
            self._starts *= keep
            # The integral of the weights, so that a steady rate is measured without bias.
            self._backlog_ns = keep * self._backlog_ns + _WINDOW_NS * (1 - keep)

    def started(self) -> None:
        """Note that a request that had waited before prefill waits no longer."""
        self._starts += 1

    def came(self, prompt_tokens: int, prefill_ns: int, rest_ns: int, *, early: bool) -> None:
        """Note a first token: what its prefill took, and what came after that; `early` as below."""
        self._prefill_ns_per_token.add(prefill_ns / prompt_tokens)
        self._rest_ns[early].add(rest_ns)

    def expected_ns(self, prompt_tokens: int, ahead: int, *, early: bool) -> float | None:
        """Return the expected time to first token; None while too little was measured.

        Args:
            prompt_tokens: Of the request.
            ahead: The requests that will start before it.
            early: Whether its first token may be the prefiller's.
        """
        per_token_ns, rest_ns = self._prefill_ns_per_token.value, self._rest_ns[early].value
        if per_token_ns is None or rest_ns is None:
            return None
        wait_ns = 0.0
        if ahead:
            if self._backlog_ns < _LEAST_NS or not self._starts:
                return None
            # It starts with the start after theirs.
            wait_ns = (ahead + 1) * self._backlog_ns / self._starts
        return wait_ns + per_token_ns * prompt_tokens + rest_ns


# `early`: a request that cannot have its first token in time is refused at once.
#
# It would wait, and be prefilled perhaps, to expire in the end. Refused at once it costs nothing,
# and its client can go elsewhere. Requests without a deadline, and those that arrive while
# nothing waits or runs, are accepted: otherwise a deployment that was slow once would never be
# measured again.

_UNAVAILABLE = 503
_NS_PER_S = 1_000_000_000
_LONGEST_S = 3600


class EarlyRefusal:
    """Refuses what comes too late.

    Args:
        within: Asked first.
    """

    def __init__(self, within: Admission) -> None:
        self._within = within
        self.follows = within.follows

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Reject a request whose first token is expected after its deadline."""
        refusal = self._within.offer(ticket, load, now_ns)
        expected_ns = load.first_token_ns
        if refusal is not None or ticket.deadline_ns is None or expected_ns is None:
            return refusal
        left_ns = ticket.deadline_ns - now_ns
        if load.idle or expected_ns <= left_ns:
            return None
        reason = (
            f"the first token is expected in {expected_ns / _NS_PER_S:.1f} s, "
            f"and due in {max(0, left_ns) / _NS_PER_S:.1f} s"
        )
        # If nobody comes meanwhile, the queue is by so much shorter then.
        retry_s = min(-(-int(expected_ns - left_ns) // _NS_PER_S), _LONGEST_S)
        return Refusal(_UNAVAILABLE, reason, max(1, retry_s), cause="deadline")

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Pass on."""
        self._within.began(ticket, now_ns)

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Pass on."""
        self._within.ended(ticket, ending, now_ns)
