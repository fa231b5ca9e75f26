"""What sessions report and ask: every report reaches its part, and retries and prefillers are given out."""

from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest

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
from balanceroute.proxy.live.scheduling.driver import Feedback

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
    while feedback.may_retry("decode", Fault.RESET, P):
        pass
    assert not feedback.may_retry("decode", Fault.RESET, None)
    site.instances.prefillers[P].kv_trial = True
    assert feedback.may_retry("decode", Fault.RESET, P)
    assert not feedback.may_retry("decode", Fault.RESET, PrefillerId(0))
    assert not feedback.may_retry("decode", Fault.RESET, None)


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
