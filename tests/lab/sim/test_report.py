"""What is printed and written: the JSON's keys are a contract, the table is for people."""

import json
import math

import pytest
from rich.console import Console

from balanceroute.proxy.lab.sim.experiment import METRICS, PolicyResult
from balanceroute.proxy.lab.sim.report import as_json, make_table, print_table

FIGURES = {
    "mean_imbalance_tokens": 12_345.6,
    "idle_fraction": 0.3456,
    "output_tokens_per_s": 2_000.0,
    "tpot_ms_p50": 41.25,
    "tpot_ms_p95": 62.5,
    "pool_wait_s_p50": 1.5,
    "pool_wait_s_p99": 7.125,
    "pool_wait_s_max": 9.75,
    "ttft_s_p50": 1.75,
    "ttft_s_p95": 2.5,
    "ttft_s_p99": 8.5,
    "ttft_s_max": 10.25,
    "latency_s_mean": 6.5,
    "steps": 800.0,
    "requests": 90.0,
    "recomputes": 2.0,
    "lease_lapses": 3.0,
    "dispatch_us_p50": 11.4,
    "dispatch_us_p99": 33.6,
    "mean_running": 50.0,
    "refused": 4.0,
    "expired": 5.0,
    "prefill_tokens": 7_000.0,
    "prefix_hit_fraction": 0.25,
    "prefiller_peak": 1.125,
    "local_prefills": 7.0,
    "pulled_fraction": 0.5,
    "hottest_rank": 1.25,
    "prefilled_s_p50": 0.25,
    "prefilled_s_p99": 0.75,
    "held_tokens": 9_000.0,
}


def result(
    policy: str, *, scale: float = 1.0, error: float = 0.0, segments: int = 2
) -> PolicyResult:
    return PolicyResult(
        policy,
        mean={name: scale * value for name, value in FIGURES.items()},
        stderr={name: error * value for name, value in FIGURES.items()},
        picture=[[1, 2]],
        segments=segments,
    )


def printed(*results: PolicyResult, title: str = "a title") -> str:
    console = Console(width=200, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(make_table(results, title=title, caption="a caption"))
    return capture.get()


def cells(text: str, policy: str) -> list[str]:
    (row,) = [line for line in text.splitlines() if line.startswith(f"│ {policy} ")]
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_the_json_has_the_keys_of_the_contract() -> None:
    text = as_json({"ranks": 8}, [result("jsq"), result("br-0", scale=2.0, error=0.1)])
    report = json.loads(text)
    assert list(report) == ["config", "results"]
    assert report["config"] == {"ranks": 8}
    assert [row["policy"] for row in report["results"]] == ["jsq", "br-0"]
    for row in report["results"]:
        assert set(row) == {"policy", "stderr", *FIGURES}
        assert set(row["stderr"]) == set(FIGURES)
    assert report["results"][0] == {
        "policy": "jsq",
        **FIGURES,
        "stderr": dict.fromkeys(FIGURES, 0.0),
    }
    assert report["results"][1]["idle_fraction"] == pytest.approx(0.6912)
    assert report["results"][1]["stderr"]["steps"] == pytest.approx(80.0)
    assert text.endswith("}\n")


def test_a_single_segment_has_no_standard_errors() -> None:
    report = json.loads(as_json({}, [result("jsq", segments=1)]))
    assert report["results"][0]["stderr"] == dict.fromkeys(FIGURES)


def test_every_figure_of_a_run_is_reported() -> None:
    assert set(METRICS) == set(FIGURES)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_the_json_never_holds_what_is_not_json(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"patience": value}, [])


def test_the_table_has_a_row_for_each_policy_in_order() -> None:
    text = printed(result("jsq"), result("br-0", scale=1.25))
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert rows == ["jsq", "br-0"]
    assert "a title" in text
    assert "a caption" in text


def test_a_row_tells_the_figures_in_the_units_of_the_heading() -> None:
    text = printed(result("jsq"), result("br-0", scale=1.25))
    figures = "12,346 34.6 50.0 2,000 1.00 41.2 62.5 1.50 7.12 9.8 11 / 34"
    assert cells(text, "jsq") == ["jsq", *figures.split(maxsplit=10)]
    assert cells(text, "br-0")[5] == "1.25"


def test_several_segments_show_the_standard_error() -> None:
    row = cells(printed(result("jsq", error=0.1)), "jsq")
    assert row[1:5] == ["12,346 ±1,235", "34.6 ±3.5", "50.0 ±5.0", "2,000 ±200"]


def test_one_segment_shows_none() -> None:
    assert "±" not in printed(result("jsq"), result("br-0"))


def test_a_file_name_in_brackets_is_no_markup() -> None:
    assert "[red]trace.csv" in printed(result("jsq"), title="[red]trace.csv")


def test_piped_output_is_plain_and_wide_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    results = [result("br-0-bypass", scale=123.0, error=0.1)]
    print_table(results, title="a title", caption="a caption")
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "…" not in text
    assert cells(text, "br-0-bypass")[4] == "246,000 ±200"


@pytest.mark.parametrize("columns", [60, 80, 120, 250])
def test_no_terminal_is_too_narrow_for_the_figures(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # Stands for a terminal.
    monkeypatch.setenv("TERM", "xterm")
    rows = [result("br-0-bypass", scale=8.0, error=0.1), result("power-of-two", scale=8.0)]
    print_table(rows, title="a title", caption="a caption")
    text = capsys.readouterr().out
    assert "…" not in text
    for figure in ("br-0-bypass", "98,765", "276.5", "16,000", "500.0", "57.00", "78.0"):
        assert figure in text
