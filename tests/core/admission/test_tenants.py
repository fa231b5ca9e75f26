"""Tenants: what each limit rejects, with which status, and what it says of coming again."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from balanceroute.proxy.core.admission import (
    BoundedQueue,
    Ending,
    Load,
    Rate,
    Refusal,
    TenantLimits,
)
from balanceroute.proxy.core.admission.tenants import UNSTATED_OUTPUT_TOKENS, Tenants, stated_tokens
from balanceroute.proxy.core.events import Ticket

S = 1_000_000_000
ROOM = Load(waiting=0)
A = Ticket(10, max_tokens=20, tenant="a")
SERVED = Ending(served=True, first_token_ns=5, output_tokens=20, prompt_tokens=10)


def tenants(limits: TenantLimits, **others: TenantLimits) -> Tenants:
    return Tenants(BoundedQueue(100), {"a": limits, **others}, now_ns=0)


def refused(admission: Tenants, ticket: Ticket = A, now_ns: int = 0) -> Refusal:
    refusal = admission.offer(ticket, ROOM, now_ns)
    assert refusal is not None
    return refusal


def accept(admission: Tenants, count: int = 1, ticket: Ticket = A, now_ns: int = 0) -> None:
    for _ in range(count):
        assert admission.offer(ticket, ROOM, now_ns) is None


def test_a_tenant_without_limits_is_never_rejected() -> None:
    admission = tenants(TenantLimits())
    accept(admission, 1000)
    account = admission.accounts["a"]
    assert (account.in_flight.count, account.waiting.count) == (1000, 1000)
    assert account.allowances(0) == {}


def test_requests_beyond_the_rate_may_come_again_when_the_bucket_has_one() -> None:
    admission = tenants(TenantLimits(requests=Rate(6, 2)))
    accept(admission, 2)
    refusal = refused(admission, now_ns=1)
    assert (refusal.status, refusal.retry_after_s, refusal.cause) == (429, 10, "requests")
    assert "rate of 6 requests per minute" in refusal.reason
    refused(admission, now_ns=10 * S - 1)
    accept(admission, now_ns=10 * S)


def test_tokens_count_prompt_and_answer() -> None:
    admission = tenants(TenantLimits(tokens=Rate(60, 60)))
    accept(admission, 2)
    refusal = refused(admission)
    assert (refusal.status, refusal.retry_after_s, refusal.cause) == (429, 30, "tokens")
    accept(admission, now_ns=30 * S)


@pytest.mark.parametrize(
    ("ticket", "tokens"),
    [
        (Ticket(10, max_tokens=20, expected_tokens=5), 30),
        (Ticket(10, expected_tokens=5), 15),
        (Ticket(10), 10 + UNSTATED_OUTPUT_TOKENS),
        (Ticket(10, slots=3, max_tokens=20), 70),
    ],
)
def test_a_request_is_charged_what_it_says_that_it_may_have(ticket: Ticket, tokens: int) -> None:
    assert stated_tokens(ticket) == tokens


def test_a_request_that_can_never_pass_is_told_so() -> None:
    admission = tenants(TenantLimits(tokens=Rate(60, 29)))
    refusal = refused(admission)
    assert (refusal.status, refusal.retry_after_s, refusal.cause) == (413, None, "too_large")
    assert "30 tokens" in refusal.reason
    assert "29 at once" in refusal.reason


@pytest.mark.parametrize(
    ("ending", "left"),
    [
        (SERVED, 70),
        (structs.replace(SERVED, output_tokens=3), 87),
        # Longer than it said: what is too much is taken afterwards.
        (structs.replace(SERVED, output_tokens=300), -210),
        # It waited in vain.
        (Ending(served=False, first_token_ns=None, output_tokens=0, began=False), 100),
        # Its prompt was being computed when its client left.
        (Ending(served=False, first_token_ns=None, output_tokens=0), 90),
    ],
)
def test_the_end_settles_what_was_charged(ending: Ending, left: int) -> None:
    admission = tenants(TenantLimits(tokens=Rate(60, 100)))
    accept(admission)
    bucket = admission.accounts["a"].tokens
    assert bucket is not None
    assert bucket.available(0) == 70
    if ending.began:
        admission.began(A, 0)
    admission.ended(A, ending, 0)
    assert bucket.available(0) == left
    assert admission.accounts["a"].allowances(0)["tokens"].remaining == max(0, left)


def test_requests_in_flight_are_counted_until_they_end() -> None:
    admission = tenants(TenantLimits(concurrency=2))
    accept(admission, 2)
    admission.began(A, S)
    refusal = refused(admission, now_ns=2 * S)
    assert (refusal.status, refusal.cause) == (429, "concurrency")
    # None has ended yet, so nobody knows when one will.
    assert refusal.retry_after_s == 60
    admission.ended(A, SERVED, 4 * S)
    accept(admission, now_ns=4 * S)
    # One in four seconds.
    assert refused(admission, now_ns=4 * S).retry_after_s == 4


def test_a_full_queue_says_how_fast_it_moves() -> None:
    admission = tenants(TenantLimits(queue_limit=3))
    accept(admission, 3)
    assert refused(admission).cause == "queue"
    admission.began(A, 5 * S)
    accept(admission, now_ns=5 * S)
    refusal = refused(admission, now_ns=5 * S)
    assert (refusal.status, refusal.retry_after_s) == (429, 5)
    assert "3 requests of the tenant wait already" in refusal.reason


def test_what_the_deployment_has_no_room_for_is_an_overload() -> None:
    admission = tenants(TenantLimits(requests=Rate(60, 1)))
    refusal = admission.offer(A, Load(waiting=100), 0)
    assert refusal == Refusal(503, "100 requests wait already", 1, "overload")
    # It cost the tenant nothing.
    accept(admission)


def test_tenants_do_not_share_their_limits() -> None:
    admission = tenants(TenantLimits(concurrency=1), b=TenantLimits(concurrency=1))
    accept(admission)
    accept(admission, ticket=structs.replace(A, tenant="b"))
    refused(admission)


def test_allowances_tell_limit_rest_and_time_until_all_is_there() -> None:
    admission = tenants(TenantLimits(requests=Rate(60, 5), tokens=Rate(600, 100)))
    accept(admission)
    allowances = admission.accounts["a"].allowances(0)
    assert allowances == {"requests": (5, 4, S), "tokens": (100, 70, 3 * S)}


def test_other_limits_keep_what_is_in_flight_and_what_was_taken() -> None:
    admission = tenants(TenantLimits(requests=Rate(60, 5), concurrency=9))
    accept(admission, 4)
    admission.change({"a": TenantLimits(requests=Rate(60, 5), concurrency=4)}, 0)
    assert refused(admission).cause == "concurrency"
    admission.change({"a": TenantLimits(requests=Rate(60, 5))}, 0)
    accept(admission)
    assert refused(admission).cause == "requests"


def test_a_tenant_that_nobody_knows_is_let_in_nowhere() -> None:
    admission = tenants(TenantLimits())
    refusal = refused(admission, structs.replace(A, tenant="b"))
    assert (refusal.status, refusal.cause) == (401, "unknown")
    assert admission.offer_alone("b", 0) == refusal


def test_requests_that_the_scheduler_never_knows_count_without_waiting() -> None:
    limits = TenantLimits(requests=Rate(60, 5), tokens=Rate(60, 50), concurrency=2, queue_limit=1)
    admission = tenants(limits)
    for _ in range(2):
        assert admission.offer_alone("a", 0) is None
    account = admission.accounts["a"]
    assert (account.in_flight.count, account.waiting.count) == (2, 0)
    assert admission.offer_alone("a", 0) == refused(admission)
    admission.ended_alone("a", 80, 0)
    # Their tokens are taken at the end, and then the bucket is in debt.
    refusal = admission.offer_alone("a", 0)
    assert refusal is not None
    assert (refusal.cause, refusal.retry_after_s) == ("tokens", 30)
    admission.ended_alone("a", 0, 0)
    assert admission.offer_alone("a", 30 * S) is None


def test_requests_of_a_tenant_that_is_gone_go_on() -> None:
    admission = tenants(TenantLimits(concurrency=5), b=TenantLimits())
    accept(admission, 2)
    admission.change({"b": TenantLimits()}, 0)
    admission.began(A, 1)
    admission.ended(A, SERVED, 2)
    # It comes back: the one that is left still counts.
    admission.change({"a": TenantLimits(concurrency=1)}, 3)
    assert refused(admission, now_ns=3).cause == "concurrency"
    admission.change({}, 4)
    admission.ended(A, structs.replace(SERVED, began=False), 5)
    with pytest.raises(KeyError):
        admission.accounts["a"]


LIMITS = st.builds(
    TenantLimits,
    requests=st.none() | st.builds(Rate, st.integers(1, 600), st.integers(1, 5)),
    tokens=st.none() | st.builds(Rate, st.integers(1, 6000), st.integers(1, 400)),
    concurrency=st.none() | st.integers(1, 4),
    queue_limit=st.none() | st.integers(1, 4),
)


class Machine(RuleBasedStateMachine):
    """Random requests of two tenants whose limits change, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.limits = {"a": TenantLimits(), "b": TenantLimits()}
        self.admission = Tenants(BoundedQueue(10), self.limits, 0)
        self.live: list[tuple[Ticket, bool]] = []
        self.alone: list[str] = []
        # Since the tenant's limits last changed: the time, requests granted, tokens granted less
        # those that came back.
        self.since: dict[str, tuple[int, int, int]] = {}

    def count(self, tenant: str, *, waiting: bool = False) -> int:
        known = sum(one.tenant == tenant and not (waiting and began) for one, began in self.live)
        return known + (0 if waiting else self.alone.count(tenant))

    @rule(ns=st.integers(0, 60 * S))
    def passes(self, ns: int) -> None:
        self.now_ns += ns

    @rule(
        ticket=st.builds(
            Ticket,
            st.integers(1, 200),
            slots=st.integers(1, 2),
            max_tokens=st.none() | st.integers(1, 100),
            expected_tokens=st.none() | st.integers(1, 100),
            tenant=st.sampled_from("ab"),
        )
    )
    def asks(self, ticket: Ticket) -> None:
        tenant, limits = ticket.tenant, self.limits[ticket.tenant]
        load = Load(sum(not began for _, began in self.live))
        refusal = self.admission.offer(ticket, load, self.now_ns)
        if refusal is not None:
            if refusal.retry_after_s is not None and refusal.cause in ("requests", "tokens"):
                # Honest: with nothing else in the way, that is soon enough.
                account = self.admission.accounts[tenant]
                then_ns = self.now_ns + refusal.retry_after_s * S
                bucket = account.requests if refusal.cause == "requests" else account.tokens
                amount = 1 if refusal.cause == "requests" else stated_tokens(ticket)
                assert bucket is not None
                assert self.now_ns + bucket.wait_ns(amount, self.now_ns) <= then_ns
            return
        assert limits.concurrency is None or self.count(tenant) < limits.concurrency
        assert limits.queue_limit is None or self.count(tenant, waiting=True) < limits.queue_limit
        self.live.append((ticket, False))
        since_ns, requests, tokens = self.since.get(tenant, (0, 0, 0))
        requests, tokens = requests + 1, tokens + stated_tokens(ticket)
        self.since[tenant] = since_ns, requests, tokens
        for rate, granted in ((limits.requests, requests), (limits.tokens, tokens)):
            if rate is not None:
                most = rate.per_minute * (self.now_ns - since_ns) + rate.burst * 60 * S
                assert granted * 60 * S <= most

    @rule(tenant=st.sampled_from("ab"))
    def asks_alone(self, tenant: str) -> None:
        limit = self.limits[tenant].concurrency
        if self.admission.offer_alone(tenant, self.now_ns) is None:
            assert limit is None or self.count(tenant) < limit
            self.alone.append(tenant)
            since_ns, requests, granted = self.since.get(tenant, (0, 0, 0))
            self.since[tenant] = since_ns, requests + 1, granted
            rate = self.limits[tenant].requests
            if rate is not None:
                most = rate.per_minute * (self.now_ns - since_ns) + rate.burst * 60 * S
                assert (requests + 1) * 60 * S <= most

    @precondition(lambda self: self.alone)
    @rule(tokens=st.integers(0, 300))
    def ends_alone(self, tokens: int) -> None:
        self.admission.ended_alone(self.alone.pop(), tokens, self.now_ns)

    @precondition(lambda self: any(not began for _, began in self.live))
    @rule(which=st.integers(0, 100))
    def begins(self, which: int) -> None:
        fresh = [i for i, (_, began) in enumerate(self.live) if not began]
        place = fresh[which % len(fresh)]
        ticket = self.live[place][0]
        self.live[place] = ticket, True
        self.admission.began(ticket, self.now_ns)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), prompt=st.integers(0, 200), output=st.integers(0, 300))
    def ends(self, which: int, prompt: int, output: int) -> None:
        ticket, began = self.live.pop(which % len(self.live))
        prompt, output = (prompt, output) if began else (0, 0)
        ending = Ending(
            served=began,
            first_token_ns=None,
            output_tokens=output,
            prompt_tokens=prompt,
            began=began,
        )
        account = self.admission.accounts[ticket.tenant]
        bucket = account.tokens
        before = 0 if bucket is None else bucket.available(self.now_ns)
        self.admission.ended(ticket, ending, self.now_ns)
        if bucket is not None and ticket.tenant in self.since:
            since_ns, requests, tokens = self.since[ticket.tenant]
            # What would make the bucket overflow is lost, and that is on the safe side.
            tokens -= bucket.available(self.now_ns) - before
            self.since[ticket.tenant] = since_ns, requests, tokens

    @rule(tenant=st.sampled_from("ab"), limits=LIMITS)
    def changes(self, tenant: str, limits: TenantLimits) -> None:
        self.limits = {**self.limits, tenant: limits}
        self.admission.change(self.limits, self.now_ns)
        self.since[tenant] = self.now_ns, 0, 0

    @rule(tenant=st.sampled_from("ab"))
    def goes_and_returns(self, tenant: str) -> None:
        others = {name: one for name, one in self.limits.items() if name != tenant}
        self.admission.change(others, self.now_ns)
        self.admission.change(self.limits, self.now_ns)
        self.since[tenant] = self.now_ns, 0, 0

    @invariant()
    def counts_are_those_of_the_requests(self) -> None:
        for tenant in self.limits:
            account = self.admission.accounts[tenant]
            assert account.in_flight.count == self.count(tenant)
            assert account.waiting.count == self.count(tenant, waiting=True)
            for allowance in account.allowances(self.now_ns).values():
                assert 0 <= allowance.remaining <= allowance.limit

    def teardown(self) -> None:
        while self.live:
            self.ends(0, 1, 1)
        while self.alone:
            self.ends_alone(1)
        self.counts_are_those_of_the_requests()


TestTenants = Machine.TestCase
