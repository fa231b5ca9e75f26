"""Kills random processes of `serve --workers` under load: is an answer wrong, or anything left behind?

    python scripts/kill_processes.py [--kills 200] [--workers 2] [--seed 0] [--spare scheduler]

Starts emulated engines and the proxy, sends requests without a pause, and ends a relay or the scheduler
process with SIGKILL whenever so many requests have ended since all processes were there; sometimes sooner,
while a process that was killed is not back. There are more clients than slots, so that kills hit requests
in every phase; the table says how many in which, and none in one of them is an error. A connection of a
relay that was killed may break; what came over it until then, and every whole answer, is compared with
that of an engine which nothing is wrong with. When the kills are over, what the proxy still holds 5 s later is an error, and what the engines hold
5 s after their leases: nobody can release a KV cache whose relay was killed before that. Prints a table;
exits 1 if anything is wrong.

With --freezes the processes stay, and a decode rank stops: a process that passes on what is for the rank and
from it gets SIGSTOP, so that the proxy sees what it sees of a host that hangs, and SIGCONT after FROZEN_S.
Greedy streams run all the while with `--resume exact`. The table says how long it took until the rank was left
out, and the longest silence of a stream; each answer has to be that of one engine.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from balanceroute.proxy.emulate.process import emulated_engines
from balanceroute.proxy.emulate.settings import EmulationSettings
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.chaos.answer_reader import Ending, Received
from balanceroute.proxy.testing.chaos.judge import Judge
from balanceroute.proxy.testing.chaos.oracle import Oracle
from balanceroute.proxy.testing.chaos.plan import Weather
from balanceroute.proxy.testing.chaos.world import WorldSettings
from balanceroute.proxy.testing.soak.audit import held_by_engines, held_by_proxy
from balanceroute.proxy.testing.soak.control import Control, ControlError
from balanceroute.proxy.testing.soak.kill_hits import PHASES, Kill, hits_of, phases_in
from balanceroute.proxy.testing.soak.load import Load
from balanceroute.proxy.testing.soak.plan import draw_plan
from balanceroute.proxy.testing.soak.proxy_process import ProxyProcess, running_proxy
from balanceroute.proxy.testing.soak.report import Report
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.messages import WireError

# Two prefillers are a little faster than the ranks, of which all slots are taken: requests wait in the
# pool, and before its limit.
PREFILLERS, RANKS, BATCH, POOL = 2, 4, 4, 8
PREFILL_MS = 120.0
TIME_SCALE = 3.0
MEAN_OUTPUT = 60.0
# Several loads at a time: each has fewer requests towards its end.
LOADS, CLIENTS_OF_LOAD = 3, 16
REQUESTS_PER_LOAD = 120
BETWEEN = (2, 40)
HASTY, HASTY_S = 0.2, (0.05, 1.0)
LOOK_S = 0.02
TELL_S = 0.3
LEFT_S = 5.0
LEASE_S = 10.0
BACK_S = 60.0
# With --freezes.
STREAMS, FROZEN_S, MOST_OUT_S, MOST_SILENT_S = 8, 6.0, 3.5, 5.0
SERVE = (
    f"--port 0 --admin-port 0 --batch {BATCH} --pool-limit {POOL} --lease-s {LEASE_S:g} "
    "--lease-margin-s 3 --queue-ttl-s 20 --health-interval-s 0.5"
)


def processes(supervisor: int) -> dict[str, int]:
    """Return the processes of a supervisor: their numbers, by name."""
    found = {}
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        with suppress(OSError):
            for word in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                if word.startswith(b"--process="):
                    name = "scheduler" if b'"scheduler"' in word else f"relay {child}"
                    found[name] = int(child)
    return found


class Run:
    """One run.

    Attributes:
        report: What was found.
    """

    def __init__(
        self, options: argparse.Namespace, proxy: ProxyProcess, urls: dict[str, list[str]]
    ) -> None:
        self.report = Report()
        self._options = options
        self._proxy = proxy
        self._admin = Control(f"http://{proxy.host}:{proxy.admin_port}")
        self._engines = Control(urls["prefill"][0])
        engines = EmulationSettings(
            prefillers=PREFILLERS, ranks=RANKS, mean_output_tokens=MEAN_OUTPUT
        )
        self._world = WorldSettings(engines, {})
        self._loads: list[Load] = []
        self._kills: list[Kill] = []
        self._over = False

    async def run(self) -> None:
        """Kill under load, look at what is left, and compare the answers."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(LOADS):
                group.create_task(self._send())
            group.create_task(self._kill())
        relays = sum(kill.relay for kill in self._kills)
        killed = f"{relays} relays, {len(self._kills) - relays} scheduler processes"
        self.report.note("killed", killed)
        early = sum(kill.phases is None for kill in self._kills)
        self.report.note("of these before a scheduler process served again", early)
        self.report.note("seconds", f"{time.monotonic() - began_s:.0f}")
        await self._look_at_what_is_left()
        await self._judge()
        self._admin.close()
        self._engines.close()

    async def _kill(self) -> None:
        rng = random.Random(self._options.seed)
        for _ in range(self._options.kills):
            hasty = rng.random() < HASTY
            if hasty:
                await asyncio.sleep(rng.uniform(*HASTY_S))
            else:
                await self._until("all processes", self._is_whole)
                await self._phases(BACK_S)  # Then the scheduler process serves.
                enough = self._done + rng.randint(*BETWEEN)
                await self._until("answers", partial(self._is_done, enough))
            phases = await self._phases(TELL_S if hasty else BACK_S)
            await self._until("a process to kill", self._killable)
            running = self._killable()
            name = rng.choice(sorted(running))
            with suppress(ProcessLookupError):
                os.kill(running[name], signal.SIGKILL)
                at_s = asyncio.get_running_loop().time()
                self._kills.append(Kill(at_s, relay=name != "scheduler", phases=phases))
        self._over = True

    async def _until(self, what: str, is_so: Callable[[], object]) -> None:
        end_s = time.monotonic() + BACK_S
        while not is_so():
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {BACK_S:g} s: {what}")
            await asyncio.sleep(LOOK_S)

    def _is_whole(self) -> bool:
        workers: int = self._options.workers
        return len(processes(self._proxy.pid)) == workers + 1

    def _is_done(self, count: int) -> bool:
        return self._done >= count

    @property
    def _done(self) -> int:
        return sum(load.done for load in self._loads)

    async def _phases(self, within_s: float) -> dict[str, str] | None:
        """Return where each live request is; None if the scheduler process does not serve in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    with suppress(WireError, ControlError):
                        return phases_in(
                            (await self._admin.get("/admin/state?requests=1"))["state"]
                        )
                    await asyncio.sleep(LOOK_S)
        return None

    def _killable(self) -> dict[str, int]:
        running = processes(self._proxy.pid)
        spare = self._options.spare
        return {name: pid for name, pid in running.items() if name.split()[0] != spare}

    async def _send(self) -> None:
        while not self._over:
            first = REQUESTS_PER_LOAD * len(self._loads)
            numbers = range(first, first + REQUESTS_PER_LOAD)
            plan = draw_plan(self._options.seed, numbers, self._world, calm=True)
            # So that the judge takes errors for what they are.
            plan = replace(plan, weather=Weather.FAULTS)
            load = Load(plan, self._proxy.host, self._proxy.port)
            self._loads.append(load)
            await load.run(CLIENTS_OF_LOAD)

    async def _look_at_what_is_left(self) -> None:
        end_s = time.monotonic() + BACK_S
        while True:
            try:
                state = (await self._admin.get("/admin/state"))["state"]
                break
            except WireError:  # The last process that was killed is not back yet.
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(0.1)
        begin_s = time.monotonic()
        while True:
            state = (await self._admin.get("/admin/state"))["state"]
            stats = await self._engines.get("/emulation/stats")
            here, there = held_by_proxy(state), held_by_engines(stats)
            past_s = time.monotonic() - begin_s
            if not (here or there) or past_s > LEASE_S + LEFT_S or (here and past_s > LEFT_S):
                break
            await asyncio.sleep(0.1)
        self.report.check("held by the proxy", here or "nothing", not here)
        self.report.check("held by the engines", there or "nothing", not there)
        self.report.check("misreads", stats["misreads"], not stats["misreads"])
        self.report.note("processes", len(processes(self._proxy.pid)))

    async def _judge(self) -> None:
        oracle = Oracle(self._world.engines)
        await oracle.start()
        endings: Counter[str] = Counter()
        wrong: list[str] = []
        lost: list[str] = []
        seen: list[tuple[str, Received]] = []
        for load in self._loads:
            await oracle.learn(load.plan.requests)
            judge = Judge(load.plan, oracle)
            lost += load.lost
            for client in load.clients:
                answers = list(zip(client.visit.requests, client.answers, strict=True))
                for request, received in answers[: client.sent]:
                    # Its relay may have been killed: what came must be a beginning of the answer.
                    # The end of an answer by HTTP/1.0 is the end of its connection.
                    seen.append((request.request_id, received))
                    cut = received.ending is not Ending.COMPLETE or client.visit.http_1_0
                    client.left = cut
                    verdict = await judge.judge(
                        client, request, received, reworded=False, seed=None
                    )
                    endings[verdict.ending] += 1
                    wrong += [f"{request.request_id}: {one}" for one in verdict.wrong]
        await oracle.close()
        hits = hits_of(self._kills, seen)
        for phase in PHASES:
            self.report.check(f"  hit while {phase}", hits[phase], hits[phase] > 0)
        self.report.note("answers", len(seen))
        for ending, count in endings.most_common():
            self.report.note("  " + ending, count)
        self.report.faults("wrong or doubled", wrong)
        self.report.note("without a connection, or an end in time", len(lost))


class FreezeRun:
    """One run in which ranks freeze.

    Attributes:
        report: What was found.
    """

    def __init__(
        self, freezes: int, proxy: ProxyProcess, ranks: dict[str, int], direct: str
    ) -> None:
        self.report = Report()
        self._freezes = freezes
        self._admin = Control(f"http://{proxy.host}:{proxy.admin_port}")
        self._proxy = Endpoint(proxy.host, proxy.port)
        self._engine = Endpoint(*_address(direct))
        self._ranks = ranks  # The processes before them, by the address that the proxy has.
        self._over = False
        self._answers: list[tuple[int, Told]] = []
        self._right: dict[int, str] = {}

    async def run(self) -> None:
        """Freeze one rank after the other under load, and compare the answers."""
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(self._send(number))
            group.create_task(self._freeze())
        self.report.note("streams", len(self._answers))
        wrong = [one for number, told in self._answers if (one := await self._judge(number, told))]
        self.report.faults("wrong or lost", wrong)
        silence_s = max(told.silence_s for _, told in self._answers)
        self.report.check(
            "longest silence of a stream", f"{silence_s:.2f} s", silence_s <= MOST_SILENT_S
        )
        for closing in (self._admin, self._proxy, self._engine):
            closing.close()

    async def _freeze(self) -> None:
        await asyncio.sleep(FROZEN_S)
        outs = []
        for url, process in (list(self._ranks.items()) * self._freezes)[: self._freezes]:
            os.kill(process, signal.SIGSTOP)
            begin_s = time.monotonic()
            out_s = None
            while (past_s := time.monotonic() - begin_s) < FROZEN_S:
                if out_s is None and not (await self._rank(url))["open"]:
                    out_s = past_s
                await asyncio.sleep(LOOK_S)
            os.kill(process, signal.SIGCONT)
            outs.append(out_s)
            await asyncio.sleep(FROZEN_S)  # It is tried again.
        self._over = True
        late = [out_s for out_s in outs if out_s is None or out_s > MOST_OUT_S]
        shown = ", ".join("never" if out_s is None else f"{out_s:.2f} s" for out_s in outs)
        self.report.check("left out after", shown, not late)
        vetoes = sum(
            one["vetoes"] for one in (await self._admin.get("/admin/state"))["state"]["ranks"]
        )
        self.report.check("times a rank was left out", vetoes, vetoes >= len(outs))

    async def _rank(self, url: str) -> dict[str, Any]:
        state = (await self._admin.get("/admin/state"))["state"]
        (rank,) = [one for one in state["ranks"] if one["url"] == url]
        return cast("dict[str, Any]", rank)

    async def _send(self, number: int) -> None:
        while not self._over:
            self._answers.append((number, await self._ask(self._proxy, number)))

    async def _ask(self, endpoint: Endpoint, number: int) -> "Told":
        values = {"prompt": f"stream {number}", "max_tokens": 150, "temperature": 0}
        body = json.dumps(values | {"ignore_eos": True, "stream": True}).encode()
        told = Told()
        endpoint.request(b"POST", b"/v1/completions", [], body, told)
        await told.over.wait()
        return told

    async def _judge(self, number: int, told: "Told") -> str:
        if number not in self._right:
            self._right[number] = (await self._ask(self._engine, number)).text
        if told.error or told.status != 200 or told.text != self._right[number]:
            return (
                f"stream {number}: status {told.status}, {len(told.text)} characters {told.error}"
            )
        return ""


class Told:
    """What a stream brought; see `ResponseHandler`.

    Attributes:
        silence_s: The longest time without any of it, behind its first event.
    """

    def __init__(self) -> None:
        self.status = 0
        self.error = ""
        self.silence_s = 0.0
        self.over = asyncio.Event()
        self._body = bytearray()
        self._last_s = 0.0

    @property
    def text(self) -> str:
        """All text of its events."""
        lines = [one[6:] for one in bytes(self._body).split(b"\n") if one.startswith(b"data: {")]
        return "".join(json.loads(one)["choices"][0]["text"] for one in lines)

    def on_head(self, status: int, headers: object) -> None:
        """Take the status."""
        del headers
        self.status = status

    def on_data(self, data: bytes) -> None:
        """Take events."""
        now_s = time.monotonic()
        if self._last_s:
            self.silence_s = max(self.silence_s, now_s - self._last_s)
        self._last_s = now_s
        self._body += data

    def on_end(self) -> None:
        """Take the end."""
        self.over.set()

    def on_error(self, error: WireError) -> None:
        """Take a failure."""
        self.error = str(error)
        self.over.set()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


async def _pass_on(url: str) -> None:
    """Accept connections, print the port, and pass on what comes of each, until standard input ends."""

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def accept(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        engine, request = await asyncio.open_connection(*_address(url))
        await asyncio.gather(copy(client, request), copy(engine, answer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def _passing_on(urls: list[str]) -> Iterator[dict[str, int]]:
    """Run a process before each engine; yield their processes by the addresses that they have."""
    running = []
    try:
        found = {}
        for url in urls:
            command = [sys.executable, __file__, "--pass-on", url]
            one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            running.append(one)
            assert one.stdout is not None
            found[f"http://127.0.0.1:{int(one.stdout.readline())}"] = one.pid
        yield found
    finally:
        for one in running:
            one.kill()
            one.communicate()


def _freeze(freezes: int, urls: dict[str, list[str]], flags: list[str], folder: Path) -> Report:
    with _passing_on(urls["decode"]) as ranks:
        flags += ["--resume", "exact", "--prefill", *urls["prefill"], "--decode", *ranks]
        with running_proxy(flags, engines=[*urls["prefill"], *ranks], folder=folder) as proxy:

            async def run() -> Report:
                one = FreezeRun(freezes, proxy, ranks, urls["decode"][0])
                await one.run()
                return one.report

            return asyncio.run(run())


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=positive, default=200, help="how many")
    parser.add_argument("--workers", type=positive, default=2, help="relays")
    parser.add_argument("--seed", type=int, default=0, help="decides requests and kills")
    parser.add_argument(
        "--spare", choices=["", "relay", "scheduler"], default="", help="what is not killed"
    )
    parser.add_argument("--freezes", type=positive, metavar="N", help="freeze ranks instead")
    parser.add_argument("--pass-on", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the proxy's logs there")
    options = parser.parse_args()
    if options.pass_on is not None:
        asyncio.run(_pass_on(options.pass_on))
        return 0
    # So that the other processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    command = [sys.executable, "-m", "balanceroute.proxy", "emulate", "--port=0"]
    command += [f"--prefillers={PREFILLERS}", f"--ranks={RANKS}", f"--batch={BATCH}"]
    command += [f"--time-scale={TIME_SCALE}", f"--lease-s={LEASE_S * TIME_SCALE}"]
    command += [f"--mean-output={MEAN_OUTPUT}", f"--prefill-base-ms={PREFILL_MS}"]
    command += ["--json-ready", "--exit-with-stdin"]
    with tempfile.TemporaryDirectory() as scratch, emulated_engines(command) as engines:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        urls = {role: cast("list[str]", found) for role, found in engines.items()}
        flags = [*SERVE.split(), "--workers", str(options.workers)]
        if options.freezes is not None:
            report = _freeze(options.freezes, urls, flags, folder)
            print(report.text())
            return 1 if report.wrong else 0
        for role, of_role in urls.items():
            flags += [f"--{role}", *of_role]
        serving = urls["prefill"] + urls["decode"]
        with running_proxy(flags, engines=serving, folder=folder) as proxy:

            async def run() -> Report:
                one = Run(options, proxy, urls)
                await one.run()
                return one.report

            report = asyncio.run(run())
    print(report.text())
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
