"""One run: a load with faults between two without any, and the audit."""

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.testing.chaos.audit import audit_answers, audit_metrics
from balanceroute.proxy.testing.chaos.judge import Judge
from balanceroute.proxy.testing.chaos.oracle import Oracle
from balanceroute.proxy.testing.chaos.world import WorldSettings
from balanceroute.proxy.testing.soak.audit import (
    Line,
    held_by_engines,
    held_by_proxy,
    not_up,
    phase_of,
    read_log,
    record_of,
)
from balanceroute.proxy.testing.soak.control import Control
from balanceroute.proxy.testing.soak.load import Load
from balanceroute.proxy.testing.soak.plan import draw_plan
from balanceroute.proxy.testing.soak.proxy_process import Footprint, ProxyProcess, running_proxy
from balanceroute.proxy.testing.soak.report import Report
from balanceroute.proxy.testing.soak.saboteur import Saboteur

PREFILLERS, RANKS, BATCH = 2, 4, 8
TIME_SCALE = 10.0
MEAN_OUTPUT = 60.0
# More than fit into batches (32) and pool (16), so that some wait before prefill.
CLIENTS = 56
# Of the real clock, in seconds.
LEASE_S, MARGIN_S = 3.0, 1.5
# After this share of the load the proxy stands still: KV caches that it has in hand are too old then.
# Not for as long as leases last: what it was just sending would come too late, which no proxy can see.
STANDSTILL, STANDSTILL_S = 0.8, 1.6
_QUIET_S = 20.0
# Engines that failed again and again are probed every 30 s.
_BACK_S = 40.0
_POLL_S = 0.05
_LOG_S = 5.0
# Growth that is no leak: the allocator's, and what prompts of 100 kB leave of it.
_GROWTH_MIB = 24.0
# Of health checks and scrapes, to each engine.
_IDLE_PROBES = 2
_SERVE = (
    f"--port 0 --admin-port 0 --batch {BATCH} --window 8 --pool-limit 16 "
    f"--lease-s {LEASE_S} --lease-margin-s {MARGIN_S} --connect-timeout-s 1 "
    "--prefill-timeout-s 2 --first-token-timeout-s 2 --idle-stream-timeout-s 1 "
    "--answer-timeout-s 3 --retry-backoff-s 0.02 --health-interval-s 0.5 --queue-ttl-s 5"
)


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """How a run goes.

    Attributes:
        requests: Requests of the load with faults.
        warm_up: Requests before it.
        afterwards: Requests behind it.
        seed: Decides requests and faults.
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
        roles = {role: cast("list[str]", urls) for role, urls in engines.items()}
        flags = [*_SERVE.split(), "--policy", settings.policy, "--connector", settings.connector]
        for role, urls in roles.items():
            flags += [f"--{role}", *urls]
        serving = roles["prefill"] + roles["decode"]
        with running_proxy(flags, engines=serving, folder=folder) as proxy:
            names = {
                f"{role}/{i}": url for role, urls in roles.items() for i, url in enumerate(urls)
            }

            async def run() -> Report:
                one = _Run(settings, proxy, names)
                await one.run()
                return one.report

            return asyncio.run(run())


class _Run:
    def __init__(
        self, settings: SoakSettings, proxy: ProxyProcess, urls: Mapping[str, str]
    ) -> None:
        self.report = Report()
        self._settings = settings
        self._proxy = proxy
        self._urls = urls
        self._engines = Control(urls[f"prefill/{PREFILLERS - 1}"])
        self._admin = Control(f"http://{proxy.host}:{proxy.admin_port}")
        engines = EmulationSettings(
            prefillers=PREFILLERS,
            ranks=RANKS,
            connector=settings.connector,
            mean_output_tokens=MEAN_OUTPUT,
        )
        self._world = WorldSettings(engines, {})
        self._clock = asyncio.get_running_loop().time
        self._loads: dict[str, Load] = {}

    async def run(self) -> None:
        """Send everything and look at what is left of it."""
        asyncio.get_running_loop().set_exception_handler(self._failed)
        settings = self._settings
        await self._begin("before", settings.warm_up, calm=True).run(CLIENTS // 2)
        before = await self._quiet()
        load = self._begin("with faults", settings.requests, calm=False)
        saboteur = Saboteur(self._engines, self._admin, self._urls, load.plan.injections)
        memory: list[float] = []
        begin_s = self._clock()
        async with asyncio.TaskGroup() as group:
            group.create_task(saboteur.work(load))
            group.create_task(self._watch_memory(load, memory))
            group.create_task(self._stand_still(load))
            group.create_task(load.run(CLIENTS))
        self.report.note("requests/s", f"{settings.requests / (self._clock() - begin_s):.0f}")
        await self._all_up()
        await self._begin("afterwards", settings.afterwards, calm=True).run(CLIENTS // 2)
        after = await self._quiet()
        self._judge_footprint(before, after, memory)
        await self._judge_requests()
        self._admin.close()
        self._engines.close()

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Tell of what a client could not read, above all."""
        self.report.faults("exceptions of the clients", [str(context)])

    # Loads.

    def _begin(self, name: str, count: int, *, calm: bool) -> Load:
        first = sum(len(load.plan.requests) for load in self._loads.values())
        numbers = range(first, first + count)
        plan = draw_plan(self._settings.seed, numbers, self._world, calm=calm)
        load = self._loads[name] = Load(plan, self._proxy.host, self._proxy.port)
        return load

    async def _stand_still(self, load: Load) -> None:
        await load.reached(STANDSTILL * load.plan.calm_s)
        await self._proxy.suspend(STANDSTILL_S)

    async def _watch_memory(self, load: Load, memory: list[float]) -> None:
        for fifth in range(1, 6):
            await load.reached(fifth / 5 * load.plan.calm_s)
            memory.append(self._proxy.footprint().rss_mib)

    # What is left.

    async def _all_up(self) -> None:
        """Wait until the proxy uses every engine again."""
        end_s = self._clock() + _BACK_S
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
        self.report.check("misreads", stats["misreads"], not stats["misreads"])
        self.report.note("connections to engines, all idle", state["engine_connections"])
        return self._proxy.footprint()

    def _judge_footprint(self, before: Footprint, after: Footprint, memory: list[float]) -> None:
        report = self.report
        slack = _IDLE_PROBES * (PREFILLERS + RANKS)
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

    async def _judge_requests(self) -> None:
        """Compare what clients got with the right answers, and with the proxy's word on it."""
        report = self.report
        lines, errors = await self._log()
        told = [record_of(line) for line in lines]
        oracle = Oracle(self._world.engines)
        await oracle.start()
        strangers = {record.request_id for record in told}
        for name, load in self._loads.items():
            report.note("requests " + name, len(load.plan.requests))
            await oracle.learn(load.plan.requests)
            endings: Counter[str] = Counter()
            judge = Judge(load.plan, oracle)
            names = {request.request_id for request in load.plan.requests}
            strangers -= names
            mine = [record for record in told if record.request_id in names]
            wrong = await audit_answers(judge, load.clients, mine, endings)
            for ending, count in endings.most_common():
                report.note("  " + ending, count)
            report.faults("  wrong", wrong)
            report.faults("  lost", load.lost)
        await oracle.close()
        report.faults("log lines of no request", sorted(strangers))
        self._tell_of_the_log(lines)
        report.note("leases", (await self._engines.get("/emulation/stats"))["leases"])
        page = await self._admin.text("/metrics")
        report.faults("metrics that differ from the log", audit_metrics(told, page.encode()))
        report.faults("errors of the proxy's own", errors + _lines_of(self._proxy.stderr))

    async def _log(self) -> tuple[list[Line], list[str]]:
        """Return the log once it is complete: a thread writes it."""
        end_s = self._clock() + _LOG_S
        page = (await self._admin.text("/metrics")).encode()
        while True:
            lines, errors = read_log(self._proxy.log)
            told = [record_of(line) for line in lines]
            if not audit_metrics(told, page) or self._clock() > end_s:
                return lines, errors
            await asyncio.sleep(_POLL_S)

    def _tell_of_the_log(self, lines: list[Line]) -> None:
        report = self.report
        outcomes = Counter(line["outcome"] for line in lines)
        report.note("outcomes in the log", dict(sorted(outcomes.items())))
        phases = Counter(phase_of(line) for line in lines if line["outcome"] == "cancelled")
        report.note("cancelled, by phase", dict(phases.most_common()))
        hit = sum(line["retries"] > 0 or line["outcome"] == "upstream_error" for line in lines)
        report.note("hit by engine faults", f"{hit} ({hit / len(lines):.1%})")
        for name in ("retries", "lease_lapses", "recomputes"):
            report.note(name.replace("_", " "), sum(line[name] for line in lines))


def _lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines()
