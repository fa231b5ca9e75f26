"""What is printed and written: the JSON's keys are a contract, the table is for people."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.replay.driver import FleetFigures, ReplayResult
from balanceroute.proxy.lab.replay.figures import (
    STEADY_STATE,
    WHOLE_RUN,
    ReplayFault,
    ReplayFigures,
    RequestSample,
    count_faults,
    group_figures,
)
from balanceroute.proxy.lab.replay.report import as_json, print_report, requests_as_json
from balanceroute.proxy.lab.replay.requests import PlannedRequest, check, headers_of, plan
from balanceroute.proxy.lab.service_levels import ServiceGroup, ServiceTargets
from balanceroute.proxy.lab.sim.recorder import RunMetrics
from balanceroute.traces import TraceRequest

MS = 1_000_000
FIGURES = ReplayFigures(
    window=STEADY_STATE,
    output_tokens_per_s=1234.5,
    tpot_ms_p50=41.25,
    tpot_ms_p95=62.5,
    ttft_ms_p50=501.0,
    ttft_ms_p95=502.0,
    ttft_ms_p99=503.0,
    ttst_ms_p50=601.0,
    ttst_ms_p95=602.0,
    ttst_ms_p99=603.0,
    itl_ms_p50=31.0,
    itl_ms_p95=32.0,
    itl_ms_p99=33.0,
    e2e_s_p50=7.25,
    e2e_s_p95=8.25,
    e2e_s_p99=9.25,
    requests=90,
    requests_per_s=3.5,
    request_rate=4.5,
    duration_s=25.0,
    finished=99,
    errors=0,
    cancelled=0,
    run_s=50.0,
    send_late_ms_p99=0.25,
    prompt_tokens_asked=9_000,
    prompt_tokens=9_396,
    output_tokens_asked=4_000,
    output_tokens=4_000,
    wrong_lengths=0,
    uneven_events=0,
)
FAULTS = [
    ReplayFault("reset", "gone"),
    ReplayFault("http 503", "no [b]room[/b]"),
    ReplayFault("reset", "again"),
]
FLEET = FleetFigures(
    mean_imbalance_tokens=12_345.6,
    idle_fraction=0.3456,
    tokens_per_s=1_234.5,
    steps=800,
    mean_late_s=0.00125,
    late_s=0.25,
)


def result(
    *, faults: int = 0, fleet: FleetFigures | None = None, interrupted: bool = False, **changes: Any
) -> ReplayResult:
    return ReplayResult(
        model="tiny",
        figures=dataclasses.replace(FIGURES, **changes),
        fleet=fleet,
        faults=count_faults(FAULTS[:faults]),
        samples=[],
        start_ns=0,
        interrupted=interrupted,
    )


def printed(
    given: ReplayResult, capsys: pytest.CaptureFixture[str], *, notes: tuple[str, ...] = ()
) -> str:
    print_report("br-0", given, title="a [title]", notes=notes)
    return capsys.readouterr().out


def row(text: str, name: str) -> list[str]:
    """Return the cells of the line that begins with a name."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{name} ")]
    return line.strip().removeprefix(name).split()


def test_the_json_has_the_figures_under_the_simulators_names() -> None:
    text = as_json({"rate": 1.0}, "br-0", result(fleet=FLEET))
    report = json.loads(text)
    assert list(report) == ["config", "results"]
    assert report["config"] == {"rate": 1.0}
    (got,) = report["results"]
    assert got == {
        "policy": "br-0",
        **dataclasses.asdict(FIGURES),
        **dataclasses.asdict(FLEET),
        "faults": [],
    }
    assert text.endswith("}\n")


def test_what_the_simulator_reports_too_has_the_same_name() -> None:
    shared = {
        "mean_imbalance_tokens",
        "idle_fraction",
        "output_tokens_per_s",
        "tpot_ms_p50",
        "tpot_ms_p95",
        "steps",
        "requests",
    }
    ours = {field.name for part in (ReplayFigures, FleetFigures) for field in fields(part)}
    assert ours & {field.name for field in fields(RunMetrics)} == shared


def fields(part: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(part)


def test_failures_are_in_the_json_with_an_example() -> None:
    (got,) = json.loads(as_json({}, "x", result(faults=3)))["results"]
    assert got["faults"] == [
        {"kind": "reset", "requests": 2, "example": "gone"},
        {"kind": "http 503", "requests": 1, "example": "no [b]room[/b]"},
    ]


def test_what_was_not_measured_is_null_and_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    given = result(tpot_ms_p50=None, tpot_ms_p95=None, prompt_tokens=None)
    (got,) = json.loads(as_json({}, "x", given))["results"]
    assert got["tpot_ms_p50"] is None
    text = printed(given, capsys)
    assert row(text, "TPOT ms") == ["-", "-", "-"]
    assert "9,000 prompt tokens asked, - by the engines' count" in text


def test_the_json_never_holds_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"rate": float("nan")}, "x", result())


def test_the_table_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(result(fleet=FLEET), capsys)
    assert "a [title]" in text
    assert row(text, "br-0") == ["p50", "p95", "p99"]
    assert row(text, "output tokens/s") == ["1,234.5"]
    assert row(text, "requests/s") == ["3.50"]
    assert row(text, "sent requests/s") == ["4.50"]
    assert row(text, "TTFT ms") == ["501.0", "502.0", "503.0"]
    assert row(text, "TPOT ms") == ["41.2", "62.5", "-"]
    assert row(text, "ITL ms") == ["31.0", "32.0", "33.0"]
    assert row(text, "end to end s") == ["7.25", "8.25", "9.25"]
    assert row(text, "imbalance tokens") == ["12,346"]
    assert row(text, "idle %") == ["34.6"]
    assert row(text, "engines' tokens/s") == ["1,234.5"]
    assert row(text, "decode steps") == ["800"]
    assert row(text, "steps late ms") == ["1.2"]
    assert row(text, "finished") == ["90"]
    assert row(text, "duration s") == ["25.0"]
    assert row(text, "errors") == ["0"]


def test_without_a_fleet_its_figures_have_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert "idle %" not in printed(result(), capsys)


def test_the_report_says_what_a_reader_must_know(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(result(), capsys, notes=("A note.",))
    assert f"Steady state: {STEADY_STATE}." in text
    assert "9,000 prompt tokens asked, 9,396 by the engines' count" in text
    assert "4,000 output tokens asked, 4,000 received" in text
    assert "Requests were sent up to 0.2 ms late (p99)." in text
    assert "A note." in text
    for word in ("as long", "event per token", "Interrupted", "Failures"):
        assert word not in text


def test_the_report_says_what_is_not_as_it_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    given = result(
        window=WHOLE_RUN,
        wrong_lengths=3,
        uneven_events=4,
        cancelled=5,
        errors=3,
        faults=3,
        interrupted=True,
    )
    text = printed(given, capsys)
    assert f"Measured: {WHOLE_RUN}." in text
    assert "3 answers are not as long as asked" in text
    assert "4 answers have not one event per token" in text
    assert "Interrupted after 0 requests were sent; 5 were given up." in text
    assert row(text, "reset") == ["2", "gone"]
    assert row(text, "http 503") == ["1", "no", "[b]room[/b]"]


def test_the_table_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "balanceroute.proxy.lab.service_levels.Console",
        lambda **_: Console(width=60, force_terminal=True, color_system=None),
    )
    text = printed(result(fleet=FLEET), capsys)
    assert row(text, "end to end s") == ["7.25", "8.25", "9.25"]
    assert "…" not in text


def test_every_request_is_a_line_of_the_list(tmp_path: Path) -> None:
    done = RequestSample(PlannedRequest(3, 0, 10, 2), due_ns=5 * MS, sent_ns=6 * MS)
    done.first_ns, done.second_ns = 16 * MS, 26 * MS
    done.last_ns, done.end_ns = 26 * MS, 27 * MS
    done.events, done.output_tokens, done.prompt_tokens = 2, 2, 11
    failed = RequestSample(PlannedRequest(4, 0, 10, 2), due_ns=5 * MS, sent_ns=6 * MS)
    failed.end_ns, failed.fault = 7 * MS, ReplayFault("reset", "gone")
    failed.retry_after = "7"
    given = dataclasses.replace(result(), samples=[done, failed], start_ns=5 * MS)
    text = requests_as_json(given, time_scale=10.0)
    assert json.loads(text) == [
        {
            "number": 3,
            "tenant": "",
            "class": 0,
            "due_s": 0.0,
            "sent_s": 0.01,
            "ttft_s": 0.1,
            "ttst_s": 0.2,
            "tpot_s": 0.1,
            "e2e_s": 0.21,
            "prompt_tokens_asked": 10,
            "prompt_tokens": 11,
            "output_tokens_asked": 2,
            "output_tokens": 2,
            "token_events": 2,
            "cancelled": False,
            "fault": None,
            "retry_after": None,
        },
        {
            "number": 4,
            "tenant": "",
            "class": 0,
            "due_s": 0.0,
            "sent_s": 0.01,
            "ttft_s": None,
            "ttst_s": None,
            "tpot_s": None,
            "e2e_s": None,
            "prompt_tokens_asked": 10,
            "prompt_tokens": None,
            "output_tokens_asked": 2,
            "output_tokens": None,
            "token_events": 0,
            "cancelled": False,
            "fault": {"kind": "reset", "message": "gone"},
            "retry_after": "7",
        },
    ]
    assert len(text.splitlines()) == 4


# Tenants and classes of a trace in a replay: the headers that are sent, and the figures.


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
