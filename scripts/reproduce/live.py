"""Live runs before emulated engines: policies beside what the simulator predicts, and whether an audit is right."""

import argparse
import json
import random
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from signal import SIGINT
from statistics import fmean, stdev
from typing import Any, cast

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.support.arguments import positive

from balanceroute.proxy.cli import emulate
from balanceroute.proxy.cli.up import emulate_command
from balanceroute.proxy.core.policies import POLICIES
from balanceroute.proxy.lab.emulate import EmulationSettings
from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.lab.replay.requests import ReplayApi, as_sent, plan, with_limits
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import PolicyResult, forecast_called, run_experiment
from balanceroute.proxy.lab.sim.plots import write_prediction_plots
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.settings import Given, given_by_flags
from balanceroute.topologies.topology import read_topology
from balanceroute.traces import TraceRequest, read_trace, write_native
from bench.targets import KNOWN, ended, started
from experiment import MOONCAKE, emulated, proxy_before, right, table_head, table_row

# What is compared: heading, figure of the simulator, unit, digits.
FIGURES = (
    ("idle %", "idle_fraction", 100.0, 1),
    ("output tokens/s", "output_tokens_per_s", 1.0, 0),
    ("TTFT p99 s", "ttft_s_p99", 1.0, 1),
)
# What else is told: label, figure, unit (None: real milliseconds), digits.
PARTICULARS: tuple[tuple[str, str, float | None, int], ...] = (
    ("output tokens/s, by the client's clock", "output_tokens_per_s", 1.0, 0),
    ("TTFT ms, p50", "ttft_ms_p50", 1.0, 0),
    ("TTFT ms, p99", "ttft_ms_p99", 1.0, 0),
    ("second token ms, p50", "ttst_ms_p50", 1.0, 0),
    ("second token ms, p99", "ttst_ms_p99", 1.0, 0),
    ("TPOT ms, p50", "tpot_ms_p50", 1.0, 1),
    ("TPOT ms, p95", "tpot_ms_p95", 1.0, 1),
    ("imbalance tokens", "mean_imbalance_tokens", 1.0, 0),
    ("decode steps", "steps", 1.0, 0),
    ("requests finished", "requests", 1.0, 0),
    ("requests failed", "errors", 1.0, 0),
    ("barrier late, real ms, mean", "mean_late_s", 1e3, 1),
    ("barrier late, real ms, at most", "late_s", 1e3, 0),
    ("requests sent late, real ms, p99", "send_late_ms_p99", None, 1),
    ("proxy's timers late, real ms, mean", "loop_lag_ms", 1.0, 1),
    ("KV leases lapsed", "lease_lapses", 1.0, 0),
)
# Runs like these are chaotic: a moment's difference moves everything that comes after it. So each
# simulated run has prefills longer by this than the one before, and the prediction is their mean.
STAGGER_NS = 500_000

# Of the prompts' words and the clients' limits, which replay and simulator draw alike.
SEED = 0
API = ReplayApi.COMPLETIONS


@dataclass(frozen=True, slots=True)
class Setup:
    """What is replayed on what."""

    topology: str  # Emulated engines.
    trace: Path  # The trace.
    skip: int  # Requests to pass over.
    requests: int  # Requests to take then.
    concurrency: int  # Requests that are always outstanding.
    time_scale: float  # Emulated seconds in a real one.
    prefill_us_per_token: float  # Speed of the prefillers, in emulated time.
    simulations: int  # Simulated runs of each policy.
    predictor: str  # BR-H's, in the proxy and in the simulator.
    first_token: str  # Whose first token clients get, the prefiller's or the rank's.
    out: Path  # Where to write.

    @property
    def engines_command(self) -> list[str]:
        """The command line that emulates the engines."""
        # The last word on a flag counts.
        return [
            *emulate_command(read_topology(self.topology)),
            f"--prefill-us-per-token={self.prefill_us_per_token}",
            f"--time-scale={self.time_scale}",
        ]

    def emulation(self) -> EmulationSettings:
        parser = argparse.ArgumentParser()
        emulate.add_parser(parser.add_subparsers())
        words = self.engines_command
        arguments = parser.parse_args(words[words.index("emulate") :])
        flags = given_by_flags(arguments, emulate.SECTIONS)
        return emulate.emulation_settings(Given(emulate.SECTIONS, flags=flags))

    def proxy_flags(self, policy: str) -> dict[str, object]:
        """Return the proxy's flags beside its engines; its times are real ones."""
        lease_s = self.emulation().lease_s / self.time_scale
        return {
            "policy": policy,
            "predictor": self.predictor,
            "first_token": self.first_token,
            "lease_s": lease_s,
            "lease_margin_s": lease_s / 6,
            "connect_timeout_s": lease_s / 12,
            "probe_limit": 1,
            # With early binding a request waits in the engine for its first token.
            "first_token_timeout_s": 600.0,
        }

    def planned(self) -> list[TraceRequest]:
        """Return the requests as the replay sends them, with the limits that it draws."""
        chosen = plan(read_trace(self.trace), skip=self.skip, count=self.requests)
        return as_sent(with_limits(chosen, seed=SEED, api=API))


@dataclass(frozen=True, slots=True)
class Live:
    """What was measured of one policy."""

    figures: dict[str, Any]  # The replay's row of figures.
    picture: list[list[int]]  # Loads by step and rank at the beginning of the steady state.
    loop_lag_ms: float  # Mean lateness of the proxy's timers.
    lease_lapses: int  # Prefills that were repeated because their lease ran out.
    failed: bool  # Whether a request failed.

    def result(self, policy: str) -> PolicyResult:
        """Return the figures under the simulator's names, as the engines report them."""
        names = ("mean_imbalance_tokens", "idle_fraction")
        mean = {name: float(self.figures[name]) for name in names}
        mean["output_tokens_per_s"] = float(self.figures["tokens_per_s"])
        mean["ttft_s_p99"] = float(self.figures["ttft_ms_p99"]) / 1e3
        return PolicyResult(policy, mean, dict.fromkeys(mean, 0.0), self.picture)


def run_live(setup: Setup, policy: str) -> Live:
    """Start engines and proxy, replay through them, and end them."""
    folder = setup.out / policy
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--topology={setup.topology}"]
    flags += [
        f"--{name.replace('_', '-')}={value}" for name, value in setup.proxy_flags(policy).items()
    ]
    with emulated_engines(setup.engines_command) as engines:
        urls = {role: cast("list[str]", given) for role, given in engines.items()}
        fleet = urls["decode"][0]
        with proxy_before(urls, flags, folder) as proxy:
            failed = replay(setup, policy, f"http://{proxy.host}:{proxy.port}", fleet, folder)
            url = f"http://{proxy.host}:{proxy.admin_port}/metrics"
            metrics = httpx.get(url, trust_env=False).text
            picture = httpx.get(f"{fleet}/emulation/stats/picture", trust_env=False).json()
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    (figures,) = json.loads((folder / "replay.json").read_text(encoding="utf-8"))["results"]
    if not figures.get("steps"):
        raise SystemExit(f"{policy}: no steady state; it takes more --requests")
    lag = "balanceroute_loop_lag_seconds"
    return Live(
        figures,
        picture,
        loop_lag_ms=1e3 * samples[f"{lag}_sum"] / max(1.0, samples[f"{lag}_count"]),
        lease_lapses=round(samples["balanceroute_lease_lapses_total"]),
        failed=failed,
    )


def replay(setup: Setup, policy: str, url: str, fleet: str, folder: Path) -> bool:
    """Replay through the proxy at `url`; return whether a request failed."""
    command = [
        *[sys.executable, "-m", "balanceroute.proxy", "replay"],
        *["--target", url, "--emulation", fleet, "--trace", str(setup.trace)],
        *["--skip", str(setup.skip), "--requests", str(setup.requests)],
        *["--concurrency", str(setup.concurrency), "--time-scale", str(setup.time_scale)],
        *["--lengths", "hidden", "--api", API.value, "--seed", str(SEED)],
        *["--stop-at-last-arrival", "--label", policy, "--json", str(folder / "replay.json")],
    ]
    with (folder / "replay.txt").open("wb") as table:
        status = subprocess.run(command, stdout=table, check=False).returncode
    if status not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return status == 1


def deployment_of(setup: Setup, config: ProxyConfig) -> SimulatedDeployment:
    """Return what the simulator has to know of the engines and of the proxy's configuration."""
    engines = setup.emulation()
    scheduler = config.scheduler_config(engines.ranks, engines.prefillers)
    deadline_ns = scheduler.deadline_ns
    return SimulatedDeployment(
        ranks=engines.ranks,
        batch_limit=engines.batch_limit,
        step_base_ns=engines.step_base_ns,
        step_ns_per_token=engines.step_ns_per_token,
        rank_kv_tokens=engines.rank_kv_tokens,
        prefill=engines.prefill,
        transfer_base_ns=engines.transfer_base_ns,
        transfer_ns_per_token=engines.transfer_ns_per_token,
        deadline_ns=None if deadline_ns is None else round(deadline_ns * setup.time_scale),
        pool_limit=scheduler.pool_limit,
        deep_pool=scheduler.deep_pool,
        early_tokens=scheduler.deep_pool,
        lease_ns=round(1e9 * engines.lease_s),
        lease_margin_ns=round(scheduler.lease_margin_ns * setup.time_scale),
    )


def predict(setup: Setup, policy: str) -> PolicyResult:
    """Simulate what `run_live` does: means, and how far single runs spread."""
    engines = setup.emulation()
    stand_ins = {
        "prefill": [f"http://prefill:{1 + i}" for i in range(engines.prefillers)],
        "decode": [f"http://decode:{1 + i}" for i in range(engines.ranks)],
    }
    config = make_config(read_topology(setup.topology), setup.proxy_flags(policy) | stand_ins)
    deployment = deployment_of(setup, config)
    # No history: the proxy's predictor knows nothing either when it starts.
    workload = Workload(setup.planned(), history=[], concurrency=setup.concurrency)
    runs: list[PolicyResult] = []
    for number in range(setup.simulations):
        assert deployment.prefill is not None
        base_ns = deployment.prefill.base_ns + number * STAGGER_NS
        runs += run_experiment(
            replace(deployment, prefill=replace(deployment.prefill, base_ns=base_ns)),
            [workload],
            [policy],
            config.policies,
            forecast_called(config.scheduling.predictor),
        )
    mean = {name: fmean(run.mean[name] for run in runs) for name in runs[0].mean}
    spread = dict.fromkeys(mean, 0.0)
    if len(runs) > 1:
        spread = {name: stdev(run.mean[name] for run in runs) for name in mean}
    return PolicyResult(policy, mean, spread, runs[0].picture)


def deviation(result: PolicyResult, base: PolicyResult, name: str) -> float:
    """Return by how much a figure differs from another's, as a share of that."""
    return result.mean[name] / base.mean[name] - 1 if base.mean[name] else inf


def comparison(live: Sequence[PolicyResult], simulated: Sequence[PolicyResult]) -> str:
    """Return what was measured beside what was predicted, a policy a row."""
    names = [
        f"{one}" for heading, *_ in FIGURES for one in (f"{heading} live", "simulated", "deviation")
    ]
    lines = [table_head("policy", *right(names))]
    for measured, predicted in zip(live, simulated, strict=True):
        cells = []
        for _, name, unit, digits in FIGURES:
            mean, spread = unit * predicted.mean[name], unit * predicted.stderr[name]
            off = f"{100 * deviation(measured, predicted, name):+.1f} %"
            cells += [
                cell(unit * measured.mean[name], None, digits),
                cell(mean, spread, digits),
                off,
            ]
        lines.append(table_row(measured.policy, *cells))
    return "\n".join(lines)


def particulars(lives: Mapping[str, Live], time_scale: float) -> str:
    """Return what else was measured, and how well the machine kept up, a policy a column."""
    figures = {
        policy: live.figures | {"loop_lag_ms": live.loop_lag_ms, "lease_lapses": live.lease_lapses}
        for policy, live in lives.items()
    }
    lines = [table_head("live", *right(list(lives)))]
    for label, name, unit, digits in PARTICULARS:
        scale = unit or 1 / time_scale
        values = [one[name] for one in figures.values()]
        shown = ("-" if value is None else f"{scale * value:,.{digits}f}" for value in values)
        lines.append(table_row(label, *shown))
    return "\n".join(lines)


def conclusions(
    live: Sequence[PolicyResult], lives: Mapping[str, Live], time_scale: float
) -> list[str]:
    """Return what the tables come to."""
    base, *others = live
    said = []
    for one in others:
        idle = 1 + deviation(one, base, "idle_fraction")
        output = deviation(one, base, "output_tokens_per_s")
        said.append(
            f"{one.policy} has {idle:.2f} times the idle time of {base.policy} "
            f"and {100 * output:+.1f} % output tokens/s."
        )
    for policy, measured in lives.items():
        figures = measured.figures
        step_s = figures["duration_s"] / figures["steps"] / time_scale
        if figures["mean_late_s"] > step_s:
            said.append(
                f"The machine did not keep up with {policy}: a step ended "
                f"{1e3 * figures['mean_late_s']:.0f} ms late on average and took {1e3 * step_s:.0f}. "
                "A smaller --time-scale asks less of it."
            )
    return said


def title_of(setup: Setup) -> str:
    """Return what was replayed on what."""
    engines = setup.emulation()
    return (
        f"{setup.trace.name.partition('.')[0]}: requests {setup.skip:,} to {setup.skip + setup.requests:,}, "
        f"{setup.concurrency:,} outstanding, {engines.prefillers} prefillers, "
        f"{engines.ranks} ranks x batch {engines.batch_limit}, {setup.time_scale:g}x real time"
    )


def write_report(
    setup: Setup,
    live: Sequence[PolicyResult],
    simulated: Sequence[PolicyResult],
    lives: Mapping[str, Live],
) -> None:
    """Write everything but the pictures' data as JSON."""
    rows = [
        {
            "policy": measured.policy,
            "live": lives[measured.policy].figures
            | {
                "loop_lag_ms": lives[measured.policy].loop_lag_ms,
                "lease_lapses": lives[measured.policy].lease_lapses,
            },
            "simulated": predicted.mean,
            "spread": predicted.stderr,
            "deviation": {name: deviation(measured, predicted, name) for _, name, *_ in FIGURES},
        }
        for measured, predicted in zip(live, simulated, strict=True)
    ]
    config = asdict(setup) | {"trace": str(setup.trace), "out": str(setup.out)}
    text = json.dumps({"config": config, "results": rows}, indent=2)
    (setup.out / "demo.json").write_text(f"{text}\n", encoding="utf-8")


def read_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[Setup, list[str]]:
    """Return what the command line asks for, and the policies."""
    trace = Path("traces/public/mooncake_conversation.jsonl.gz")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where to write")
    parser.add_argument("--policy", default="jsq,br-h", help="the first is what others compare to")
    parser.add_argument("--topology", default="emulated-2p8d", help="whose engines are emulated")
    parser.add_argument("--trace", type=Path, default=trace, help="what to replay")
    parser.add_argument("--skip", type=int, default=5000, help="requests to pass over first")
    parser.add_argument("--requests", type=positive, default=1500, help="requests to replay")
    parser.add_argument("--concurrency", type=positive, default=192, help="always outstanding")
    parser.add_argument("--time-scale", type=float, default=4.0, help="emulated per real second")
    parser.add_argument("--prefill-us-per-token", type=float, default=5.0, help="emulated time")
    parser.add_argument(
        "--predictor", default="survival", help="BR-H's: none, survival, exact-match or a file"
    )
    parser.add_argument(
        "--first-token", choices=("prefill", "decode"), default="decode", help="as of serve"
    )
    parser.add_argument(
        "--simulations", type=positive, default=10, help="simulated runs of each policy"
    )
    arguments = vars(parser.parse_args(words))
    policies = arguments.pop("policy").split(",")
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        parser.error(f"--policy: unknown {unknown}; known: {', '.join(POLICIES)}")
    return Setup(**arguments), policies


def demo(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Two policies live in front of emulated engines, and what the simulator predicts for them.

    For each policy: starts the engines of a topology (2 prefillers and 8 decode ranks with one barrier)
    and the proxy before them, each a process with real sockets, and replays a slice of a public trace
    through the proxy in a closed loop. Then simulates the same requests on the same deployment. Prints
    both beside each other and writes pictures. Exits 1 if a request failed.
    """
    setup, policies = read_flags(parser, words)
    lives: dict[str, Live] = {}
    simulated: list[PolicyResult] = []
    for policy in policies:
        print(f"{policy}: live ..", flush=True)
        lives[policy] = run_live(setup, policy)
        print(f"{policy}: simulated ..", flush=True)
        simulated.append(predict(setup, policy))
    live = [one.result(policy) for policy, one in lives.items()]
    write_report(setup, live, simulated, lives)
    pictures = write_prediction_plots(live, simulated, setup.out, title=title_of(setup))
    print(f"\n{title_of(setup)}\n\n{comparison(live, simulated)}\n")
    print(
        f"Live: as the engines themselves report it. Simulated: mean of {setup.simulations} runs ± how far "
        "single ones spread (one standard deviation). Both from a tenth of the requests finished to the last "
        f"one sent.\n\n{particulars(lives, setup.time_scale)}\n"
    )
    print(*conclusions(live, lives, setup.time_scale), sep="\n")
    print(f"Written: {', '.join(str(path) for path in (setup.out / 'demo.json', *pictures))}")
    return 1 if any(one.failed for one in lives.values()) else 0


SKIP = 5000  # The demo's: what comes before is known to a trained predictor.
COMPARED = "jsq,least-kv,fifo,br-0,br-h"
# What single runs do not tell apart: these so often.
REPEATED, RUNS = "jsq,fifo,br-h", 5
PREDICTORS = ("none", "survival", "exact-match", "gbdt")
# Heading, where the figure is, scale, digits; beside it the simulation's, where there is one.
MEASURED: tuple[tuple[str, str, str | None, float, int], ...] = (
    ("idle % live", "idle_fraction", "idle_fraction", 100.0, 1),
    ("output tokens/s live", "tokens_per_s", "output_tokens_per_s", 1.0, 0),
    ("TPOT p95 ms", "tpot_ms_p95", None, 1.0, 1),
    ("TTFT p50 s", "ttft_ms_p50", None, 1e-3, 1),
    ("p99 s", "ttft_ms_p99", None, 1e-3, 1),
    ("second token p50 s", "ttst_ms_p50", None, 1e-3, 1),
    ("p99 s", "ttst_ms_p99", None, 1e-3, 1),
)
# Beside the policies, the one that gives clients the first token when the prefill ends.
EARLY = ("--policy", "br-h", "--first-token", "prefill")


def demo_rows(out: Path, *flags: str) -> list[dict[str, Any]]:
    """Run the demo; return its rows."""
    words = ["--out", str(out), *flags, "--skip", str(SKIP), "--trace", str(MOONCAKE)]
    if demo(argparse.ArgumentParser(), words):
        raise SystemExit("requests failed")
    rows: list[dict[str, Any]] = json.loads((out / "demo.json").read_text())["results"]
    return rows


def train_gbdt(out: Path) -> Path:
    """Train on the requests before the demo's, with the limits that their clients would have set."""
    # The seed and the API are those of scripts/reproduce demo.
    before = with_limits(plan(read_trace(MOONCAKE), count=SKIP), seed=0, api=ReplayApi.COMPLETIONS)
    past, model = out / "before.jsonl", out / "gbdt.json"
    write_native(past, as_sent(before))
    words = ["train", "gbdt", "--trace", str(past), "--out", str(model)]
    subprocess.run([sys.executable, "-m", "balanceroute.proxy", *words], check=True)
    return model


def markdown(heading: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a table with a row for each name, of all its runs; the first one was simulated best."""
    headings = [heading]
    for title, _, simulated, _, _ in MEASURED:
        headings += [title] if simulated is None else [title, "simulated"]
    lines = [table_head(headings[0], *right(headings[1:]))]
    for name, runs in rows.items():
        cells = [f"`{name}`"]
        for _, live, simulated, scale, digits in MEASURED:
            values = [scale * run["live"][live] for run in runs]
            error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            cells.append(cell(fmean(values), error, digits))
            if simulated is not None:
                mean, spread = (
                    scale * runs[0][kind][simulated] for kind in ("simulated", "spread")
                )
                cells.append(cell(mean, spread, digits))
        lines.append(table_row(*cells))
    return "\n".join(lines)


def cell(mean: float, plus_minus: float | None, digits: int) -> str:
    """Return a mean, and by how much it may be wrong, if that is known."""
    text = f"{mean:,.{digits}f}"
    return text if plus_minus is None else f"{text} ±{plus_minus:,.{digits}f}"


def live_tables(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """The tables of live runs in docs/appendix/live.md and docs/appendix/predictors.md, as Markdown.

        python scripts/reproduce live-tables repeated      # docs/appendix/live.md: 22 minutes
        python scripts/reproduce live-tables policies      # likewise: 9 minutes
        python scripts/reproduce live-tables predictors    # docs/appendix/predictors.md, "Live": 6 minutes

    Runs scripts/reproduce demo, a policy or a predictor after the other, and prints a table of what it measured and
    simulated. Nothing else should run on the machine: engines that are late by more than a step measure it.
    """
    parser.add_argument("table", choices=("repeated", "policies", "predictors"), help="which one")
    parser.add_argument("--out", type=Path, default=Path("build/live_tables"), help="for the runs")
    arguments = parser.parse_args(words)
    out: Path = arguments.out / arguments.table
    out.mkdir(parents=True, exist_ok=True)
    if arguments.table == "repeated":
        # The simulation is the same each time.
        simulations = ["10", *["1"] * (RUNS - 1)]
        runs = [
            demo_rows(out / str(number), "--policy", REPEATED, "--simulations", count)
            for number, count in enumerate(simulations)
        ]
        table = markdown(
            "policy", {several[0]["policy"]: several for several in zip(*runs, strict=True)}
        )
    elif arguments.table == "policies":
        rows = {row["policy"]: [row] for row in demo_rows(out, "--policy", COMPARED)}
        rows[" ".join(EARLY[1:])] = demo_rows(out / "early", *EARLY)
        table = markdown("policy", rows)
    else:
        files = {"gbdt": str(train_gbdt(out))}
        rows = {}
        for name in PREDICTORS:
            flags = ("--policy", "br-h", "--predictor", files.get(name, name), "--simulations", "4")
            rows[name] = demo_rows(out / name, *flags)
        table = markdown("`--predictor`", rows)
    (out / "table.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)
    return 0


# Whether an audit is right: about what it sees, and about what BR-H would gain.

OTHER = KNOWN["vllm-router"]
OURS = "br-h"
RANKS, BATCH, PREFILLERS, IN_FLIGHT = 4, 8, 3, 60
MODEL = "emulated"
_WARM_UP_S = 20.0
_REQUESTS = 20_000
_PARTS = 12  # Of the tokens that are compared; in three minutes longer than most requests take.
_COUNT_S = 2.0  # Between two readings of the engines' counters.
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Counted:
    """What the engines count since their start, and when that was."""

    idle_tokens: int
    capacity_tokens: int
    output_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """What was found behind one router, of one load."""

    audit: dict[str, Any]  # The audit's JSON.
    counted: list[Counted]  # By the engines meanwhile, in order.

    @property
    def idle(self) -> float:
        """The engines' own idle share."""
        first, last = self.counted[0], self.counted[-1]
        idle_tokens = last.idle_tokens - first.idle_tokens
        return idle_tokens / (last.capacity_tokens - first.capacity_tokens)

    @property
    def tokens_per_s(self) -> float:
        """What the engines emitted."""
        first, last = self.counted[0], self.counted[-1]
        return (last.output_tokens - first.output_tokens) / (last.at_s - first.at_s)

    @property
    def predicted(self) -> tuple[float, float]:
        """The gain that the audit predicts for BR-H, and its standard error."""
        (one,) = [one for one in self.audit["recovery"]["predictions"] if one["policy"] == OURS]
        return one["gain"], one["error"]

    def reached_s(self, tokens: float) -> float:
        """Return when the engines had emitted so many tokens."""
        after = bisect_left(self.counted, tokens, lo=1, key=lambda one: one.output_tokens)
        last, first = self.counted[after], self.counted[after - 1]
        share = (tokens - first.output_tokens) / (last.output_tokens - first.output_tokens)
        return first.at_s + share * (last.at_s - first.at_s)


def audit(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Whether an audit is right: about the idle time behind other routers, and about what BR-H would gain.

    For each router: starts emulated engines (3 prefillers, 4 ranks of 8 slots, one barrier) and the router
    before them, keeps 60 requests outstanding, and runs `balanceroute audit`, which sees the engines' /metrics
    only. Beside its idle share stands the one that the engines count themselves, and beside the gain that it
    predicts for BR-H the gain that is then measured with BR-H in the router's place. `jsq` and other policies
    are this proxy with that policy; vllm-router is installed into build/bench-venv on first use.

    Each load is a list of requests, which every router gets in the same order. The measured gain is how much
    sooner the same tokens are there, so what happens to be long in one list does not count. With several
    loads all figures are means over them, and errors follow from the spread between them. One audit takes its
    minutes and about 50 s.
    """
    parser.add_argument("--router", default=f"jsq,{OTHER.name}", metavar="NAME,..")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each audit")
    parser.add_argument(
        "--loads", type=positive, default=1, help="lists of requests, one after the other"
    )
    parser.add_argument("--out", type=Path, default=Path("build/audit"))
    arguments = parser.parse_args(words)
    routers = arguments.router.split(",")
    for name in routers:
        if name != OTHER.name and name not in POLICIES:
            parser.error(f"--router: {name} is neither {OTHER.name} nor a policy")
    found: dict[str, list[Found]] = {name: [] for name in [*routers, OURS]}
    for load in range(arguments.loads):
        trace = _trace(arguments.out / str(load), load)
        for name, of_loads in found.items():
            of_loads.append(_audited(name, trace, arguments.minutes))
    print(_table(found))


def _trace(folder: Path, seed: int) -> Path:
    """Write requests, a few of which have very long prompts."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.jsonl"
    lines = []
    for number in range(_REQUESTS):
        prompt = min(12_000, round(rng.lognormvariate(6.6, 1.0)))
        output = 20 + round(rng.expovariate(1 / 80))
        told = {"arrival_s": number / 100, "prompt_tokens": prompt, "output_tokens": output}
        lines.append(json.dumps(told) + "\n")
    path.write_text("".join(lines))
    return path


def _audited(name: str, trace: Path, minutes: float) -> Found:
    """Audit engines behind a router under load; what was written is beside the trace."""
    folder = trace.parent / name
    folder.mkdir(exist_ok=True)
    command = [f"--prefillers={PREFILLERS}", f"--ranks={RANKS}", f"--batch={BATCH}"]
    command += ["--kv-capacity=200000", "--max-model-len=16384", "--step-us-per-token=5"]
    command += ["--prefill-base-ms=1", "--prefill-us-per-token=10", f"--model={MODEL}"]
    with emulated(command) as urls:
        prefill, decode = urls["prefill"], urls["decode"]
        with _router(name, prefill, decode, folder) as url, _loaded(url, decode[0], trace, folder):
            time.sleep(_WARM_UP_S)
            found = _audit(prefill, decode, minutes, folder)
    return found


@contextmanager
def _router(name: str, prefill: list[str], decode: list[str], folder: Path) -> Iterator[str]:
    """Run a router; yield its URL."""
    if name == OTHER.name:
        with started(OTHER, prefill, decode, folder / "router.log", MODEL) as target:
            yield f"http://127.0.0.1:{target.port}"
        return
    flags = [f"--policy={name}", f"--batch={BATCH}"]
    with proxy_before({"prefill": prefill, "decode": decode}, flags, folder) as proxy:
        yield f"http://{proxy.host}:{proxy.port}"


@contextmanager
def _loaded(url: str, engine: str, trace: Path, folder: Path) -> Iterator[None]:
    """Keep a router busy; the engines are told how long answers are, and no router is."""
    command = [sys.executable, "-m", "balanceroute.proxy", "replay", "--target", url]
    command += ["--trace", str(trace), "--model", MODEL, "--concurrency", str(IN_FLIGHT)]
    report = folder / "replay.json"
    command += ["--emulation", engine, "--json", str(report)]
    with (folder / "replay.txt").open("wb") as out:
        client = subprocess.Popen(command, stdout=out, stderr=out)
        with ended(client):
            yield
            if client.poll() is not None:
                raise SystemExit(f"the load ended too early: {folder / 'replay.txt'}")
            client.send_signal(SIGINT)
            client.wait(_END_S)
    (figures,) = json.loads(report.read_text())["results"]
    if figures["wrong_lengths"] or figures["errors"]:
        # Another load than behind the other routers.
        raise SystemExit(f"requests failed, or answers were not as long as asked: {report}")


def _audit(prefill: list[str], decode: list[str], minutes: float, folder: Path) -> Found:
    """Return what an audit finds, and what the engines count meanwhile."""
    out = folder / "audit.json"
    command = [sys.executable, "-m", "balanceroute.proxy", "audit", "--json", str(out)]
    command += ["--prefill", *prefill, "--decode", *decode]
    command += ["--minutes", str(minutes), "--interval-s", "0.25"]
    with (folder / "audit.txt").open("wb") as text:
        process = subprocess.Popen(command, stdout=text, stderr=text)
        counted = [_count(decode[0])]
        # Then it simulates.
        while counted[-1].at_s < counted[0].at_s + 60.0 * minutes:
            time.sleep(_COUNT_S)
            counted.append(_count(decode[0]))
        if process.wait() != 0:
            raise SystemExit((folder / "audit.txt").read_text())
    audit = json.loads(out.read_text())
    if audit["recovery"] is None:
        raise SystemExit(f"nothing is predicted: {audit['unknown']}")
    return Found(audit, counted)


def _count(engine: str) -> Counted:
    at_s = time.monotonic()
    stats = httpx.get(f"{engine}/emulation/stats", trust_env=False).json()
    return Counted(stats["idle_tokens"], stats["capacity_tokens"], stats["output_tokens"], at_s)


def _table(found: dict[str, list[Found]]) -> str:
    names = ("idle by the audit", "by the engines", "tokens/s by both")
    lines = [
        table_head("router", *right([*names, "BR-H's gain predicted", "measured", "difference"]))
    ]
    for name, of_loads in found.items():
        idle = [
            fmean(one.audit["idle_fraction"] for one in of_loads),
            fmean(one.idle for one in of_loads),
        ]
        audited = fmean(one.audit["output_tokens_per_s"] for one in of_loads)
        emitted = fmean(one.tokens_per_s for one in of_loads)
        gains = ["", "", ""] if name == OURS else _gains(of_loads, found[OURS])
        shares = (f"{100 * share:.1f} %" for share in idle)
        lines.append(table_row(name, *shares, f"{audited:,.0f} / {emitted:,.0f}", *gains))
    return "\n".join(lines)


def _gains(before: list[Found], after: list[Found]) -> list[str]:
    """Return BR-H's gain as predicted and as measured, and the difference of the two."""
    predicted = [one.predicted for one in before]
    measured = [_measured(*pair) for pair in zip(before, after, strict=True)]
    gains = [[gain for gain, _ in pairs] for pairs in (predicted, measured)]
    differences = [told - true for told, true in zip(*gains, strict=True)]
    if len(before) == 1:
        return [_percent(*predicted[0]), _percent(*measured[0]), f"{100 * differences[0]:+.1f} %"]
    return [
        _percent(fmean(values), stdev(values) / len(values) ** 0.5)
        for values in (*gains, differences)
    ]


def _measured(before: Found, after: Found) -> tuple[float, float]:
    """Return how much sooner the same tokens came, and its standard error by the parts of them."""
    both = before, after
    first = max(one.counted[0].output_tokens for one in both)
    last = min(one.counted[-1].output_tokens for one in both)
    edges = [first + (last - first) * part / _PARTS for part in range(_PARTS + 1)]
    took, takes = (
        [end_s - begin_s for begin_s, end_s in pairwise(map(one.reached_s, edges))] for one in both
    )
    ratio = sum(took) / sum(takes)
    misses = [slow - ratio * quick for slow, quick in zip(took, takes, strict=True)]
    return ratio - 1.0, stdev(misses) / len(misses) ** 0.5 / fmean(takes)


def _percent(gain: float, error: float) -> str:
    return f"{100 * gain:+.1f} +- {100 * error:.1f} %"
