"""One run: a load with faults between two without any, and the audit."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from balanceroute.proxy.emulate import EmulationSettings
from balanceroute.proxy.emulate.process import emulated_engines
from balanceroute.proxy.testing.soak.audit import (
    contradiction,
    held_by_engines,
    held_by_proxy,
    not_up,
    outcomes_counted,
    phase_of,
    read_log,
)
from balanceroute.proxy.testing.soak.control import Control
from balanceroute.proxy.testing.soak.load import Load
from balanceroute.proxy.testing.soak.nemesis import torment
from balanceroute.proxy.testing.soak.plans import Plan, Plans
from balanceroute.proxy.testing.soak.proxy_process import Footprint, ProxyProcess, running_proxy
from balanceroute.proxy.testing.soak.report import Report
from balanceroute.proxy.testing.soak.verdict import Kind, Verdict

PREFILLERS, RANKS, BATCH = 2, 4, 8
TIME_SCALE = 10.0
MEAN_OUTPUT = 60.0
# More than fit into batches (32) and pool (16), so that some wait before prefill.
CLIENTS = 56
LEAVING = 0.2
# Of the real clock, in seconds.
LEASE_S = 1.0
STANDSTILL_S = 1.3
_QUIET_S = 20.0
_POLL_S = 0.05
_LOG_S = 5.0
# Growth that is no leak: the allocator's, and what prompts of 100 kB leave of it.
_GROWTH_MIB = 24.0
# Of health checks and scrapes, to each engine.
_IDLE_HTTPX = 2
_SERVE = (
    f"--port 0 --admin-port 0 --batch {BATCH} --window 8 --pool-limit 16 "
    f"--lease-s {LEASE_S} --lease-margin-s 0.3 --prefill-timeout-s 2 --first-token-timeout-s 2 "
    "--idle-stream-timeout-s 1 --answer-timeout-s 3 --retry-backoff-s 0.02 "
    "--health-interval-s 0.5"
)


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """How a run goes.

    Attributes:
        requests: Requests of the load with faults.
        warm_up: Requests before it.
        afterwards: Requests behind it.
        seed: Decides the requests.
        wait_for_idle: Whether to wait until the idle connections to the engines are closed, too.
        connector: How KV caches travel.
        policy: The proxy's.
    """

    requests: int
    warm_up: int
    afterwards: int
    seed: int
    wait_for_idle: bool
    connector: str = "nixl"
    policy: str = "br-h"


def soak(settings: SoakSettings, folder: Path) -> Report:
    """Start everything, run once, and end everything.

    Args:
        settings: How.
        folder: For the proxy's logs.

    Raises:
        ProxyProcessError: The proxy did not start.
        EngineProcessError: The engines did not start.
    """
    command = [sys.executable, "-m", "balanceroute.proxy", "emulate", "--port=0"]
    command += [f"--prefillers={PREFILLERS}", f"--ranks={RANKS}", f"--batch={BATCH}"]
    command += [f"--lease-s={LEASE_S * TIME_SCALE}", f"--time-scale={TIME_SCALE}"]
    # So slow that clients find the time to leave meanwhile.
    command += ["--prefill-base-ms=50", "--prefill-us-per-token=10", "--transfer-base-ms=100"]
    command += [f"--mean-output={MEAN_OUTPUT}", f"--connector={settings.connector}"]
    with emulated_engines([*command, "--json-ready", "--exit-with-stdin"]) as engines:
        prefill, decode = (cast("list[str]", engines[role]) for role in ("prefill", "decode"))
        flags = [*_SERVE.split(), "--policy", settings.policy, "--connector", settings.connector]
        for role, urls in engines.items():
            flags += [f"--{role}", *cast("list[str]", urls)]
        with running_proxy(flags, engines=prefill + decode, folder=folder) as proxy:

            async def run() -> Report:
                one = _Run(settings, proxy, engine_url=prefill[-1])
                await one.run()
                return one.report

            return asyncio.run(run())


class _Run:
    def __init__(self, settings: SoakSettings, proxy: ProxyProcess, *, engine_url: str) -> None:
        self.report = Report()
        self._settings = settings
        self._proxy = proxy
        self._engines = Control(engine_url)
        self._admin = Control(f"http://{proxy.host}:{proxy.admin_port}")
        self._plans = Plans(
            random.Random(settings.seed),
            EmulationSettings(mean_output_tokens=MEAN_OUTPUT),
            f"{proxy.host}:{proxy.port}",
        )
        self._clock = asyncio.get_running_loop().time
        self._sent: dict[str, Plan] = {}
        self._verdicts: dict[str, Verdict] = {}

    async def run(self) -> None:
        """Send everything and look at what is left of it."""
        settings = self._settings
        await self._send_without_faults("before", settings.warm_up)
        before = await self._quiet()
        plans = [
            self._plans.draw(f"soak-{number}", leaving=LEAVING)
            for number in range(settings.requests)
        ]
        load = Load(self._proxy.host, self._proxy.port, plans)
        memory: list[float] = []
        begin_s = self._clock()
        async with asyncio.TaskGroup() as group:
            group.create_task(
                torment(
                    self._engines,
                    load,
                    recomputing=settings.connector == "mooncake-ascend",
                    stand_still=partial(self._proxy.suspend, STANDSTILL_S),
                )
            )
            group.create_task(self._watch_memory(load, memory))
            group.create_task(load.run(CLIENTS))
        took_s = self._clock() - begin_s
        self._keep(plans, load)
        self._judge_load(load.verdicts, took_s)
        await self._send_without_faults("afterwards", settings.afterwards)
        after = await self._quiet()
        self._judge_footprint(before, after, memory)
        await self._judge_log()
        self._admin.close()
        self._engines.close()

    # Loads.

    def _keep(self, plans: Sequence[Plan], load: Load) -> None:
        self._sent |= {plan.name: plan for plan in plans}
        self._verdicts |= load.verdicts

    async def _send_without_faults(self, name: str, count: int) -> None:
        """Send requests that must all be answered."""
        await self._all_up()
        plans = [self._plans.draw(f"{name}-{i}", leaving=0.0, big=0.1) for i in range(count)]
        load = Load(self._proxy.host, self._proxy.port, plans)
        await load.run(CLIENTS // 2)
        self._keep(plans, load)
        bad = [
            f"{one}: {verdict}"
            for one, verdict in load.verdicts.items()
            if verdict.kind is not Kind.RIGHT or verdict.wrong
        ]
        text = f"{count - len(bad)} of {count} answered"
        self.report.check(f"{name}, without faults", text, not bad, str(bad[:3]))

    async def _watch_memory(self, load: Load, memory: list[float]) -> None:
        for fifth in range(1, 6):
            await load.reached(fifth / 5)
            memory.append(self._proxy.footprint().rss_mib)

    # What is left.

    async def _all_up(self) -> None:
        """Wait until the proxy uses every engine again."""
        end_s = self._clock() + _QUIET_S
        while away := not_up((await self._admin.get("/admin/state"))["state"]):
            if self._clock() > end_s:
                self.report.check("engines back", away, right=False)
                return
            await asyncio.sleep(_POLL_S)

    async def _quiet(self) -> Footprint:
        """Wait until nothing is held any more; return what the proxy's process then holds."""
        end_s = self._clock() + _QUIET_S
        while True:
            state = (await self._admin.get("/admin/state"))["state"]
            stats = await self._engines.get("/emulation/stats")
            here, there = held_by_proxy(state), held_by_engines(stats)
            if self._settings.wait_for_idle and state["engine_connections"]:
                here["engine connections"] = state["engine_connections"]
            if not (here or there) or self._clock() > end_s:
                break
            await asyncio.sleep(_POLL_S)
        self.report.check("held by the proxy", here or "nothing", not here)
        self.report.check("held by the engines", there or "nothing", not there)
        self.report.note("connections to engines, all idle", state["engine_connections"])
        return self._proxy.footprint()

    def _judge_load(self, verdicts: Mapping[str, Verdict], took_s: float) -> None:
        report, requests = self.report, self._settings.requests
        report.check("requests", requests, len(verdicts) == requests, f"{len(verdicts)} ended")
        for kind in Kind:
            count = sum(verdict.kind is kind for verdict in verdicts.values())
            report.check(f"  {kind.value}", count, not count or kind not in (Kind.CUT, Kind.HUNG))
        errors = Counter(v.status for v in verdicts.values() if v.kind is Kind.ERROR)
        report.note("  errors by status", dict(sorted(errors.items())))
        report.faults("wrong answers", [f"{name}: {v}" for name, v in verdicts.items() if v.wrong])
        report.note("requests/s", f"{requests / took_s:.0f}")

    def _judge_footprint(self, before: Footprint, after: Footprint, memory: list[float]) -> None:
        report = self.report
        slack = _IDLE_HTTPX * (PREFILLERS + RANKS)
        if not self._settings.wait_for_idle:
            slack += CLIENTS
        for name in sorted({*before.files, *after.files}):
            was, now = before.files.get(name, 0), after.files.get(name, 0)
            most = was + slack if name == "engines" else was
            report.check(f"descriptors: {name}", f"{was}, then {now}", now <= most)
        threads = f"{before.threads}, then {after.threads}"
        report.check("threads", threads, after.threads <= before.threads)
        steps = " ".join(f"{mib:.1f}" for mib in memory)
        text = f"{before.rss_mib:.1f}, at each fifth {steps}, then {after.rss_mib:.1f}"
        report.check("memory, MiB", text, after.rss_mib <= before.rss_mib + _GROWTH_MIB)

    async def _judge_log(self) -> None:
        """Compare the metrics with the request log, and that with what clients saw."""
        report = self.report
        counted = outcomes_counted(await self._admin.text("/metrics"))
        end_s = self._clock() + _LOG_S
        lines, errors = read_log(self._proxy.log)
        while len(lines) < counted.total() and self._clock() < end_s:
            await asyncio.sleep(_POLL_S)  # The log is written by a thread.
            lines, errors = read_log(self._proxy.log)
        logged = Counter(line["outcome"] for line in lines)
        report.note("outcomes in the log", dict(sorted(logged.items())))
        report.check("outcomes in the metrics", dict(sorted(counted.items())), counted == logged)
        by_name = {line["request_id"]: line for line in lines}
        report.check("log lines", len(lines), len(by_name) == len(lines), "one id has two")
        report.faults("log lines of no request", sorted(by_name.keys() - self._sent.keys()))
        wrong = []
        for name, plan in self._sent.items():
            line = by_name.get(name)
            fault = contradiction(plan, self._verdicts[name], line)
            if fault:
                wrong.append(f"{name}: {fault}: {line}")
        report.faults("log lines that contradict the client", wrong)
        report.note("requests that were never read", len(self._sent) - len(lines))
        phases = Counter(phase_of(line) for line in lines if line["outcome"] == "cancelled")
        report.note("cancelled, by phase", dict(phases.most_common()))
        hit = sum(line["retries"] > 0 or line["outcome"] == "upstream_error" for line in lines)
        report.note("hit by engine faults", f"{hit} ({hit / len(lines):.1%})")
        for name in ("retries", "lease_lapses", "recomputes"):
            report.note(name.replace("_", " "), sum(line[name] for line in lines))
        report.note("leases", (await self._engines.get("/emulation/stats"))["leases"])
        report.faults("errors of the proxy's own", errors + _lines_of(self._proxy.stderr))


def _lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines()
