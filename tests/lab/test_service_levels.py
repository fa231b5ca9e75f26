"""The figures of tenants and classes."""

import pytest
from rich.console import Console

from balanceroute.proxy.lab.service_levels import (
    GivenService,
    ServiceGroup,
    ServiceOutcome,
    ServiceTargets,
    as_rows,
    figures_of,
    make_table,
    mean_of,
)

A, B = ServiceGroup("a", 0), ServiceGroup("b", -1)


def outcome(
    group: ServiceGroup,
    ttft_s: float | None = 1.0,
    tpot_s: float | None = 0.1,
    *,
    finished: bool = True,
    refused: bool = False,
) -> ServiceOutcome:
    return ServiceOutcome(group, finished, refused, ttft_s, tpot_s)


@pytest.mark.parametrize(
    ("one", "good"),
    [
        (outcome(A, 2.0, 0.2), True),
        (outcome(A, 2.1, 0.1), False),
        (outcome(A, 1.0, 0.21), False),
        (outcome(A, 1.0, None), True),  # One token has no time between tokens.
        (outcome(A, 1.0, None, finished=False), False),
        (outcome(A, None, None, finished=False, refused=True), False),
    ],
)
def test_a_good_request_is_answered_in_full_and_in_time(one: ServiceOutcome, good: bool) -> None:
    assert ServiceTargets(2.0, 0.2).met_by(one) is good


def test_figures_are_by_tenant_and_class() -> None:
    outcomes = [
        outcome(A),
        outcome(A, 3.0),
        outcome(B, None, None, finished=False, refused=True),
        outcome(B, 1.0, None, finished=False),
    ]
    service = {A: GivenService(3, 30, 300.0), B: GivenService(1, 10, 700.0)}
    figures = figures_of(outcomes, service, ServiceTargets(2.0))
    assert list(figures) == [A, B]
    a, b = figures[A], figures[B]
    assert (a.requests, a.refused, a.unserved, a.goodput) == (2, 0, 0, 0.5)
    assert (b.requests, b.refused, b.unserved, b.goodput) == (2, 1, 1, 0.0)
    assert (a.share_requests, a.share_tokens, a.share_kv) == (0.75, 0.75, 0.3)
    assert a.ttft_s_p50 == 2.0
    assert a.ttft_s_p99 == pytest.approx(2.98)
    assert a.tpot_ms_p95 == pytest.approx(100.0)
    assert (b.ttft_s_p95, b.tpot_ms_p50) == (1.0, None)


def test_a_group_without_arrivals_has_no_goodput() -> None:
    figures = figures_of([], {A: GivenService()}, ServiceTargets())
    assert figures[A].goodput is None
    assert figures[A].share_kv is None


def test_means_are_over_the_runs_that_have_a_figure() -> None:
    runs = [
        figures_of([outcome(A, ttft_s)], {A: GivenService(1, 1, 1.0)}, ServiceTargets(2.0))
        for ttft_s in (1.0, 5.0)
    ]
    runs.append(figures_of([outcome(B, None, None, finished=False)], {}, ServiceTargets()))
    mean = mean_of(runs)
    assert list(mean) == [A, B]
    assert (mean[A].goodput, mean[A].ttft_s_p50, mean[A].requests) == (0.5, 3.0, 1.0)
    assert mean[B].ttft_s_p50 is None
    assert as_rows(mean)[1]["tenant"] == "b"
    assert as_rows(mean)[1]["class"] == -1


def test_the_table_names_targets_tenants_and_classes() -> None:
    figures = figures_of([outcome(A), outcome(ServiceGroup("", 0))], {}, ServiceTargets(2.0, 0.05))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(make_table({"br-h": figures}, ServiceTargets(2.0, 0.05)))
    text = capture.get()
    assert "TTFT up to 2 s, TPOT up to 50 ms" in text
    rows = [line.split() for line in text.splitlines() if "br-h" in line]
    assert [row[1:7] for row in rows] == [
        ["-", "0", "1", "0", "0", "0.0"],
        ["a", "0", "1", "0", "0", "0.0"],
    ]
