"""What the driver keeps for all requests: who takes their reports, their names, retries and tokens."""

import asyncio
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, get_args
from unittest.mock import MagicMock

import pytest
from tests.support.played import in_real_time

from balanceroute.proxy.core.events import Eligible, PrefillerId, RankId, RequestId, Ticket
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.request.shared import (
    EngineSeen,
    KvAbandoned,
    KvMissing,
    LegFailed,
    LegSucceeded,
    PullFailed,
    RemotePrefillEnded,
    Report,
)
from balanceroute.proxy.live.scheduling.driver import (
    Feedback,
    RetryBudget,
    SessionTable,
    UniqueTokens,
)
from balanceroute.proxy.live.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session


# What sessions report and ask: every report reaches its part, and retries and prefillers are given out.


NUMBER, P, R = RequestId(3), PrefillerId(1), RankId(0)
TARGET = Target(Role.DECODE, "http://d0")


class Site:
    """Two prefillers and a rank; the parts behind the feedback note what they are told."""

    def __init__(self, ticket: Ticket | None = None) -> None:
        self.instances = Instances()
        self.instances.prefillers += [
            Prefiller(PrefillerId(i), f"p{i}", Target(Role.PREFILL, f"http://p{i}"), MagicMock())
            for i in range(2)
        ]
        self.instances.ranks.append(Rank(R, "d0", TARGET, MagicMock()))
        self.parts = MagicMock()
        session = SimpleNamespace(ticket=ticket or Ticket(2))
        parts: Any = self.parts
        self.feedback = Feedback(
            SimpleNamespace(live={NUMBER: session}),  # type: ignore[arg-type]
            self.instances,
            *(parts.progress, parts),
            transfers=parts.transfers,
            lost=parts.lost,
            admission=parts.admission,
            now_ns=lambda: 0,
        )

    def choose(self, other_than: PrefillerId | None = None) -> str | None:
        chosen = self.feedback.choose_prefiller(NUMBER, R, other_than)
        return None if chosen is None else chosen.name


def test_every_report_has_a_taker() -> None:
    assert set(Site().feedback._takers) == set(get_args(Report))


@pytest.mark.parametrize(
    ("report", "part"),
    [
        (LegSucceeded(TARGET), "health.succeeded"),
        (LegFailed(TARGET, Fault.RESET, "gone"), "health.failed"),
        (PullFailed(NUMBER, P, R, Fault.TIMEOUT, "late"), "transfers.failed"),
        (EngineSeen(P, "e"), "lost.engine_seen"),
        (KvMissing(P, "absent", "none"), "metrics.engines.left_no_kv"),
        (KvAbandoned("lost"), "metrics.legs.abandoned_lease"),
    ],
)
def test_a_report_goes_to_its_part_alone(report: Report, part: str) -> None:
    site = Site()
    site.feedback.take(report)
    if isinstance(report, LegFailed):  # Which is counted too.
        assert site.parts.mock_calls.pop(0)[0] == "metrics.engines.leg_failed"
    (call,) = site.parts.mock_calls
    assert call[0] == part
    prefiller, rank = site.instances.prefillers[P], site.instances.ranks[R]
    assert (
        call.args
        == {
            LegSucceeded: (TARGET,),
            LegFailed: (TARGET, Fault.RESET, "gone"),
            PullFailed: (NUMBER, prefiller, rank, Fault.TIMEOUT, "late"),
            EngineSeen: (prefiller, "e"),
            KvMissing: (prefiller.target, "absent"),
            KvAbandoned: ("lost",),
        }[type(report)]
    )


def test_who_answers_after_a_pull_has_pulled() -> None:
    site = Site()
    site.feedback.take(LegSucceeded(TARGET, (P, R)))
    prefiller, rank = site.instances.prefillers[P], site.instances.ranks[R]
    calls = [(call[0], call.args) for call in site.parts.mock_calls]
    assert calls == [
        ("health.succeeded", (TARGET,)),
        ("transfers.succeeded", (prefiller, rank)),
    ]


def test_only_retries_after_a_pull_from_a_prefiller_on_trial_are_free() -> None:
    site = Site()
    feedback = site.feedback
    while feedback.may_retry("decode", Fault.RESET, TARGET, P):
        pass
    assert not feedback.may_retry("decode", Fault.RESET, TARGET, None)
    site.instances.prefillers[P].kv_trial = True
    assert feedback.may_retry("decode", Fault.RESET, TARGET, P)
    assert not feedback.may_retry("decode", Fault.RESET, TARGET, PrefillerId(0))
    assert not feedback.may_retry("decode", Fault.RESET, TARGET, None)


@pytest.mark.parametrize("status", [Status.QUARANTINED, Status.REMOVED, Status.DRAINING])
def test_what_an_engine_leaves_is_free_while_another_one_of_its_role_serves(
    status: Status,
) -> None:
    site = Site()
    feedback, (first, second) = site.feedback, site.instances.prefillers
    while feedback.may_retry("prefill", Fault.RESET, first.target, None):
        pass
    first.status = status
    assert feedback.may_retry("prefill", Fault.RESET, first.target, None)
    assert not feedback.may_retry("prefill", Fault.RESET, second.target, None)
    # So is what a rank could not pull from it.
    assert feedback.may_retry("decode", Fault.SERVER_ERROR, None, first.id)
    assert not feedback.may_retry("decode", Fault.SERVER_ERROR, None, second.id)
    # Of another role nobody helps, and nobody helps where all are down.
    site.instances.ranks[R].status = status
    assert not feedback.may_retry("prefill", Fault.SERVER_ERROR, None, None)
    assert not feedback.may_retry("decode", Fault.RESET, TARGET, None)
    second.status = Status.QUARANTINED
    assert not feedback.may_retry("prefill", Fault.RESET, first.target, None)


def test_what_a_rank_leaves_that_ends_with_its_group_is_free() -> None:
    site = Site()
    other = Rank(RankId(1), "d1", Target(Role.DECODE, "http://d1"), MagicMock())
    site.instances.ranks.append(other)
    while site.feedback.may_retry("decode", Fault.RESET, TARGET, None):
        pass
    rank = site.instances.ranks[R]
    rank.still = rank.doomed = True
    assert site.feedback.may_retry("decode", Fault.RESET, TARGET, None)
    other.still = other.doomed = True
    assert not site.feedback.may_retry("decode", Fault.RESET, TARGET, None)


def test_a_remote_prefill_goes_to_the_prefiller_with_the_fewest_of_them_until_it_ends() -> None:
    site = Site()
    assert [site.choose(), site.choose(), site.choose()] == ["p0", "p1", "p0"]
    for _ in range(2):
        site.feedback.take(RemotePrefillEnded(PrefillerId(0)))
    assert site.choose() == "p0"
    assert [one.hand_offs for one in site.instances.prefillers] == [1, 1]


def test_another_prefiller_is_chosen_if_there_is_one() -> None:
    site = Site()
    assert site.choose(other_than=PrefillerId(0)) == "p1"
    site.instances.prefillers[1].status = Status.REMOVED
    assert site.choose(other_than=PrefillerId(0)) == "p0"
    site.instances.prefillers[0].crowded = True
    assert site.choose() == "p0"
    site.instances.prefillers[0].status = Status.REMOVED
    assert site.choose() is None


def test_a_prefiller_that_cannot_serve_the_request_is_not_chosen() -> None:
    eligible = Eligible(frozenset({PrefillerId(1)}), frozenset({R}))
    site = Site(Ticket(2, eligible=eligible))
    assert [site.choose(), site.choose()] == ["p1", "p1"]


# All live requests: their numbers, their names at the engines, and when none is left.


def add(table: SessionTable, request_id: str) -> "Session":
    record = RequestRecord(request_id, "/v1/completions", 0, 0.0)
    session = cast("Session", SimpleNamespace(number=table.next_number(), record=record))
    table.add(session)
    return session


def test_a_request_of_a_name_in_use_gets_another_one_at_the_engines() -> None:
    table = SessionTable(random.Random(1))
    assert table.engine_id("a") == "a"
    one, two = add(table, "a"), add(table, "a")
    assert (one.number, two.number) == (0, 1)
    table.remove(one.number, one.record)
    name = table.engine_id("a")
    assert name.startswith("a-")
    assert table.engine_id("a") != name
    table.remove(two.number, two.record)
    assert table.engine_id("a") == "a"
    assert table.idle


@in_real_time()
async def test_a_wait_for_the_last_request_ends_with_it() -> None:
    table = SessionTable(random.Random(1))
    await table.drained()
    session = add(table, "a")
    assert not table.idle
    drained = asyncio.ensure_future(table.drained())
    await asyncio.sleep(0)
    assert not drained.done()
    table.remove(session.number, session.record)
    await drained


# Tokens that name requests and transfers.


class Counted(random.Random):
    """Counts how often it is asked."""

    asked = 0

    def getrandbits(self, k: int, /) -> int:
        self.asked += 1
        return super().getrandbits(k)


def test_every_token_is_another_of_128_bits() -> None:
    token = UniqueTokens(random.Random(7))
    made = [token() for _ in range(1_000)]
    assert len(set(made)) == 1_000
    assert {len(one) for one in made} == {32}
    assert set("".join(made)) == set("0123456789abcdef")


def test_the_system_is_asked_once_for_many() -> None:
    rng = Counted(7)
    token = UniqueTokens(rng)
    for _ in range(128):
        token()
    assert rng.asked == 2


# The cap on retries.


def spend_all(budget: RetryBudget) -> int:
    count = 0
    while budget.spend():
        count += 1
    return count


def test_the_first_failures_may_be_retried() -> None:
    assert spend_all(RetryBudget()) == 10


def test_an_outage_is_retried_for_a_fifth_of_the_requests() -> None:
    budget = RetryBudget(reserve=0.0)
    retried = 0
    for _ in range(1_000):
        budget.earn()
        retried += spend_all(budget)
    assert 199 <= retried <= 200


def test_a_quiet_day_saves_up_no_storm() -> None:
    budget = RetryBudget(most=10.0)
    for _ in range(100_000):
        budget.earn()
    assert spend_all(budget) == 10


def test_nothing_is_spent_when_nothing_is_left() -> None:
    budget = RetryBudget(reserve=0.0, share=0.5)
    assert not budget.spend()
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
