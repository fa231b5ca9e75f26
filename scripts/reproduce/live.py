"""Live runs before emulated engines: policies beside what the simulator predicts for them."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
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
from balanceroute.proxy.lab.sim.report import figure
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.settings import Given, given_by_flags
from balanceroute.topologies.topology import read_topology
from balanceroute.traces import TraceRequest, read_trace
from experiment import proxy_before, right, spread, table_head, table_row

# What is compared: heading, figure of the simulator, unit, digits.
FIGURES = (
    ("idle %", "idle_fraction", 100.0, 1),
    ("output tokens/s", "output_tokens_per_s", 1.0, 0),
    ("TTFT p99 s", "ttft_s_p99", 1.0, 1),
)
# Further figures: label, figure, unit (None: real milliseconds), digits.
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

    figures: dict[str, Any]  # The replay's row of figures, and what the proxy's metrics add.
    picture: list[list[int]]  # Loads by step and rank at the beginning of the steady state.
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
    figures["loop_lag_ms"] = 1e3 * samples[f"{lag}_sum"] / max(1.0, samples[f"{lag}_count"])
    figures["lease_lapses"] = round(samples["balanceroute_lease_lapses_total"])
    return Live(figures, picture, failed)


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
        one for heading, *_ in FIGURES for one in (f"{heading} live", "simulated", "deviation")
    ]
    lines = [table_head("policy", *right(names))]
    for measured, predicted in zip(live, simulated, strict=True):
        cells: list[str] = []
        for _, name, unit, digits in FIGURES:
            cells += [
                figure(unit * measured.mean[name], 0.0, digits),
                figure(unit * predicted.mean[name], unit * predicted.stderr[name], digits),
                f"{100 * deviation(measured, predicted, name):+.1f} %",
            ]
        lines.append(table_row(measured.policy, *cells))
    return "\n".join(lines)


def particulars(lives: Mapping[str, Live], time_scale: float) -> str:
    """Return what else was measured, and how well the machine kept up, a policy a column."""
    lines = [table_head("live", *right(list(lives)))]
    for label, name, unit, digits in PARTICULARS:
        values = [one.figures[name] for one in lives.values()]
        scale = unit or 1 / time_scale
        shown = ("-" if value is None else f"{scale * value:,.{digits}f}" for value in values)
        lines.append(table_row(label, *shown))
    return "\n".join(lines)


def conclusions(
    live: Sequence[PolicyResult], lives: Mapping[str, Live], time_scale: float
) -> list[str]:
    """Return what the tables come to."""
    base, *rest = live
    said = []
    for one in rest:
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
            "live": lives[measured.policy].figures,
            "simulated": predicted.mean,
            "spread": predicted.stderr,
            "deviation": {name: deviation(measured, predicted, name) for _, name, *_ in FIGURES},
        }
        for measured, predicted in zip(live, simulated, strict=True)
    ]
    text = json.dumps({"config": asdict(setup), "results": rows}, indent=2, default=str)
    (setup.out / "demo.json").write_text(f"{text}\n", encoding="utf-8")


def read_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[Setup, list[str]]:
    """Return what the command line asks for, and the policies."""
    trace = Path("traces/public/mooncake_conversation.jsonl.gz")
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/demo"), help="where to write")
    add("--policy", default="jsq,br-h", help="the first is what others compare to")
    add("--topology", default="emulated-2p8d", help="whose engines are emulated")
    add("--trace", type=Path, default=trace, help="what to replay")
    add("--skip", type=int, default=5000, help="requests to pass over first")
    add("--requests", type=positive, default=1500, help="requests to replay")
    add("--concurrency", type=positive, default=192, help="always outstanding")
    add("--time-scale", type=float, default=4.0, help="emulated per real second")
    add("--prefill-us-per-token", type=float, default=5.0, help="emulated time")
    add("--predictor", default="survival", help="BR-H's: none, survival, exact-match or a file")
    add("--first-token", choices=("prefill", "decode"), default="decode", help="as of serve")
    add("--simulations", type=positive, default=10, help="simulated runs of each policy")
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


# Runs of policies whose difference single runs do not show.
REPEATED, RUNS = "jsq,fifo,br-h", 5
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


def demo_rows(out: Path, *flags: str) -> list[dict[str, Any]]:
    """Run the demo; return its rows."""
    if demo(argparse.ArgumentParser(), ["--out", str(out), *flags]):
        raise SystemExit("requests failed")
    rows: list[dict[str, Any]] = json.loads((out / "demo.json").read_text())["results"]
    return rows


def live_table(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The table of five live runs in docs/appendix/live.md, as Markdown: 22 minutes.

    Runs scripts/reproduce demo again and again, and prints what it measured and simulated, a policy a row.
    Nothing else should run on the machine: engines that are late by more than a step measure it.
    """
    parser.add_argument("--out", type=Path, default=Path("build/live_table"), help="for the runs")
    out: Path = parser.parse_args(words).out
    # The simulation is the same each time.
    simulations = ["10", *["1"] * (RUNS - 1)]
    runs = [
        demo_rows(out / str(number), "--policy", REPEATED, "--simulations", count)
        for number, count in enumerate(simulations)
    ]
    headings = [
        one
        for title, _, simulated, _, _ in MEASURED
        for one in ([title] if simulated is None else [title, "simulated"])
    ]
    lines = [table_head("policy", *right(headings))]
    for several in zip(*runs, strict=True):
        cells = [f"`{several[0]['policy']}`"]
        for _, live, simulated, scale, digits in MEASURED:
            cells.append(spread([scale * run["live"][live] for run in several], digits))
            if simulated is not None:
                mean, plus_minus = (
                    scale * several[0][kind][simulated] for kind in ("simulated", "spread")
                )
                cells.append(figure(mean, plus_minus, digits))
        lines.append(table_row(*cells))
    print("\n".join(lines))
