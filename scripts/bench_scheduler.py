"""What the scheduler process of `serve --workers` costs: its share of a core, with synthetic relays.

    python scripts/bench_scheduler.py [--streams N] [--requests N] [--steps N] [--relays N]
        [--ranks G] [--batch B] [--seconds S] [--profile] [--json OUT]

The relays speak the protocol, take every order and report what engines would do, so that the fleet
holds a given number of streams, all of which emit a token with each step. Driver, BR-H, survival
predictor, metrics and records are those of the product. All of it runs in virtual time, where nothing
is ever late, so a busy machine changes neither the number of decisions nor that of frames. CPU time is
that of the thread without what the relays take. Frames are encoded and decoded, but pass no socket:
`bench_relays.py` has what that costs. Scrapes and health checks, whose cost depends on the number of
engines and not on the load, do not run, but for the first check, which each engine passes.
"""

import argparse
import asyncio
import cProfile
import heapq
import json
import pstats
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from balanceroute.proxy.live.deployment import Deployment
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.frames import VERSION, encode, for_relay, for_scheduler
from balanceroute.proxy.live.processes.hub import Hub
from balanceroute.proxy.live.processes.relay_desk import RelayDesk
from balanceroute.proxy.live.request.suspects import Suspects
from balanceroute.proxy.live.scheduling.pushed_counts import PushedCounts
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run

PREFILL_S, TRANSFER_S, PROGRESS_S, TURN_S = 0.2, 0.02, 0.025, 0.002
PROMPT_TOKENS = 3_000
_PREFILL_PORTS, _DECODE_PORT = range(1_000, 1_064), 2_000
# How much faster than in the steady state requests come until the fleet is full.
FILLING = 2.5


@dataclass(frozen=True)
class Load:
    """What the relays bring.

    Attributes:
        streams: Streams at a time.
        requests: Requests per second.
        steps: Decode steps per second, each of which is an event of every stream.
        seconds: How long is measured once that many streams run.
    """

    streams: int
    requests: int
    steps: int
    relays: int
    ranks: int
    batch: int
    seconds: float


class _NoLog:
    def request_ended(self, record: RequestRecord) -> None:
        pass


class _Healthy(asyncio.Protocol):
    """An engine's health page: no engine is served that was not found healthy once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        del data
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


# The scheduler process.


class Scheduling:
    """Everything that decides; `took` has the CPU seconds of each decision."""

    def __init__(self, load: Load) -> None:
        self.took: list[float] = []
        loop = asyncio.get_running_loop()
        flags: dict[str, object] = {
            "prefill": [f"http://127.0.0.1:{port}" for port in _PREFILL_PORTS],
            "decode": [f"http://127.0.0.1:{_DECODE_PORT}@{rank}" for rank in range(load.ranks)],
            "batch": load.batch,
            "policy": "br-h",
            "log": "none",
        }
        environment = Environment(
            _NoLog(), random.Random(0), lambda: 0.0, time.thread_time, time.monotonic
        )
        self.metrics = Metrics(list)
        self._count = self.metrics.decisions.dispatched
        self.metrics.decisions.dispatched = self._dispatched  # type: ignore[method-assign]
        self._counts: PushedCounts[Any] = PushedCounts()
        self._log = environment.log
        failures = DecisionFailures(self.metrics.decisions, loop.time)
        config = make_config(None, flags)
        self.deployment = Deployment(
            *(config, environment, self.metrics, failures, self._counts), suspects=Suspects()
        )
        self.hub: Hub

    async def start(self, relays: int) -> None:
        """Be there for relays."""
        loop = asyncio.get_running_loop()
        for port in (*_PREFILL_PORTS, _DECODE_PORT):
            await loop.create_server(_Healthy, "127.0.0.1", port)
        await self.deployment.start()
        assert self.deployment.instances.ready, "no engine is fit, so no stream would ever begin"
        self.hub = Hub(
            self.deployment.driver,
            asyncio.get_running_loop(),
            routes=self.deployment.model_routes,
            models=self.deployment.models,
            tenancy=self.deployment.tenancy,
            metrics=self.metrics,
            log=self._log,
            settings="",
            name="bench",
            relays=relays,
            page_of_metrics=self.metrics.render,
            counts=self._counts,
        )

    def connect(self, send: Callable[[bytes], object]) -> Callable[[bytes], None]:
        """Return what takes a relay's frames; `send` gets those to it."""
        reader = for_scheduler()

        def write(messages: Sequence[to_relay.ToRelay]) -> None:
            send(bytes(encode(messages)))

        desk = RelayDesk(self.hub, write)
        return lambda frame: desk.take(reader.feed(frame))

    def _dispatched(self, stage: str, seconds: float) -> None:
        self._count(stage, seconds)
        if stage == "total":
            self.took.append(seconds)


# The relays.


class Relay:
    """One relay, whose engines do at once what they are told, and take their time for it.

    Attributes:
        spent_s: CPU time that it took.
    """

    def __init__(self, place: int, load: Load, rng: random.Random) -> None:
        self.live = self.streams = 0
        self.messages = self.frames = 0
        self.spent_s = 0.0
        self._place = place
        self._load = load
        self._rng = rng
        self._arrived = 0
        self._out: list[from_relay.FromRelay] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._timers = 0
        self._rows: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        rows = 4 * load.streams
        # By row: the step at which the stream began, its length, and the tokens told.
        self._number = np.full(rows, -1)
        self._began = np.zeros(rows, np.int64)
        self._length = np.zeros(rows, np.int64)
        self._told = np.zeros(rows, np.int64)
        self._progress_s = 0.0
        self._reader = for_relay()
        self._loop = asyncio.get_running_loop()
        self._deliver: Callable[[bytes], object]
        self._welcome = False

    def begin(self, scheduling: Scheduling) -> None:
        """Say hello."""
        call_soon = self._loop.call_soon
        take = scheduling.connect(lambda frame: call_soon(self._receive, frame))
        self._deliver = lambda frame: call_soon(take, frame)
        self._deliver(bytes(encode([from_relay.Hello(VERSION, self._place, "")])))

    def arrive(self, now_s: float) -> None:
        """Have a request come."""
        number, self._arrived = self._arrived, self._arrived + 1
        characters = 4 * round(self._rng.expovariate(1 / PROMPT_TOKENS)) + 4
        shape = Shape(Api.CHAT, "m", True, 1, "", None, characters, 0, 4_096)
        record = _record(f"{self._place}-{number}", now_s)
        self._taken[number] = 0
        self.live += 1
        self._out.append(from_relay.Arrival(number, shape, None, 0, None, "", (), record))

    def turn(self, now_s: float) -> None:
        """Do what is due, and send what there is to say."""
        begin_s = time.thread_time()
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()
        if now_s >= self._progress_s:
            self._progress_s = now_s + PROGRESS_S
            self._tell_progress(int(now_s * self._load.steps))
        if self._out and self._welcome:
            self.messages += len(self._out)
            self.frames += 1
            self._deliver(bytes(encode(self._out)))
            self._out = []
        self.spent_s += time.thread_time() - begin_s

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._timers += 1
        heapq.heappush(self._due, (self._loop.time() + delay_s, self._timers, act))

    def _receive(self, frame: bytes) -> None:
        begin_s = time.thread_time()
        messages = self._reader.feed(frame)
        self.messages += len(messages)
        self.frames += 1
        for message in messages:
            match message:
                case to_relay.Welcome():
                    self._welcome = True
                case to_relay.Accepted(number, row):
                    self._rows[number] = row
                case to_relay.Refused(number):
                    raise AssertionError(f"request {number} was refused: {message}")
                case to_relay.StartPrefill(number):
                    self._taken[number] += 1
                    self._later(PREFILL_S, partial(self._prefilled, number))
                case to_relay.StartDecode(number):
                    self._taken[number] += 1
                    self._later(TRANSFER_S, partial(self._begin, number))
                case _:
                    pass
        self.spent_s += time.thread_time() - begin_s

    def _prefilled(self, number: int) -> None:
        lease_ns = round(1e9 * (self._loop.time() + 30.0))
        taken = self._taken[number]
        self._out.append(
            from_relay.PrefillDone(number, taken, PROMPT_TOKENS, lease_ns, pulls=True, emitted=0)
        )

    def _begin(self, number: int) -> None:
        row = self._rows[number]
        self._out.append(from_relay.DecodeStarted(number, self._taken[number], 0))
        mean = self._load.streams / self._load.requests * self._load.steps
        self.streams += 1
        self._number[row] = number
        self._began[row] = int(self._loop.time() * self._load.steps)
        # Memoryless, so that a fleet that was just filled is as one that has run for long.
        self._length[row] = 1 + int(self._rng.expovariate(1 / mean))
        self._told[row] = 0

    def _tell_progress(self, step: int) -> None:
        (rows,) = (self._number >= 0).nonzero()
        tokens = np.minimum(step - self._began[rows] + 1, self._length[rows])
        (moved,) = (tokens != self._told[rows]).nonzero()
        rows, tokens = rows[moved], tokens[moved]
        if not len(rows):
            return
        self._told[rows] = tokens
        packed = rows.astype("<u4").tobytes(), tokens.astype("<u4").tobytes()
        self._out.append(from_relay.Progress(*packed))
        for row in rows[tokens == self._length[rows]].tolist():
            self._end(int(self._number[row]), int(self._length[row]))
            self._number[row] = -1

    def _end(self, number: int, output_tokens: int) -> None:
        record = _record(f"{self._place}-{number}", self._loop.time())
        record.outcome, record.status = Outcome.OK, 200
        record.output_tokens = output_tokens
        record.admitted_ns = record.first_token_ns = record.arrived_ns
        record.ended_ns = record.arrived_ns + 1_000_000_000
        self._out.append(from_relay.SessionEnded(number, record, "finished"))
        del self._rows[number], self._taken[number]
        self.live -= 1
        self.streams -= 1


def _record(request_id: str, now_s: float) -> RequestRecord:
    return RequestRecord(
        request_id,
        "/v1/chat/completions",
        round(now_s * 1e9),
        0.0,
        model="m",
        stream=True,
        prompt_tokens=PROMPT_TOKENS,
        peer="10.0.0.1:50000",
        user_agent="OpenAI/Python 2.9.0",
    )


# The measurement.


async def drive(loop: VirtualLoop, load: Load, profiler: cProfile.Profile | None) -> dict[str, Any]:
    """Fill the fleet, then measure."""
    rng, scheduling = random.Random(1), Scheduling(load)
    await scheduling.start(load.relays)
    relays = [Relay(place, load, rng) for place in range(load.relays)]
    for relay in relays:
        relay.begin(scheduling)
    next_s, end_s, before = loop.time(), float("inf"), Spent(relays)
    while loop.time() < end_s:
        now_s = loop.time()
        streams = sum(relay.streams for relay in relays)
        waiting = sum(relay.live for relay in relays) - streams
        full = end_s < float("inf")
        while next_s <= now_s:
            next_s += rng.expovariate(load.requests * (1.0 if full else FILLING))
            if full or waiting < load.requests:
                rng.choice(relays).arrive(now_s)
        for relay in relays:
            relay.turn(now_s)
        if not full and streams >= load.streams:
            end_s = now_s + load.seconds
            scheduling.took.clear()
            before = Spent(relays)
            if profiler is not None:
                profiler.enable()
        await asyncio.sleep(TURN_S)
    if profiler is not None:
        profiler.disable()
    after = Spent(relays)
    assert all(relay.live for relay in relays)
    cpu_s, messages = after.cpu_s - before.cpu_s, after.messages - before.messages
    scheduling.deployment.driver.shut_down()
    scheduling.hub.close()
    return {
        **asdict(load),
        "cpu_share": cpu_s / load.seconds,
        "messages_per_s": messages / load.seconds,
        "frames_per_s": (after.frames - before.frames) / load.seconds,
        "us_per_message": 1e6 * cpu_s / messages,
        "decisions_per_s": len(scheduling.took) / load.seconds,
        "decisions_share": sum(scheduling.took) / load.seconds,
        "decision_p50_ms": 1e3 * float(np.quantile(scheduling.took, 0.5)),
        "decision_p99_ms": 1e3 * float(np.quantile(scheduling.took, 0.99)),
    }


class Spent:
    """What was spent so far: by the scheduler process, and on the way."""

    def __init__(self, relays: list[Relay]) -> None:
        self.cpu_s = time.thread_time() - sum(relay.spent_s for relay in relays)
        self.messages = sum(relay.messages for relay in relays)
        self.frames = sum(relay.frames for relay in relays)


def main() -> None:
    """Run it as asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=positive, default=10_000)
    parser.add_argument("--requests", type=positive, default=500, help="per second")
    parser.add_argument("--steps", type=positive, default=20, help="per second")
    parser.add_argument("--relays", type=positive, default=4)
    parser.add_argument("--ranks", type=positive, default=160)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--profile", action="store_true", help="print where its time goes")
    parser.add_argument("--json", type=Path)
    asked = vars(parser.parse_args())
    profile, output = asked.pop("profile"), asked.pop("json")
    profiler = cProfile.Profile() if profile else None
    row = run(lambda loop: drive(loop, Load(**asked), profiler), seed=0, check=False)
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    table = Table("figure", "value")
    for name, value in row.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    if output is not None:
        output.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
