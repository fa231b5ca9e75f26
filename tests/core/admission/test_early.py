"""Early refusal: what is expected of a first token, and who is refused for it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.admission import (
    BoundedQueue,
    EarlyRefusal,
    Ending,
    FirstTokens,
    Load,
    Refusal,
)
from balanceroute.proxy.core.events import Admit, RequestArrived, RequestId, Tick, Ticket
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import QUEUE_ORDERS, fair_queueing
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig

S = 1_000_000_000


def measured(*, starts_per_s: float = 2.0, seconds: int = 40) -> FirstTokens:
    """Return what has seen starts at a rate, prefills of 1 ms per token, and 0.5 s after that."""
    first_tokens = FirstTokens()
    for number in range(round(seconds * starts_per_s)):
        first_tokens.advance(round(number * S / starts_per_s), waiting=True)
        first_tokens.started()
    first_tokens.came(100, 100_000_000, S // 2, early=False)
    return first_tokens


def test_the_parts_of_a_first_token_add_up() -> None:
    expected_ns = measured().expected_ns(1_000, ahead=9, early=False)
    # It is the tenth to start at two a second; then a prefill of 1 s, and the rest.
    assert expected_ns == pytest.approx(5 * S + S + S / 2, rel=0.02)
    assert measured().expected_ns(1_000, ahead=0, early=False) == pytest.approx(S + S / 2)


def test_room_that_admissions_make_is_used_in_the_same_tick_where_no_prefiller_is_needed() -> None:
    inputs = PolicyInputs(5, 1, PolicySettings(), random.Random(0), NoPrediction())
    scheduler = Scheduler(
        SchedulerConfig(ranks=5, batch_limit=1, pool_limit=2),
        make_policy("fifo", inputs),
        intake=Intake(first_tokens=FirstTokens()),
    )
    for number in range(6):
        scheduler.handle(RequestArrived(RequestId(number), Ticket(9, prefill=False)), now_ns=0)
    admitted = [one for one in scheduler.handle(Tick(), now_ns=0) if isinstance(one, Admit)]
    assert [one.request for one in admitted] == [0, 1, 2, 3, 4]
    assert len(scheduler.pool.entries) == 1
    scheduler.check()


def test_nothing_is_expected_before_it_was_measured() -> None:
    assert FirstTokens().expected_ns(10, ahead=0, early=False) is None
    first_tokens = FirstTokens()
    first_tokens.came(100, 100_000_000, S, early=False)
    assert first_tokens.expected_ns(100, ahead=0, early=False) is not None
    assert first_tokens.expected_ns(100, ahead=1, early=False) is None


def test_time_without_a_queue_says_nothing_about_the_rate() -> None:
    first_tokens = measured()
    before_ns = first_tokens.expected_ns(10, ahead=9, early=False)
    first_tokens.advance(10_000 * S, waiting=False)
    assert first_tokens.expected_ns(10, ahead=9, early=False) == before_ns


def test_a_queue_that_does_not_move_takes_longer_and_longer() -> None:
    first_tokens = measured()
    before_ns = first_tokens.expected_ns(10, ahead=1, early=False)
    first_tokens.advance(70 * S, waiting=True)
    after_ns = first_tokens.expected_ns(10, ahead=1, early=False)
    assert before_ns is not None
    assert after_ns is not None
    assert after_ns > 5 * before_ns


def offer(
    deadline_s: float | None, expected_s: float | None, *, idle: bool = False
) -> Refusal | None:
    deadline_ns = None if deadline_s is None else round((100 + deadline_s) * S)
    expected_ns = None if expected_s is None else expected_s * S
    rule = EarlyRefusal(BoundedQueue(10))
    return rule.offer(Ticket(1, deadline_ns=deadline_ns), Load(5, expected_ns, idle), 100 * S)


def test_the_hopeless_are_refused_and_told_when_to_come_again() -> None:
    refusal = offer(2.0, 6.5)
    assert refusal is not None
    assert (refusal.status, refusal.retry_after_s, refusal.cause) == (503, 5, "deadline")
    assert refusal.reason == "the first token is expected in 6.5 s, and due in 2.0 s"


@pytest.mark.parametrize(
    ("deadline_s", "expected_s", "idle"),
    [(7.0, 6.5, False), (None, 6.5, False), (2.0, None, False), (2.0, 6.5, True)],
)
def test_all_others_are_accepted(
    deadline_s: float | None, expected_s: float | None, idle: bool
) -> None:
    assert offer(deadline_s, expected_s, idle=idle) is None


def test_the_rule_within_is_asked_first_and_told_of_ends() -> None:
    told: list[str] = []

    class Within(BoundedQueue):
        def began(self, ticket: Ticket, now_ns: int) -> None:
            told.append("began")

        def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
            told.append("ended")

    rule = EarlyRefusal(Within(1))
    refusal = rule.offer(Ticket(1, deadline_ns=0), Load(5, 9.0 * S), 0)
    assert refusal is not None
    assert refusal.status == 429
    rule.began(Ticket(1), 0)
    rule.ended(Ticket(1), Ending(True, None, 1), 0)
    assert told == ["began", "ended"]


TICKETS = st.lists(
    st.builds(
        Ticket,
        st.integers(1, 100),
        level=st.integers(-2, 2),
        deadline_ns=st.none() | st.integers(0, 100),
        predicted_tokens=st.integers(1, 100),
    ),
    min_size=1,
    max_size=20,
)


@given(tickets=TICKETS, order=st.sampled_from(sorted(QUEUE_ORDERS)))
def test_as_many_go_ahead_as_the_order_says(tickets: list[Ticket], order: str) -> None:
    queue = QUEUE_ORDERS[order]()
    for number, ticket in enumerate(tickets[:-1]):
        queue.add(RequestId(number), ticket)
    expected = queue.ahead(tickets[-1])
    newest = RequestId(len(tickets))
    queue.add(newest, tickets[-1])
    assert expected == len(queue.ahead_of(newest))


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}
COSTS = {"a": 10, "b": 40, "c": 10}


@pytest.mark.parametrize("cost", ["request", "prompt-tokens"])
@pytest.mark.parametrize("tenant", ["a", "b", "c", "new"])
def test_as_many_go_ahead_as_start_before_it(cost: str, tenant: str) -> None:
    """Three tenants always wait, and start as their weights and costs let them."""
    queue = fair_queueing(cost, QUEUE_ORDERS["fcfs"]).make_order()
    numbers = map(RequestId, range(10_000))

    def come(name: str) -> RequestId:
        request = next(numbers)
        prompt_tokens, weight = COSTS.get(name, 20), WEIGHTS.get(name, 1.0)
        queue.add(request, Ticket(prompt_tokens, tenant=name, weight=weight))
        owners[request] = name
        return request

    def start() -> RequestId:
        request = queue.head()
        assert request is not None
        queue.serve(request)
        # Whoever starts sends another one.
        come(owners.pop(request))
        return request

    owners: dict[RequestId, str] = {}
    for name in [*"abc"] * 10:
        come(name)
    for _ in range(300):
        start()
    expected = queue.ahead(Ticket(20, tenant=tenant, weight=WEIGHTS.get(tenant, 1.0)))
    newest = come(tenant)
    real = next(started for started in range(1_000) if start() == newest)
    assert expected == pytest.approx(real, rel=0.25, abs=3)


def test_one_tenant_alone_is_first_come_first_served() -> None:
    queue = fair_queueing("request", QUEUE_ORDERS["fcfs"]).make_order()
    ticket = Ticket(1, tenant="a", weight=3.0)
    for number in range(20):
        queue.add(RequestId(number), ticket)
    for number in range(20):
        assert queue.ahead(ticket) == 20 - number
        queue.serve(RequestId(number))
    assert queue.ahead(ticket) == 0


def test_before_anything_started_only_a_tenants_own_go_ahead() -> None:
    queue = fair_queueing("request", QUEUE_ORDERS["fcfs"]).make_order()
    for number in range(30):
        queue.add(RequestId(number), Ticket(1, tenant="ab"[number % 2]))
    assert queue.ahead(Ticket(1, tenant="a")) == 15
