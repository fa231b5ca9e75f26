"""One run: a load with faults between two without any, and the audit."""

import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from msgspec.structs import fields
from tests.support.chaos.audit import SLOWING, audit_answers, audit_metrics
from tests.support.chaos.clients import Client, ClientPhase, Visit
from tests.support.chaos.expectation import TextOracle
from tests.support.chaos.faults import Act, Injection, draw_injections
from tests.support.chaos.judge import Judge
from tests.support.chaos.plan import MODEL, ChaosPlan, Weather, draw_visits
from tests.support.chaos.requests import RequestMix
from tests.support.chaos.world import WorldSettings
from tests.support.soak.proxy_process import Footprint, ProxyProcess, running_proxy

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.lab.emulate.faults import AfterPull, MalformedStream
from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.wire.http1.client import Endpoint, fetch

# What the proxy and the engines still hold, by their own pages, and the lines of the proxy's log.

Line = Mapping[str, Any]
"""A line of the request log."""
# What the log writes as the record has it.
_LOGGED = {one.name for one in fields(RequestRecord)} - {"keys", "outcome"}


def held_by_proxy(state: Mapping[str, Any]) -> dict[str, int]:
    """Return what /admin/state says is in use, or not as at the start."""
    found = {name: state[name] for name in ("queued", "prefilling", "pooled", "decoding")}
    found["client connections"] = state["client_connections"]
    for rank in state["ranks"]:
        for name in ("kv_tokens", "bound", "started"):
            found[f"{name} of {rank['name']}"] = rank[name]
    for one in state["prefillers"]:
        for name in ("probes", "held_tokens"):
            found[f"{name} of {one['name']}"] = one[name]
    return {name: value for name, value in found.items() if value}


def not_up(state: Mapping[str, Any]) -> list[str]:
    """Return the engines that the proxy does not use, by /admin/state."""
    return [one["name"] for one in (*state["ranks"], *state["prefillers"]) if not one["open"]]


def held_by_engines(stats: Mapping[str, Any]) -> dict[str, object]:
    """Return what /emulation/stats says is in use."""
    found: dict[str, object] = {"leases": stats["leases"]["held"], "anything": not stats["idle"]}
    for name in ("loads", "running", "waiting", "arriving", "held_blocks"):
        found[name] = stats[name] if any(stats[name]) else None
    return {name: value for name, value in found.items() if value}


def read_log(log: Path) -> tuple[list[Line], list[str]]:
    """Return the lines of requests, and those of errors of the proxy's own."""
    requests, errors = [], []
    for text in log.read_text().splitlines():
        line = json.loads(text)
        if "request_id" in line:
            requests.append(line)
        elif line["level"] == "error" or "exception" in line:
            errors.append(text)
    return requests, errors


def record_of(line: Line) -> RequestRecord:
    """Return the record of a request in a log line, without its times."""
    fields = {name: value for name, value in line.items() if name in _LOGGED}
    return RequestRecord(
        **fields,
        arrived_ns=0,
        arrived_unix_s=line["arrival_s"],
        outcome=Outcome(line["outcome"]),
    )


def phase_of(line: Line) -> str:
    """Return where a cancelled request was."""
    if line["queue_s"] is None:
        return "queued"
    if line["prefill_s"] is None:
        return "prefilling"
    if not line["rank"]:
        return "pooled"
    return "before the first token" if line["ttft_s"] is None else "streaming"


# Many clients that work a plan's visits off.

# Longer than all of the proxy's time limits and retries together.
_GIVE_UP_S = 45.0
# A client waits so long after a refusal: else an outage would use all requests up.
_LATER_S = 0.3


class SoakLoad:
    """One plan's visits, one after the other, whenever a client is free."""

    def __init__(self, plan: ChaosPlan, host: str, port: int) -> None:
        self.plan = plan
        self.clients: list[Client] = []
        self.lost: list[str] = []  # Requests that had no end in time, or no connection.
        self.done = 0  # How many requests were sent and have ended.
        self._host = host
        self._port = port
        self._visits = list(reversed(plan.visits))
        self._waiting: list[tuple[float, asyncio.Event]] = []

    async def run(self, clients: int) -> None:
        """Send everything, from so many clients at a time; all their connections are closed then."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._work())

    async def reached(self, plan_s: float) -> None:
        """Wait until the plan's time is `plan_s`, or everything was sent."""
        if self._now_s < min(plan_s, self.plan.calm_s):
            event = asyncio.Event()
            self._waiting.append((plan_s, event))
            await event.wait()

    @property
    def _now_s(self) -> float:
        return self.plan.calm_s * self.done / len(self.plan.requests)

    async def _work(self) -> None:
        while self._visits:
            visit = self._visits.pop()
            client = Client(visit, on_left=lambda _: None)
            self.clients.append(client)
            try:
                async with asyncio.timeout(_GIVE_UP_S):
                    await client.run(self._host, self._port)
            except TimeoutError:
                self.lost += [request.request_id for request in visit.requests]
            if not client.sent:
                self.lost.append(visit.requests[0].request_id)
            ended = max(1, client.sent)
            if rest := visit.requests[ended:]:
                # The proxy closed the connection behind an answer.
                self._visits.append(replace(visit, requests=rest))
            self._advance(ended)
            if client.answers[0].status in (429, 503):
                await asyncio.sleep(_LATER_S)

    def _advance(self, count: int) -> None:
        self.done += count
        now_s = self._now_s
        for plan_s, event in self._waiting:
            if plan_s <= now_s or self.done == len(self.plan.requests):
                event.set()


# What happens in a soak: a chaos run's plan, with what can be done to real processes.
#
# Its time is no clock's. It goes on with the load, so that a slow machine has the same faults at
# the same requests.

S_PER_REQUEST = 0.06
LEAVING = 0.2
_MIX = RequestMix(MODEL, max_tokens=120, big=0.02, big_bytes=(50_000, 150_000), odd=0.02)
_REQUESTS_PER_FAULT = 8
# In this first part of a load faults begin, so that the last engine is back soon after it.
_FAULTY = 0.85
_ACTS = frozenset({Act.BOARD, Act.KILL, Act.DRAIN})


def draw_plan(seed: int, numbers: range, world: WorldSettings, *, calm: bool) -> ChaosPlan:
    rng = random.Random(f"soak {seed} {numbers.start}")
    span_s = len(numbers) * S_PER_REQUEST
    visits = draw_visits(rng, numbers, span_s, _MIX, leaving=0.0 if calm else LEAVING)
    injections = draw_injections(
        rng,
        count=0 if calm else len(numbers) // _REQUESTS_PER_FAULT,
        prefillers=world.engines.prefillers,
        decoders=world.engines.ranks,
        connector=world.engines.connector,
        policies=("",),  # No order switches them here.
        span_s=_FAULTY * span_s,
    )
    return ChaosPlan(
        seed,
        Weather.CALM if calm else Weather.FAULTS,
        world,
        tuple(_with_real_wires(visit) for visit in visits),
        tuple(one for one in injections if _is_possible(one, world.engines.prefillers - 1)),
        storm_s=None,
        calm_s=span_s,
        shutdown_s=None,
    )


def _with_real_wires(visit: Visit) -> Visit:
    """Return a visit without what only a wire in memory and a look into the proxy allow."""
    departure = visit.departure
    if departure is not None and departure.phase is ClientPhase.QUEUED:
        departure = replace(departure, phase=ClientPhase.SENDING)
    elif departure is not None and departure.phase not in (
        ClientPhase.STREAMING,
        ClientPhase.LAST_WORD,
    ):
        departure = replace(departure, phase=ClientPhase.AFTER)
    return replace(visit, departure=departure, pauses=(), link=None)


def _is_possible(injection: Injection, control: int) -> bool:
    """Return whether a fault can be had here.

    Not if it makes an engine late for a KV cache, which no proxy can see (`chaos.audit`), or costs as
    much memory as a leak. And the prefiller `control` takes the orders to all engines.
    """
    changes = injection.changes
    if injection.act not in _ACTS or changes.get("malformed") is MalformedStream.HUGE:
        return False
    if changes.keys() & SLOWING - {"hang"}:
        return False
    out_of_reach = injection.act is Act.KILL or "refuse" in changes
    return not (out_of_reach and (injection.role, injection.engine) == (Role.PREFILL, control))


def is_deadly(injection: Injection) -> bool:
    """Return whether engines die of a fault."""
    return injection.act is Act.KILL or injection.changes.get("after_pull") is AfterPull.DEATH


# What a run found, as a table.

_SHOWN = 20
_SHOWN_CHARACTERS = 600


@dataclass(slots=True)
class SoakReport:
    """What was found."""

    # Name, value, and whether it is as it must be.
    rows: list[tuple[str, str, bool]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # What is wrong, in words.

    def note(self, name: str, value: object) -> None:
        self.rows.append((name, str(value), True))

    def check(self, name: str, value: object, right: bool) -> None:
        self.rows.append((name, str(value), right))
        if not right:
            self.wrong.append(f"{name}: {value}")

    def faults(self, name: str, faults: list[str]) -> None:
        """Add a row that counts faults, and the faults."""
        self.rows.append((name, str(len(faults)), not faults))
        self.wrong += [f"{name}: {fault}" for fault in faults]

    def text(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        lines = [
            f"{' ' if right else '!'} {name:<{width}}  {value}" for name, value, right in self.rows
        ]
        lines += [f"! {text[:_SHOWN_CHARACTERS]}" for text in self.wrong[:_SHOWN]]
        lines.append(f"{len(self.wrong)} violations")
        return "\n".join(lines)


# Small exchanges with a server's own pages.

_TIMEOUT_S = 10.0
_PAGE_BYTES = 1 << 24


class SoakControlError(BalanceRouteError):
    """A page that was refused."""


class SoakControl:
    """The pages of one server. Their methods raise ControlError, and WireError if no answer came."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._endpoint = Endpoint(parts.hostname, parts.port)

    async def get(self, path: str) -> Any:
        return json.loads(await self.text(path))

    async def text(self, path: str) -> str:
        return await self._exchange(b"GET", path, b"")

    async def post(self, path: str, values: Mapping[str, object]) -> None:
        await self._exchange(b"POST", path, json.dumps(values, default=_plain).encode())

    def close(self) -> None:
        self._endpoint.close()

    async def _exchange(self, method: bytes, path: str, body: bytes) -> str:
        response = await fetch(
            self._endpoint,
            method,
            path.encode(),
            [(b"content-type", b"application/json")],
            body,
            timeout_s=_TIMEOUT_S,
            max_bytes=_PAGE_BYTES,
        )
        if response.status != 200:
            raise SoakControlError(
                f"{self._endpoint.name}{path}: {response.status} {response.body!r}"
            )
        return response.body.decode()


def _plain(value: object) -> object:
    assert isinstance(value, Enum)
    return value.value


# Lets the faults of a plan happen to engines that are processes, and undoes them.


class SoakSaboteur:
    """Gives the orders of one plan."""

    def __init__(
        self,
        engines: SoakControl,
        admin: SoakControl,
        urls: Mapping[str, str],
        injections: Sequence[Injection],
    ) -> None:
        self._engines = engines
        self._admin = admin
        self._urls = urls
        self._injections = injections

    async def work(self, load: SoakLoad) -> None:
        """Do everything while a load runs, and undo it."""
        begins = [(one.start_s, number, True) for number, one in enumerate(self._injections)]
        ends = [(one.end_s, number, False) for number, one in enumerate(self._injections)]
        for at_s, number, begin in sorted([*begins, *ends]):
            await load.reached(at_s)
            await (self._begin if begin else self._end)(self._injections[number])
        await self._engines.post("/emulation/faults/clear", {})

    async def _begin(self, injection: Injection) -> None:
        engine = _engine(injection)
        if injection.act is Act.BOARD:
            await self._engines.post("/emulation/faults", {"engine": engine, **injection.changes})
        elif injection.act is Act.KILL:
            await self._engines.post("/emulation/kill", {"engine": engine})
        else:
            await self._admin.post("/admin/instances/drain", self._order(injection))

    async def _end(self, injection: Injection) -> None:
        engine = _engine(injection)
        if injection.act is Act.BOARD:
            await self._engines.post("/emulation/faults", {"engine": engine, **injection.usual})
        if is_deadly(injection):
            await self._engines.post("/emulation/restore", {"engine": engine})
        if injection.act is Act.DRAIN:
            # Unless another fault of this kind has ended already.
            with suppress(SoakControlError):
                await self._admin.post("/admin/instances", self._order(injection))

    def _order(self, injection: Injection) -> dict[str, object]:
        return {"role": injection.role.value, "url": self._urls[_engine(injection)]}


def _engine(injection: Injection) -> str:
    return f"{injection.role.value}/{injection.engine}"


PREFILLERS, RANKS, BATCH = 2, 4, 8
TIME_SCALE = 10.0
STEP_MS = 6.0  # Of the real clock.
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
    """How a run goes."""

    requests: int  # Requests of the load with faults.
    warm_up: int  # Requests before it.
    afterwards: int  # Requests behind it.
    seed: int  # Decides requests and faults.
    # Whether to wait until the idle connections to the engines are closed, too.
    wait_for_idle: bool
    connector: str = "nixl"  # How KV caches travel.
    policy: str = "br-h"  # The proxy's.
    native: str = "auto"  # Whether the native library moves streams, as for `--native`.


def soak(settings: SoakSettings, folder: Path) -> SoakReport:
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
    # Likewise: streams that wait for their engine are those that the native library moves.
    command += [f"--step-base-ms={STEP_MS * TIME_SCALE}"]
    command += [f"--mean-output={MEAN_OUTPUT}", f"--connector={settings.connector}"]
    with emulated_engines([*command, "--json-ready", "--exit-with-stdin"]) as engines:
        roles = {role: cast("list[str]", urls) for role, urls in engines.items()}
        flags = [*_SERVE.split(), "--policy", settings.policy, "--connector", settings.connector]
        flags += ["--native", settings.native]
        for role, urls in roles.items():
            flags += [f"--{role}", *urls]
        serving = roles["prefill"] + roles["decode"]
        with running_proxy(flags, engines=serving, folder=folder) as proxy:
            names = {
                f"{role}/{i}": url for role, urls in roles.items() for i, url in enumerate(urls)
            }

            async def run() -> SoakReport:
                one = _Run(settings, proxy, names)
                await one.run()
                return one.report

            return asyncio.run(run())


class _Run:
    def __init__(
        self, settings: SoakSettings, proxy: ProxyProcess, urls: Mapping[str, str]
    ) -> None:
        self.report = SoakReport()
        self._settings = settings
        self._proxy = proxy
        self._urls = urls
        self._engines = SoakControl(urls[f"prefill/{PREFILLERS - 1}"])
        self._admin = SoakControl(f"http://{proxy.host}:{proxy.admin_port}")
        engines = EmulationSettings(
            prefillers=PREFILLERS,
            ranks=RANKS,
            connector=settings.connector,
            mean_output_tokens=MEAN_OUTPUT,
        )
        self._world = WorldSettings(engines, {})
        self._clock = asyncio.get_running_loop().time
        self._loads: dict[str, SoakLoad] = {}

    async def run(self) -> None:
        """Send everything and look at what is left of it."""
        asyncio.get_running_loop().set_exception_handler(self._failed)
        settings = self._settings
        await self._begin("before", settings.warm_up, calm=True).run(CLIENTS // 2)
        before = await self._quiet()
        load = self._begin("with faults", settings.requests, calm=False)
        saboteur = SoakSaboteur(self._engines, self._admin, self._urls, load.plan.injections)
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
        """Report an exception, as of bytes that a client could not read."""
        self.report.faults("exceptions of the clients", [str(context)])

    # Loads.

    def _begin(self, name: str, count: int, *, calm: bool) -> SoakLoad:
        first = sum(len(load.plan.requests) for load in self._loads.values())
        numbers = range(first, first + count)
        plan = draw_plan(self._settings.seed, numbers, self._world, calm=calm)
        load = self._loads[name] = SoakLoad(plan, self._proxy.host, self._proxy.port)
        return load

    async def _stand_still(self, load: SoakLoad) -> None:
        await load.reached(STANDSTILL * load.plan.calm_s)
        await self._proxy.suspend(STANDSTILL_S)

    async def _watch_memory(self, load: SoakLoad, memory: list[float]) -> None:
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
        logged = [record_of(line) for line in lines]
        oracle = TextOracle(self._world.engines)
        await oracle.start()
        strangers = {record.request_id for record in logged}
        for name, load in self._loads.items():
            report.note("requests " + name, len(load.plan.requests))
            await oracle.learn(load.plan.requests)
            endings: Counter[str] = Counter()
            judge = Judge(load.plan, oracle)
            names = {request.request_id for request in load.plan.requests}
            strangers -= names
            mine = [record for record in logged if record.request_id in names]
            wrong = await audit_answers(judge, load.clients, mine, endings)
            for ending, count in endings.most_common():
                report.note("  " + ending, count)
            report.faults("  wrong", wrong)
            report.faults("  lost", load.lost)
        await oracle.close()
        report.faults("log lines of no request", sorted(strangers))
        self._report_log(lines)
        report.note("leases", (await self._engines.get("/emulation/stats"))["leases"])
        page = await self._admin.text("/metrics")
        self._report_native(page)
        report.faults("metrics that differ from the log", audit_metrics(logged, page.encode()))
        report.faults("errors of the proxy's own", errors + _lines_of(self._proxy.stderr))

    def _report_native(self, page: str) -> None:
        """Report what the native library moved, and a fault if it moved nothing and had to."""
        found = dict(re.findall(r"^balanceroute_pumped_(\S+) (\S+)$", page, re.MULTILINE))
        moved = {name: int(float(value)) for name, value in found.items()}
        right = self._settings.native != "require" or moved["events_total"] > 0
        self.report.check("events moved natively", moved["events_total"], right)
        reasons = {
            name.split('"')[1]: count
            for name, count in moved.items()
            if name.startswith("returns_total") and count
        }
        self.report.check(
            "streams moved natively, and why they came back",
            f"{moved['streams_total']} {reasons}",
            moved["streams_total"] == sum(reasons.values()),
        )

    async def _log(self) -> tuple[list[Line], list[str]]:
        """Return the log once it is complete: a thread writes it."""
        end_s = self._clock() + _LOG_S
        page = (await self._admin.text("/metrics")).encode()
        while True:
            lines, errors = read_log(self._proxy.log)
            logged = [record_of(line) for line in lines]
            if not audit_metrics(logged, page) or self._clock() > end_s:
                return lines, errors
            await asyncio.sleep(_POLL_S)

    def _report_log(self, lines: list[Line]) -> None:
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
