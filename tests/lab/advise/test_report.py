"""From how busy the roles are to how many instances are wanted."""

import json
from pathlib import Path

import pytest

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.capacity import Bound, judge, needs
from balanceroute.proxy.lab.advise.report import as_json, lines, read_proxy_page
from balanceroute.proxy.lab.audit.observation import PageError
from balanceroute.traces import TraceRequest, write_native


def told(prefill_busy: float | None, slots_share: float, idle: float = 0.0) -> dict[str, object]:
    """Return the advice for 4 prefillers and 8 ranks."""
    verdict = judge(
        prefillers=4, ranks=8, prefill_busy=prefill_busy, slots_share=slots_share, idle=idle
    )
    found = needs(
        verdict,
        prefillers=4,
        ranks=8,
        prefill_work=None if prefill_busy is None else 4 * prefill_busy,
        decode_work=8 * slots_share,
        busy=0.8,
    )
    return as_json(found) | {"text": "\n".join(lines(found, 0.8))}


@pytest.mark.parametrize(
    ("prefill_busy", "slots_share", "idle", "bound", "prefillers", "ranks"),
    [
        (0.6, 0.6, 0.0, Bound.NOTHING, 3, 6),
        (0.2, 0.8, 0.0, Bound.NOTHING, 1, 8),
        (1.0, 0.3, 0.0, Bound.PREFILL, 5, 3),
        (0.5, 1.0, 0.05, Bound.DECODE, 3, 10),
        (0.5, 0.95, 0.3, Bound.BARRIER, 3, 10),
        (0.0, 0.01, 0.0, Bound.NOTHING, 1, 1),
    ],
)
def test_each_role_is_to_be_busy_for_the_share_that_is_aimed_at(
    prefill_busy: float, slots_share: float, idle: float, bound: Bound, prefillers: int, ranks: int
) -> None:
    advice = told(prefill_busy, slots_share, idle)
    assert advice["bound"] == bound.value
    assert [advice["prefillers"]["wanted"], advice["ranks"]["wanted"]] == [prefillers, ranks]  # type: ignore[index]
    least = [advice["prefillers"]["at_least"], advice["ranks"]["at_least"]]  # type: ignore[index]
    assert least == [bound is Bound.PREFILL, bound is Bound.DECODE]
    assert ("`balanceroute audit`" in str(advice["text"])) == (bound is Bound.BARRIER)


def test_the_load_of_a_full_role_is_a_lower_bound() -> None:
    assert "4 now, at least 5 wanted: the load keeps 4.00 busy" in str(told(1.0, 0.3)["text"])


def test_without_prefillers_nothing_is_said_of_them() -> None:
    advice = told(None, 0.5)
    assert advice["prefillers"]["wanted"] is None  # type: ignore[index]
    assert "their load is not known" in str(advice["text"])


# What a page of the proxy's metrics says of its fleet.


def page(*probes: int, queued: int = 0, pooled: int = 0) -> bytes:
    lines = ["# TYPE balanceroute_batch_limit gauge", "balanceroute_batch_limit 16.0"]
    for state, count in (("queued", queued), ("pooled", pooled)):
        lines.append(f'balanceroute_live_requests{{state="{state}"}} {count}')
    for rank in range(2):
        labels = f'{{rank="{rank}",name="http://d:{rank}"}}'
        lines.append(f"balanceroute_rank_kv_tokens{labels} {100 * (rank + 1)}.0")
        lines.append(f"balanceroute_rank_bound_requests{labels} 4.0")
    for number, count in enumerate(probes):
        labels = f'{{prefiller="{number}",name="http://p:{number}"}}'
        lines.append(f"balanceroute_prefiller_probes{labels} {count}.0")
    return "\n".join([*lines, "other 1", ""]).encode()


def test_loads_and_slots_are_those_of_the_ranks() -> None:
    look, batch = read_proxy_page(page(1, 0), 3.0)
    assert (look.time_s, batch) == (3.0, 16)
    told = {name: (one.kv_tokens, one.running) for name, one in look.decode.items()}
    assert told == {"http://d:0": (100.0, 4.0), "http://d:1": (200.0, 4.0)}
    assert [one.running for one in look.prefill.values()] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("probes", "prefill", "decode"), [((1, 1), 3.0, 2.0), ((1, 0), 0.0, 5.0), ((), 0.0, 2.0)]
)
def test_who_waits_before_prefill_waits_for_the_role_that_is_full(
    probes: tuple[int, ...], prefill: float, decode: float
) -> None:
    look, _ = read_proxy_page(page(*probes, queued=6, pooled=4), 0.0)
    assert {one.waiting for one in look.prefill.values()} <= {prefill}
    assert {one.waiting for one in look.decode.values()} == {decode}


@pytest.mark.parametrize("bad", [b"", b"<html>", b"balanceroute_batch_limit 4\n", b"vllm:x 1\n"])
def test_another_page_is_refused(bad: bytes) -> None:
    with pytest.raises(PageError, match="not a page of the proxy's metrics"):
        read_proxy_page(bad, 0.0)


# `balanceroute advise`: what it takes, and what it says of a trace.


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
