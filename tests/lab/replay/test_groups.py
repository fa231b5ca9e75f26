"""Tenants and classes of a trace in a replay: the headers that are sent, and the figures."""

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.replay.figures import ReplayFault, RequestSample, group_figures
from balanceroute.proxy.lab.replay.requests import PlannedRequest, check, headers_of, plan
from balanceroute.proxy.lab.service_levels import ServiceGroup, ServiceTargets
from balanceroute.traces import TraceRequest

S = 1_000_000_000
KEYS = {"acme": "sk-1", "batch": "sk-2"}


def planned(tenant: str, level: int = 0, deadline_s: float | None = None) -> PlannedRequest:
    deadline_ns = None if deadline_s is None else round(deadline_s * S)
    return PlannedRequest(0, 0, 100, 11, tenant=tenant, level=level, deadline_ns=deadline_ns)


def answered(
    request: PlannedRequest, sent_s: float, first_s: float, last_s: float
) -> RequestSample:
    sample = RequestSample(request, round(sent_s * S), round(sent_s * S))
    sample.first_ns, sample.last_ns = round(first_s * S), round(last_s * S)
    sample.end_ns = sample.last_ns
    sample.events = sample.output_tokens = 11
    return sample


def refused(request: PlannedRequest, sent_s: float, kind: str) -> RequestSample:
    sample = RequestSample(request, round(sent_s * S), round(sent_s * S))
    sample.end_ns, sample.fault = sample.sent_ns, ReplayFault(kind, "no")
    return sample


def test_the_plan_keeps_whose_and_how_urgent_a_request_is() -> None:
    trace = [TraceRequest(0, 5, 6, tenant="acme", level=-2, deadline_ns=7 * S)]
    (request,) = plan(trace)
    assert request.group == ServiceGroup("acme", -2)
    assert request.deadline_ns == 7 * S


def test_a_request_says_whose_it_is_and_how_urgent() -> None:
    headers = headers_of(planned("acme", -2, 3.0), KEYS, time_scale=2.0)
    assert headers == [
        (b"authorization", b"Bearer sk-1"),
        (b"priority", b"u=1"),
        (b"x-request-deadline-ms", b"1500"),
    ]
    assert headers_of(planned("acme"), {}, time_scale=1.0) == []
    # More than a day is no deadline, and less than a millisecond is one.
    assert headers_of(planned("acme", 0, 1e6), {}, time_scale=1.0) == []
    assert headers_of(planned("acme", 0, 1e-6), {}, time_scale=1.0) == [
        (b"x-request-deadline-ms", b"1")
    ]


def test_a_turn_says_which_conversation_it_is_of() -> None:
    trace = [TraceRequest(0, 5, 6, session="chat 1\n\u00e9")]
    (request,) = plan(trace)
    headers = headers_of(request, {}, time_scale=1.0)
    assert headers == [(b"x-session-id", b"chat%201%0A%C3%A9")]


def test_what_has_no_header_is_refused_before_anything_is_sent() -> None:
    check([planned("acme", -3), planned("batch", 4)], KEYS)
    check([planned("other")], {})
    with pytest.raises(ConfigError, match="no key of the trace's tenant 'other'"):
        check([planned("other")], KEYS)
    for level in (-4, 5):
        with pytest.raises(ConfigError, match=f"class {level} of the trace: the header Priority"):
            check([planned("acme", level)], KEYS)


def test_figures_by_tenant_and_class_are_of_the_window() -> None:
    acme, urgent, batch = planned("acme"), planned("acme", -1), planned("batch")
    samples = [
        answered(acme, 0.0, 1.0, 3.0),  # Before the window, and half of its decode in it.
        answered(acme, 2.0, 2.5, 3.5),
        answered(urgent, 2.0, 2.1, 2.6),
        refused(batch, 3.0, "http 429"),
        refused(batch, 3.0, "reset"),
        answered(batch, 9.0, 9.1, 9.2),
    ]
    found = group_figures(samples, (2 * S, 5 * S), ServiceTargets(0.3), time_scale=1.0)
    assert list(found) == [
        ServiceGroup("acme", -1),
        ServiceGroup("acme", 0),
        ServiceGroup("batch", 0),
    ]
    one, other, third = found.values()
    assert [(row.requests, row.goodput) for row in (one, other)] == [(1, 1.0), (1, 0.0)]
    assert [one.ttft_s_p50, other.ttft_s_p50] == [pytest.approx(0.1), pytest.approx(0.5)]
    assert other.tpot_ms_p50 == pytest.approx(100.0)
    assert (third.requests, third.refused, third.unserved) == (2, 1, 1)
    assert [row.share_requests for row in found.values()] == [
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        0.0,
    ]
    # Tokens: 111 + 111 + half of 11. What each held times the seconds: 100 and half of its 11 on
    # average, but the first one in its second half.
    assert other.share_tokens == pytest.approx(116.5 / 227.5)
    assert other.share_kv == pytest.approx((108.25 + 105.5) / (108.25 + 105.5 + 52.75))


def test_times_are_the_targets() -> None:
    found = group_figures(
        [answered(planned("acme"), 0.0, 0.1, 0.2)], (0, S), ServiceTargets(), time_scale=10.0
    )
    assert found[ServiceGroup("acme", 0)].ttft_s_p99 == pytest.approx(1.0)
    assert found[ServiceGroup("acme", 0)].tpot_ms_p50 == pytest.approx(100.0)
