"""`balanceroute advise`: what it takes, and what it says of a trace."""

import json
from pathlib import Path

import pytest

from balanceroute.proxy.__main__ import main
from balanceroute.traces import TraceRequest, write_native


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    write_native(path, [TraceRequest(i * 100_000_000, 500 + 37 * (i % 20), 20) for i in range(120)])
    return str(path)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "give one of --decode, --proxy, --trace, not none"),
        ("--decode http://a:1 --trace b", "not --decode and --trace"),
        ("--proxy http://a:1 --prefill http://a:2", "--prefill means nothing with --proxy"),
        ("--proxy http://a:1 --ttft-p99 2", "need a --trace: a running fleet cannot be resized"),
        ("--proxy a:1", "--proxy is 'a:1', must be http://host:port"),
        ("--proxy http://u:secret@a:1", "--proxy has an @: a URL must not carry credentials"),
        ("--decode http://a:1 --token-file t", "--token-file means nothing without --proxy"),
        ("--proxy https://a:1 --ca-file absent", "--ca-file is absent: No such file or directory"),
        ("--trace {trace}", "give --ttft-p99, --tpot-p95 or both"),
        ("--trace {trace} --requests 3 --ttft-p99 2", "a segment needs at least 20"),
        ("--trace {trace} --ttft-p99 0.01", "no number of instances helps"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: str, reason: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *words.format(trace=trace).split()]) == 2
    assert reason in capsys.readouterr().err


def test_a_fleet_is_judged_by_a_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = "--prefill-servers 1 --ranks 2 --prefill-us-per-token 100"
    assert main(["advise", "--trace", trace, *fleet.split(), "--json", "-"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["bound"] == "prefill"
    # 20 ms + 100 us x 851.5 tokens, ten times a second.
    assert advice["prefillers"]["work"] == pytest.approx(1.05, abs=0.02)
    assert (advice["prefillers"]["wanted"], advice["prefillers"]["at_least"]) == (2, True)


def test_a_fleet_is_planned_for_a_trace(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    words = "--ttft-p99 0.5 --tpot-p95 0.05 --policy br-0 --prefill-us-per-token 100"
    now = "--prefill-servers 1 --ranks 1"
    command = ["advise", "--trace", trace, *words.split(), *now.split(), "--json", str(out)]
    assert main(command) == 0
    told = capsys.readouterr().out
    made = json.loads(out.read_text())
    assert made["wanted"]["meets"]
    assert not made["now"]["meets"]
    assert f"wanted: {made['wanted']['prefillers']} prefillers and 1 rank" in told
    assert "now: 1 prefiller and 1 rank misses the targets" in told
