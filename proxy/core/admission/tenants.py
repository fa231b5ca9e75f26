"""Tenants: the limits of each, within those of the whole deployment.

A request takes one from its tenant's bucket of requests, and its prompt with the most tokens that it may
answer from the bucket of tokens. When it ends, it gives back the tokens that it did not use, or takes
those that it used beyond, so that the bucket may be in debt. So over any time the tokens of a tenant exceed
rate x time + burst at most by the tokens that its requests in flight use beyond what they stated.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, expm1, inf

from balanceroute.proxy.core.admission.rules import (
    Admission,
    Allowance,
    Ending,
    Load,
    Rate,
    Refusal,
    TenantLimits,
)
from balanceroute.proxy.core.events import Ticket

# A token bucket: it allows a steady rate, and bursts of a given size.
#
# It counts in integers, so that over any time it grants at most rate x time + burst, exactly.

# A bucket counts in these parts, of which each nanosecond adds `per_minute`.
_PARTS = 60_000_000_000


class Bucket:
    """Refills from `now_ns` on; full at first. Times never go back."""

    __slots__ = ("_level", "_since_ns", "rate")

    def __init__(self, rate: Rate, now_ns: int) -> None:
        self.rate = rate
        self._level = rate.burst * _PARTS
        self._since_ns = now_ns

    def available(self, now_ns: int) -> int:
        """Return the amount that is available now; negative for a debt."""
        self._refill(now_ns)
        return self._level // _PARTS

    def take(self, amount: int, now_ns: int) -> None:
        """Take an amount, even beyond what is available; a negative one gives back."""
        self._refill(now_ns)
        self._level = min(self._level - amount * _PARTS, self.rate.burst * _PARTS)

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """Return the time until so much is available; 0 for now.

        The caller checks that `amount` does not exceed the burst: more is never available.
        """
        self._refill(now_ns)
        return max(0, -((self._level - amount * _PARTS) // self.rate.per_minute))

    def change(self, rate: Rate, now_ns: int) -> None:
        """Refill at another rate from now on."""
        self._refill(now_ns)
        self._level = min(self._level, rate.burst * _PARTS)
        self.rate = rate

    def _refill(self, now_ns: int) -> None:
        assert now_ns >= self._since_ns, f"time went back from {self._since_ns} to {now_ns}"
        grown = self._level + (now_ns - self._since_ns) * self.rate.per_minute
        self._level = min(grown, self.rate.burst * _PARTS)
        self._since_ns = now_ns


# How many requests a tenant has in one place, and how soon they leave it: the basis of `Retry-After`.

# Time constant of the mean.
_MEMORY_NS = 30_000_000_000


class TenantOccupancy:
    """Counts the requests in one place, and measures the rate at which they leave it."""

    __slots__ = ("_busy_ns", "_score", "_scored_ns", "_since_ns", "count")

    def __init__(self) -> None:
        self.count = 0
        self._since_ns = 0
        # Time with any request there: an empty queue does not show how fast it empties.
        self._busy_ns = self._scored_ns = 0
        self._score = 0.0

    def enter(self, now_ns: int) -> None:
        self._pass(now_ns)
        self.count += 1

    def leave(self, now_ns: int) -> None:
        assert self.count, "no request is there"
        self._pass(now_ns)
        self.count -= 1
        self._score = self._score * exp((self._scored_ns - self._busy_ns) / _MEMORY_NS) + 1.0
        self._scored_ns = self._busy_ns

    def wait_ns(self, places: int, now_ns: int) -> float:
        """Return the time in which so many requests will leave; infinite if none ever did."""
        self._pass(now_ns)
        score = self._score * exp((self._scored_ns - self._busy_ns) / _MEMORY_NS)
        if not score:
            return inf
        # In a past that is shorter than the memory the same rate scores less.
        seen = -expm1(-self._busy_ns / _MEMORY_NS)
        return places * _MEMORY_NS * seen / score

    def _pass(self, now_ns: int) -> None:
        if self.count:
            self._busy_ns += now_ns - self._since_ns
        self._since_ns = now_ns


# For a sequence of a request without a limit.
UNSTATED_OUTPUT_TOKENS = 256
_NS_PER_S = 1_000_000_000
# A rate of departures says nothing of times beyond it.
_LONGEST_S = 60
# Its key was good when the request came in, and the file has changed since.
_UNKNOWN = Refusal(401, "the key is not valid any more", None, "unknown")


class Account:
    __slots__ = ("in_flight", "limits", "requests", "tokens", "waiting")

    def __init__(self, limits: TenantLimits, now_ns: int) -> None:
        self.limits = TenantLimits()  # Those in force.
        self.in_flight = TenantOccupancy()  # Requests accepted and not ended.
        self.waiting = TenantOccupancy()  # Those of them that no engine has begun.
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.change(limits, now_ns)

    def change(self, limits: TenantLimits, now_ns: int) -> None:
        """Take other limits; counts and buckets stay."""
        self.limits = limits
        self.requests = _changed(self.requests, limits.requests, now_ns)
        self.tokens = _changed(self.tokens, limits.tokens, now_ns)

    def refuse(self, tokens: int, now_ns: int) -> Refusal | None:
        """Return why a request of so many tokens is rejected now, or None."""
        limits = self.limits
        if limits.tokens is not None and tokens > limits.tokens.burst:
            reason = (
                f"the request may have {tokens} tokens, prompt and answer, and its tenant may have "
                f"{limits.tokens.burst} at once: shorten the prompt or lower max_tokens"
            )
            return Refusal(413, reason, None, cause="too_large")
        for name, place, limit, what in (
            ("concurrency", self.in_flight, limits.concurrency, "are in flight"),
            ("queue", self.waiting, limits.queue_limit, "wait"),
        ):
            if limit is not None and place.count >= limit:
                reason = f"{place.count} requests of the tenant {what} already"
                wait_ns = place.wait_ns(place.count - limit + 1, now_ns)
                return Refusal(429, reason, _seconds(wait_ns), cause=name)
        for name, bucket, amount in (
            ("requests", self.requests, 1),
            ("tokens", self.tokens, tokens),
        ):
            wait_ns = 0 if bucket is None else bucket.wait_ns(amount, now_ns)
            if bucket is not None and wait_ns:
                reason = (
                    f"the tenant's rate of {bucket.rate.per_minute} {name} per minute is used up"
                )
                return Refusal(429, reason, _ceiling(wait_ns), cause=name)
        return None

    def accept(self, tokens: int, now_ns: int, *, waits: bool) -> None:
        """Count a request of so many tokens that was not refused, and that may have to wait."""
        self.in_flight.enter(now_ns)
        if waits:
            self.waiting.enter(now_ns)
        if self.requests is not None:
            self.requests.take(1, now_ns)
        if self.tokens is not None:
            self.tokens.take(tokens, now_ns)

    def allowances(self, now_ns: int) -> dict[str, Allowance]:
        """Return the rest of each rate that has a limit: `requests`, `tokens`."""
        buckets = {"requests": self.requests, "tokens": self.tokens}
        return {
            name: Allowance(
                bucket.rate.burst,
                max(0, bucket.available(now_ns)),
                bucket.wait_ns(bucket.rate.burst, now_ns),
            )
            for name, bucket in buckets.items()
            if bucket is not None
        }


class Tenants:
    """Accepts requests within their tenant's limits, if another rule accepts them too.

    Args:
        within: A rule that decides last. Its refusals are an overload of the deployment, not of the tenant:
            the status is then 503.
        limits: By tenant.
        now_ns: The present.
        accounts: To share with the tenants of another deployment; None for new ones.
    """

    follows = True

    def __init__(
        self,
        within: Admission,
        limits: Mapping[str, TenantLimits],
        now_ns: int,
        accounts: dict[str, Account] | None = None,
    ) -> None:
        self._within = within
        # Of all tenants with limits, and of those that are gone but for their requests in flight.
        self.accounts: dict[str, Account] = {} if accounts is None else accounts
        self._known = limits
        self.change(limits, now_ns)

    def change(self, limits: Mapping[str, TenantLimits], now_ns: int) -> None:
        """Take other limits. Requests in flight go on, also those of tenants that are gone."""
        self._known = limits
        for tenant, account in list(self.accounts.items()):
            if tenant not in limits and not account.in_flight.count:
                del self.accounts[tenant]
        for tenant, one in limits.items():
            if tenant in self.accounts:
                self.accounts[tenant].change(one, now_ns)
            else:
                self.accounts[tenant] = Account(one, now_ns)

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        account = self.accounts.get(ticket.tenant)
        if account is None:
            return _UNKNOWN
        tokens = stated_tokens(ticket)
        refusal = account.refuse(tokens, now_ns)
        if refusal is None:
            refusal = self._within.offer(ticket, load, now_ns)
            if refusal is not None:
                return replace(refusal, status=503)
            account.accept(tokens, now_ns, waits=True)
        return refusal

    def began(self, ticket: Ticket, now_ns: int) -> None:
        self.accounts[ticket.tenant].waiting.leave(now_ns)
        self._within.began(ticket, now_ns)

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Take the tokens that the request really had, and forget it."""
        if not ending.began:
            self.accounts[ticket.tenant].waiting.leave(now_ns)
        self._left(ticket.tenant, _real_tokens(ticket, ending) - stated_tokens(ticket), now_ns)
        self._within.ended(ticket, ending, now_ns)

    def refuse_early(self, tenant: str, now_ns: int) -> Refusal | None:
        """Return why any request of the tenant is rejected now, or None; `offer` still has to follow."""
        account = self.accounts.get(tenant)
        return _UNKNOWN if account is None else account.refuse(0, now_ns)

    def offer_alone(self, tenant: str, now_ns: int) -> Refusal | None:
        """Count a request that the scheduler never gets, or return why its tenant's limits reject it.

        Its tokens are unknown until it ends, so it only needs a bucket that is not in debt.
        """
        account = self.accounts.get(tenant)
        if account is None:
            return _UNKNOWN
        refusal = account.refuse(0, now_ns)
        if refusal is None:
            account.accept(0, now_ns, waits=False)
        return refusal

    def ended_alone(self, tenant: str, tokens: int, now_ns: int) -> None:
        """Take the tokens of a request that `offer_alone` accepted."""
        self._left(tenant, tokens, now_ns)

    def _left(self, tenant: str, tokens: int, now_ns: int) -> None:
        account = self.accounts[tenant]
        account.in_flight.leave(now_ns)
        if account.tokens is not None:
            account.tokens.take(tokens, now_ns)
        if tenant not in self._known and not account.in_flight.count:
            del self.accounts[tenant]


def stated_tokens(ticket: Ticket) -> int:
    """Return the tokens that a request may have: its prompt and the most that it may answer.

    Without a limit the answer has as many as its client expects, else a constant. Sequences share the prompt.
    """
    output = ticket.max_tokens or ticket.expected_tokens or UNSTATED_OUTPUT_TOKENS
    return ticket.prompt_tokens + ticket.slots * output


def _real_tokens(ticket: Ticket, ending: Ending) -> int:
    # A client that leaves during its prefill is charged for the prompt.
    prompt_tokens = ending.prompt_tokens or (ticket.prompt_tokens if ending.began else 0)
    return prompt_tokens + ending.output_tokens


def _changed(bucket: Bucket | None, rate: Rate | None, now_ns: int) -> Bucket | None:
    if rate is None:
        return None
    if bucket is None:
        return Bucket(rate, now_ns)
    bucket.change(rate, now_ns)
    return bucket


def _ceiling(wait_ns: int) -> int:
    """Return a time in whole seconds, at least 1: `Retry-After` has no fractions."""
    return max(1, -(-wait_ns // _NS_PER_S))


def _seconds(wait_ns: float) -> int:
    return _ceiling(round(min(wait_ns, _LONGEST_S * _NS_PER_S)))
