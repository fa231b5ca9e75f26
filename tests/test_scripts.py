"""The scripts run: what no check runs, rots."""

import argparse
import json
import re
import shlex
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import stdev
from unittest.mock import Mock

import numpy as np
import pytest
from tests.extended import usually
from tests.script import ROOT, commands_of, run_script, script

from balanceroute.proxy.cli import simulate
from balanceroute.proxy.core.policies import skill_share
from balanceroute.proxy.lab.replay.figures import ReplayFault, RequestSample
from balanceroute.proxy.lab.replay.requests import PlannedRequest
from balanceroute.traces import TraceRequest, detect_format, write_native

COMMANDS = {
    f"{table} {row}".strip(): command
    for table, one in script("reproduce.simulations").TABLES.items()
    for row, command in one.commands.items()
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_of_a_table_is_a_command_that_parses(name: str) -> None:
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    chosen = parser.parse_args(["simulate", *shlex.split(COMMANDS[name])])
    folder, _, trace = str(chosen.trace).partition("/")
    if folder == script("reproduce.simulations").DERIVED:
        assert trace in script("reproduce.traces").DERIVATIONS
    else:
        assert detect_format(ROOT / chosen.trace)


def test_a_trace_is_derived_if_a_command_reads_it(tmp_path: Path) -> None:
    module = script("reproduce.traces")
    module.derive(tmp_path / "derived", [COMMANDS["saturated"]])
    assert not any(tmp_path.iterdir())
    module.derive(tmp_path / "derived", [f"--trace {tmp_path}/derived/conversations.jsonl"])
    assert [one.name for one in (tmp_path / "derived").iterdir()] == ["conversations.jsonl"]


def test_derived_traces_have_the_shape_that_is_told() -> None:
    module = script("reproduce.traces")
    requests = [TraceRequest(i, 10 + 90 * i, 500 - i) for i in range(100)]
    drawn = module.bootstrapped(requests, 90)
    assert [one.arrival_ns for one in drawn] == [i * 10**9 for i in range(90)]
    assert [one.prompt_tokens for one in drawn[1:40]] == [
        one.prompt_tokens + 90 for one in drawn[:39]
    ]
    shared = [
        TraceRequest(i, 2_000, 9, blocks) for i, blocks in enumerate([(1, 2), (1, 3), (1, 2)])
    ]
    turns = [one.tenant for one in module.labelled(shared, 1)]
    assert turns == [module.FIRST, module.FIRST, module.LATER]
    short = sum(one.prompt_tokens <= 1_000 for one in module.mixed(0.25, 1_000))
    assert short == pytest.approx(250, abs=40)


def test_every_table_of_simulations_is_named_in_the_appendix() -> None:
    pages = (ROOT / "docs" / "appendix").glob("*.md")
    page = "".join(one.read_text(encoding="utf-8") for one in pages)
    lines = re.findall(r"(?m)^    ([a-z0-9.*-]+(?:, [a-z0-9.*-]+)*)$", page)
    named = [name for line in lines for name in line.split(", ")]
    for name in script("reproduce.simulations").TABLES:
        assert any(fnmatch(name, one) for one in named), name


@pytest.mark.parametrize(
    ("name", "row", "few"),
    [
        ("saturated", "", "--requests 300 --ranks 2 --batch 4 --segments 1"),
        ("first-limits", "off, 64", "--requests 900 --segments 1"),
        ("paper-4", "oracle, H = 40", "--requests 200 --segments 1"),
        ("affinity-conversations", "load 0.8, price 1", "--requests 240"),
    ],
)
def test_simulations_end_in_a_table(
    name: str, row: str, few: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("reproduce.simulations")
    monkeypatch.chdir(ROOT)
    table = module.TABLES[name]
    small = replace(table, commands={row: f"{table.commands[row]} {few}"})
    monkeypatch.setitem(module.TABLES, name, small)
    assert run_script(f"reproduce simulations {tmp_path} {name}") == 0
    report = json.loads((tmp_path / module.file_name(name, row)).read_text())
    lines = (tmp_path / "tables.md").read_text().splitlines()
    assert lines[0] == f"## {name}"
    rows = [line for line in lines if line.startswith(f"| {row} | `")]
    assert len(rows) == len(report["results"]) > 0
    assert all(line.count("|") == 3 + len(table.columns) for line in rows)


@pytest.mark.parametrize("program", ["reproduce", "bench", "checks", "faults.py"])
def test_every_command_says_what_it_does(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, module in commands_of(program).items():
        with pytest.raises(SystemExit) as ended:
            run_script(f"{program} {name} --help")
        assert not ended.value.code
        told = " ".join(capsys.readouterr().out.split())
        assert told.startswith(f"usage: {module.partition('.')[0]} {name} ")
        assert script("commands").summary(name, module) in told


@pytest.mark.parametrize("name", script("reproduce.reference").MADE)
def test_what_code_declares_is_written_anew(name: str) -> None:
    made = script("reproduce.reference").MADE[name]()
    assert len(made.splitlines()) > 15
    assert (ROOT / name).read_text(encoding="utf-8") == made


def test_the_demo_compares_policies_live_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out"
    write_native(trace, [TraceRequest(i, 40 + 7 * i, 12 + i % 9) for i in range(60)])
    words = f"--out {out} --trace {trace} --skip 0 --requests 60 --concurrency 24"
    fast = "--time-scale 10 --simulations 2"
    assert run_script(f"reproduce demo {words} {fast}") == 0
    told = capsys.readouterr().out
    assert "trace: requests 0 to 60, 24 outstanding, 2 prefillers, 8 ranks x batch 16, 10x" in told
    heading = next(line for line in told.splitlines() if line.startswith("| policy |"))
    assert heading.count(" live |") == heading.count(" simulated | deviation |") == 3
    rows = [line.split(" | ") for line in told.splitlines() if line.count(" ±") == 3]
    assert [row[0] for row in rows] == ["| jsq", "| br-h"]
    assert all(len(row) == 10 and sum("%" in one for one in row) == 3 for row in rows)
    assert "br-h has " in told
    report = json.loads((out / "demo.json").read_text())
    assert [row["policy"] for row in report["results"]] == ["jsq", "br-h"]
    for row in report["results"]:
        assert row["live"]["errors"] == row["live"]["wrong_lengths"] == 0
        assert 0.0 < row["live"]["idle_fraction"] < 1.0
        assert row["live"]["tokens_per_s"] > 0.0
        assert row["simulated"]["output_tokens_per_s"] > 0.0
    for name in ("live_rank_loads", "live_simulated"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_bench_times_every_stage() -> None:
    module = script("bench.decisions")
    bench = module.Bench(2, 4, 8, 10)
    bench.run(5)
    for stage in module.STAGES:
        assert len(bench.samples[stage]) == 5
    total = bench.samples["total"]
    parts = [sum(bench.samples[stage][i] for stage in module.STAGES[:-1]) for i in range(5)]
    assert parts == pytest.approx(total)


def test_the_bench_has_own_trajectories_decide_long_outputs() -> None:
    module = script("bench.decisions")
    bench = module.Bench(2, 32, 8, 10, trace=module.LONG_TRACE, warm_up=80)
    bench.run(3)
    assert skill_share(bench.policy) is not None
    assert skill_share(module.Bench(2, 4, 8, 10).policy) is None


def test_the_bench_frees_slots_in_bursts() -> None:
    module = script("bench.decisions")
    bench = module.Bench(4, 8, 40, 10)
    bench.run_bursts(3, 20)
    assert len(bench.samples["total"]) == 3
    assert len(bench.admitted) == 3
    assert min(bench.admitted) >= 20


@pytest.mark.parametrize(
    ("flags", "other"),
    [
        (("--no-router", "--pin"), "direct"),
        pytest.param(("--against", str(ROOT)), f"proxy of {ROOT.name}", marks=pytest.mark.extended),
        (
            # Of four streams two find no slot: they wait in the pool, or in the engine.
            (
                *("--ranks", "2", "--slots", "1", "--router"),
                f"another={sys.executable} -m balanceroute.proxy serve --port {{port}} --no-admin "
                "--log none --prefill {prefill} --decode {decode}",
            ),
            "another",
        ),
        (("--no-router", "--with", "native=off"), "native=off"),
    ],
)
def test_the_proxy_bench_measures_and_checks_every_event(
    flags: tuple[str, ...],
    other: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = script("bench.proxy")
    streams = ("--connections", "4", "--requests", "8", "--tokens", "3")
    monkeypatch.setattr(
        module,
        "loads",
        lambda *, quick: [module.Load("streams", streams, "events", "transit_us")] * quick,
    )
    assert run_script(f"bench proxy --quick {shlex.join(flags)}") == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "| streams" in line]
    cells = {row[2].strip(): [cell.strip() for cell in row[3:-1]] for row in rows}
    assert set(cells) == {"balanceroute", "direct", other}
    for name, (proxy, ratio, p50, *_, share, rss, errors) in cells.items():
        assert float(p50.replace(",", "")) > 0.0
        assert errors == "0"
        assert bool(proxy) == bool(rss) == bool(share) == (name != "direct")
        assert ratio.count("to") <= (name not in ("balanceroute", "direct"))


def test_a_proxy_that_does_not_start_is_told_by_its_name(tmp_path: Path) -> None:
    targets = script("bench.targets")
    engine = targets.Engine(1, (2,))
    with (
        pytest.raises(SystemExit, match=r"^another does not start"),
        targets.balanceroute("another", ["--no-such-flag"], engine, tmp_path / "log"),
    ):
        pass


def test_a_stream_of_the_bench_engine_waits_for_a_slot() -> None:
    module = script("bench.engine")
    rank = module.Rank(1)
    first, second, third, gone = (Mock(rank=rank) for _ in range(4))
    for connection, tokens in ((first, 2), (gone, 9), (second, 2), (third, 1)):
        rank.add(module.Stream(connection, tokens, False))
    rank.remove(gone)
    events = []
    for _ in range(3):
        events.append([one.send.call_count for one in (first, second, third, gone)])
        rank.step()
    assert events == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0]]
    assert rank.idle


def test_a_repeated_live_table_has_means_and_their_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("reproduce.live")
    simulations: list[str] = []

    def demo(out: Path, *flags: str) -> list[dict[str, object]]:
        number = int(out.name)
        simulations.append(flags[flags.index("--simulations") + 1])
        live = {name: 1000.0 * number for _, name, *_ in module.MEASURED}
        # Only the first is simulated more than once.
        twin = dict.fromkeys(("idle_fraction", "output_tokens_per_s"), 7.0 if number == 0 else 9.0)
        spread = dict.fromkeys(twin, 0.5)
        return [
            {"policy": policy, "live": live, "simulated": twin, "spread": spread}
            for policy in flags[flags.index("--policy") + 1].split(",")
        ]

    monkeypatch.setattr(module, "demo_rows", demo)
    assert run_script(f"reproduce live-table --out {tmp_path}") == 0
    rows = capsys.readouterr().out.splitlines()
    error = stdev(range(5)) / 5**0.5
    seconds = f"2.0 ±{error:.1f}"
    cells = (
        f"| 7 ±0 | 2,000.0 ±{1000 * error:.1f} | {seconds} | {seconds} | {seconds} | {seconds} |"
    )
    assert [row.split(" | ", 3)[0] for row in rows[2:]] == ["| `jsq`", "| `fifo`", "| `br-h`"]
    assert all(row.endswith(cells) for row in rows[2:])
    assert simulations == ["10", "1", "1", "1", "1"]


def test_a_short_timeout_cures_the_death_spiral() -> None:
    module = script("reproduce.overload")
    spiral = module.overloaded(module.CONTROLLERS[0][1], 0, since_s=100, until_s=160)
    assert spiral.high_cap <= 2
    assert spiral.p99_s > 25
    cured = module.overloaded(module.CONTROLLERS[-1][1], 0, since_s=100, until_s=160)
    assert cured.low_cap > 20
    assert cured.p99_s < 2.5
    assert cured.tokens_per_s > 10 * spiral.tokens_per_s


def test_orders_protect_whom_they_should() -> None:
    module = script("reproduce.overload")
    fcfs, edf, levels = (module.in_time(order, 12.0, 0) for order in ("fcfs", "edf", "abs"))
    assert fcfs["real-time"] < edf["real-time"] < levels["real-time"]
    assert levels["long"] < edf["long"] < fcfs["long"]


@pytest.mark.extended
def test_a_hostile_tenant_with_limits_does_not_move_anothers_first_tokens() -> None:
    module = script("reproduce.tenants")
    found = {
        case: module.measure(case, requests=150, attacks=400)
        for case in ("alone", "limits and shares", "shares")
    }
    p99 = {case: one.ttft_s[1] for case, one in found.items()}
    assert p99["limits and shares"] <= 1.1 * p99["alone"]
    # What is measured can be seen.
    assert p99["shares"] > 2 * p99["alone"]
    assert all(one.steady == {"ok": 150} for one in found.values())
    # Those that the log only counts as well.
    attacker = found["limits and shares"].hostile
    assert attacker.total() == 400
    assert attacker["rejected"] > 2 * attacker["ok"]


def test_pickers_differ_in_what_a_lost_cell_costs() -> None:
    module = script("reproduce.scale")
    site = module.Site(cells=8, ranks=4, warm_s=20.0, lost_s=40.0, end_s=70.0)
    requests = module.arrivals(site, 0)
    found = {name: module.World(site, name, requests, 0).run() for name in module.PICKERS}
    assert module.World(site, "random", requests, 0).run() == found["random"]
    # An eighth of what is there is cut. Until it is noticed, the dead cell has no requests of anybody.
    assert all(0.08 < one.cut < 0.2 for one in found.values())
    assert found["least-load"].refused > 0.95
    assert found["random"].refused < found["power-of-two"].refused < 0.3
    assert 0.06 < found["random"].refused < 0.19
    # All gateways follow the same page until the next one.
    assert found["page"].ttft_p99_s > 1.2 * found["page-and-own"].ttft_p99_s
    table = module.table(found).splitlines()
    assert len(table) == len(found) + 2
    assert len({line.count("|") for line in table}) == 1


def test_a_cell_with_fewer_ranks_is_sent_less_by_who_looks() -> None:
    module = script("reproduce.scale")
    site = module.Site(8, 8, short=True, load=0.85, warm_s=25.0, lost_s=60.0, end_s=75.0)
    requests = module.arrivals(site, 1)
    sent = {name: module.World(site, name, requests, 1) for name in ("round-robin", "page-and-own")}
    spread = {name: world.run().spread for name, world in sent.items()}
    assert spread["round-robin"] > 1.25
    assert spread["page-and-own"] < 1.2
    # Nothing is lost on the way: who has no first token is with a cell, or comes again.
    for world in sent.values():
        held = sum(len(at) for at in world._at)
        assert held == sum(sum(view.own) for view in world._gateways)
        assert all(count >= 0 for view in world._gateways for count in view.own)


SCORE_CLAIMS = {
    f"{one.clients}-{one.rule}-{one.claimed}": one
    for one in script("reproduce.scores").CLAIMS
    if one.sign
}
# One that wins, and one that loses.
USUAL_CLAIMS = ("10-s1-enhanced-shorter", "40-s1-enhanced-longer")


@pytest.mark.parametrize("claim", usually(USUAL_CLAIMS, SCORE_CLAIMS.values(), ids=SCORE_CLAIMS))
def test_scores_win_and_lose_where_their_authors_say(claim: object) -> None:
    module = script("reproduce.scores")
    assert module.holds(claim, module.gains(claim, 1))


def test_a_claim_of_the_other_sign_fails() -> None:
    module = script("reproduce.scores")
    claim = module.CLAIMS[0]
    found = module.gains(claim, 1)
    assert not module.holds(replace(claim, sign=-claim.sign), found)


def test_weights_of_the_scores_are_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("reproduce score-weights --seeds 1 --clients 20") == 0
    head, _, *rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip(" |") for cell in head[2:]] == ["0.1, 0.9", "0.2, 0.8", "0.5, 0.5"]
    assert [row[:2] for row in rows] == [["| 1 + 4 GPUs", "20"], ["| 5 x 1 GPU", "20"]]
    assert all(len(set(row[2:])) == 3 for row in rows)


TCP = '"TLS/TCP, one each" "TLS/TCP, one connection"'


def test_urgent_streams_are_in_time_by_deadline_and_late_behind_others(tmp_path: Path) -> None:
    module = script("reproduce.streams")
    module.make_certificate(tmp_path, kind="ed25519")
    planned = module.plan(1, 1.0, 40)
    fcfs, edf, one = (
        module.shares(planned, order, 1, tmp_path)["real-time"]
        for order in ("fcfs", "edf", module.ONE)
    )
    assert max(fcfs, one) < 50 < edf


def test_orders_and_models_have_a_table_of_their_worth(capsys: pytest.CaptureFixture[str]) -> None:
    few = "--load bursty --training 200 --requests 6"
    assert run_script(f"reproduce served-streams {few} --transport edf {TCP}") == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| bursty | large | medium | policy |"
    assert [row.split(" | ")[0] for row in rows] == [
        "| `edf`",
        "| `TLS/TCP, one each`",
        "| `TLS/TCP, one connection`",
    ]
    assert all(
        0.0 <= float(cell.strip(" |")) <= 1.0 for row in rows for cell in row.split(" | ")[1:]
    )


def test_a_packet_that_is_lost_by_time_does_not_stop_the_clock(tmp_path: Path) -> None:
    """Its timer went off at an instant at which, by rounding, it was not late yet, for ever."""
    module = script("reproduce.streams")
    module.make_certificate(tmp_path, kind="ed25519")
    [planned] = module.loads(1)["bursty"]
    worth = module.worth(module.ONE_EACH, module.Static(1), planned[:80], 1, tmp_path)
    assert 0.0 < worth < 1.0


def test_an_answer_is_worth_its_model_if_it_is_in_time(tmp_path: Path) -> None:
    module = script("reproduce.streams")
    module.make_certificate(tmp_path, kind="ed25519")
    real_time, _, long = module.KINDS
    planned = [module.Planned(long, 0.1 * n, 0, 20) for n in range(20)]
    planned += [module.Planned(real_time, 2.0, module.PREFERRED, 20)]
    medium, large = (
        module.worth("ml", module.Static(place), planned[-1:], 1, tmp_path) for place in (0, 1)
    )
    assert (medium, large) == (0.94, 1.0)
    # Behind 2 MB the urgent one is late unless it goes first.
    fcfs, ml = (module.worth(one, module.Static(0), planned, 1, tmp_path) for one in ("fcfs", "ml"))
    assert ml > fcfs


def test_the_least_work_first_keeps_requests_good_above_capacity() -> None:
    module = script("reproduce.overload")
    setting = module.replace(module.SETTINGS["azure"], ranks=2, known=500, played=600, parts=1)
    (workload,) = setting.workloads()
    rate = 2.0 * module.capacity_of(setting, workload)
    good = {
        name: module.goodput_of(setting, module.RULES[name], workload, rate, 0)
        for name in ("none", "srpt", "clairvoyant")
    }
    assert good["srpt"] > 0.9 * good["clairvoyant"]
    assert good["none"] < 0.7 * good["srpt"]


def test_the_tenants_run_judges_shares_and_lost_requests() -> None:
    qos = script("reproduce.tenants")

    def row(phase: str, tenant: str, share: float | None, **changes: object) -> object:
        kept = qos.Row(phase, tenant, share, share, 9, 6, 2, 1, 0, 0.1, 0.2, 3.0)
        return replace(kept, **changes)

    both, alone, *_ = qos.PHASES
    good = [row(both, "gold", 75.0), row(both, "silver", 25.0), row(alone, "silver", 96.0)]
    assert qos.failures(good) == []
    assert qos.failures([row(both, "gold", 77.0, kv_share=66.0)]) == [
        f"{both}: gold has 77.0 % of the output tokens, due are 66.7"
    ]
    assert len(qos.failures([row(both, "gold", None)])) == 2
    assert len(qos.failures([row(alone, "silver", 94.0)])) == 2
    assert qos.failures([row("overload", "silver", 1.0, lost=2)]) == [
        "overload: 2 requests of silver are lost"
    ]
    held = [qos.Held("gold", 8.0, 0.0, 4.0), qos.Held("silver", 6.0, 3.0, 6.0)]
    assert qos.share(held, "gold", (2.0, 4.0)) == pytest.approx(100 * 4 / 6)
    assert qos.share(held, "gold", (7.0, 8.0)) is None
    lost = RequestSample(
        PlannedRequest(0, 0, 1, 1), due_ns=0, sent_ns=0, fault=ReplayFault("http 503", "full")
    )
    assert qos.refusal(lost) is None
    lost.retry_after = "1"
    assert qos.refusal(lost) == "503"


@pytest.mark.extended  # `make qos` is the same at full size.
def test_the_tenants_run_answers_or_refuses_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--out {tmp_path} --phase-s 1 --step-ms 40 --target-s 1"
    status = run_script(f"reproduce qos {words}")
    report = json.loads((tmp_path / "qos.json").read_text())
    # So short a run says nothing of shares.
    assert status == bool(report["failures"])
    assert len(report["rows"]) == 8
    for row in report["rows"]:
        assert row["lost"] == 0
        assert row["served"] + row["refused_429"] + row["refused_503"] == row["asked"]
        assert (row["asked"] == 0) == ((row["phase"], row["tenant"]) == ("gold left", "gold"))
    assert sum(row["served"] for row in report["rows"]) > 0
    assert sum(row["refused_429"] + row["refused_503"] for row in report["rows"]) > 0
    assert capsys.readouterr().out.count("\n| ") == 10


def test_runs_before_real_engines_pool_into_one_table(tmp_path: Path) -> None:
    balance = script("checks.balance")
    file, draw = tmp_path / "runs.jsonl", np.random.default_rng(0)
    for policy, first in (("jsq", 1000), ("br-h", 1000), ("br-h", 1500), ("vllm-router", 1000)):
        loads = draw.integers(5_000, 20_000, (50, 2)).astype(float)
        batch = np.full_like(loads, 7.8)
        # By processor time a line in the load, by the clock with something that no load explains.
        times = 0.012 + 1e-6 * loads
        steps = balance.Steps(loads, batch, times, times + draw.uniform(0, 0.02, loads.shape))
        outcome = balance.Outcome(sent=120, tokens=12_000, whole=90)
        balance.add_run(file, balance.Run(policy, first, outcome, steps))
    found = balance.read_runs(file)
    assert [(one.policy, one.first) for one in found][-1] == ("vllm-router", 1000)
    line, fits = balance.fits_of(found)
    assert (line.base_s, line.token_s, line.explained) == pytest.approx((0.012, 1e-6, 1.0))
    rows = [{"first": 1000, "idle_fraction": 0.1, "output_tokens_per_s": 90.0}]
    table = balance.table_of(found, {one.policy: rows for one in found}, line)
    assert table.splitlines()[2].startswith("| jsq | 1 | 50 | ")
    own = sorted(100 * one.steps.idle for one in found if one.policy == "br-h")
    idle = f"{sum(own) / 2:.1f} ({own[0]:.1f} to {own[1]:.1f})"
    assert table.splitlines()[3].startswith(f"| br-h | 2 | 100 | {idle} | 10.0 | ")
    assert balance.refill_steps(found[0]) == pytest.approx(100 * 0.2 / 7.8)
    assert fits.splitlines()[2].startswith("| processor time | 12.0 | 1.00 | 1.00 | ")
    assert " 1.00 " not in fits.splitlines()[3]


def test_a_file_of_other_lines_is_no_table_of_runs(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text('{"policy": "jsq"}\n')
    with pytest.raises(SystemExit, match=r"runs\.jsonl:1: no run of this check"):
        script("checks.balance").read_runs(file)
    assert script("checks.balance").read_runs(tmp_path / "none") == []


def test_a_suite_of_others_is_compared_side_by_side(tmp_path: Path) -> None:
    suites = script("checks.suites")
    runs: list[tuple[str, tuple[str, ...]]] = []

    def suite(side: str, only: tuple[str, ...], _folder: Path) -> dict[str, tuple[str, str]]:
        runs.append((side, tuple(only)))
        proxy = side == "proxy"
        first = len(runs) <= 2
        return {
            "t::same": ("failed", "on both"),
            "t::random": ("failed" if proxy and first else "passed", ""),
            "t::ours": ("failed" if proxy else "passed", "it said so"),
            "t::test_show_version": ("failed" if proxy else "passed", ""),
        } | ({} if proxy else {"t::gone": ("passed", "")})

    engine, proxy = suites.compare(suite, ("engine", "proxy"), tmp_path)
    # Neither what is the same on both sides nor what is explained runs again.
    assert runs[2:] == [
        ("engine", ("t::gone", "t::ours", "t::random")),
        ("proxy", ("t::gone", "t::ours", "t::random")),
        ("engine", ("t::gone", "t::ours")),
        ("proxy", ("t::gone", "t::ours")),
    ]
    row = suites.row_of(engine | {"t::b": ("not drawn", "")}, proxy | {"t::b": ("not drawn", "")})
    assert (row.tests, row.of, row.engine, row.proxy) == (5, 6, 4, 1)
    assert row.differ == {"t::gone": "not run", "t::ours": "it said so", "t::test_show_version": ""}
    broken = suites.row_of(*({"it runs": ("failed", "engine x did not start")},) * 2)
    page = suites.page_of({"vllm": row, "pooling": broken}, {"nothing is held": False}, 3.0)
    assert "| vllm | 5 of 6 | 4 | 1 | 3 | vLLM's tests" in page
    assert "* `ours`: NOT EXPLAINED: it said so\n* `test_show_version`: `/version`" in page
    assert "| pooling | did not run | - | - | - |" in page
    assert "* pooling: engine x did not start" in page
    assert "* WRONG: nothing is held" in page


def test_what_vllm_tells_otherwise_when_it_lags_is_no_difference() -> None:
    agents = script("checks.agents")
    hm, end, a = ({"token": one} for one in ("Hm", "</think>", "a"))
    for other, same in (([hm, end, a], True), ([hm, a], False), ([hm, end], False), ([], False)):
        assert agents.alike([{"logprobs": [a]}], [{"logprobs": other}]) is same
    event = 'event: {0}\ndata: {{"type": "{0}", "delta": {1}}}'.format
    last = event("response.completed", 0)
    delta = "response.function_call_arguments.delta"
    told = [
        agents.parts_of(f"{event(delta, json.dumps(one))}\n\n{last}", stream=True)[0]["delta"]
        for one in ('{"a": "\x07"}', '{"a": "\x07"}}', '{"a": "b"}}')
    ]
    assert told == ['{"a": "\x07"}', '{"a": "\x07"}', '{"a": "b"}}']
