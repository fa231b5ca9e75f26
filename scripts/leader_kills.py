"""Kills who leads, again and again, under load: how long is there no service, and is any answer wrong?"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.live.leader.lease_server import LeaseServer
from tests.support.arguments import positive
from tests.support.soak.run import SoakReport

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import WireError
from experiment import emulated
from faults import Told

PREFILLERS, RANKS, BATCH, STREAMS = 2, 4, 8, 48
STEP_S, LOOK_S, RETRY_S, BEGIN_AGAIN_S = 0.03, 0.02, 0.5, 4.0
MOST_S = {"kill": 5.0, "end": 2.5, "stop": 5.0}
SIGNALS = {"kill": signal.SIGKILL, "end": signal.SIGTERM, "stop": signal.SIGSTOP}
SERVE = f"--no-admin --batch {BATCH} --policy br-h --log"


class Replica:
    """One process, at the same port whenever it is begun again."""

    def __init__(self, number: int, words: Sequence[str], folder: Path) -> None:
        self.port, self.ready = 0, False
        self.endpoint: Endpoint
        self._words, self._log = words, folder / f"replica-{number}.log"
        self.begin()

    def begin(self) -> None:
        command = [sys.executable, "-m", "balanceroute.proxy", "serve", *self._words]
        command += [str(self._log), "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def await_port(self) -> None:
        """Learn the port of the first start, once it serves."""
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(":")[2])

    def end(self) -> None:
        """End it, also if it is stopped."""
        self.process.kill()
        self.process.wait()


class Kills:
    """One run."""

    def __init__(self, replicas: Sequence[Replica], urls: dict[str, list[str]], how: str) -> None:
        self.report, self._how = SoakReport(), how
        self._replicas = replicas
        self._engine = Endpoint("127.0.0.1", int(urls["decode"][0].rpartition(":")[2]))
        self._right: dict[int, str] = {}
        self._ends: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._gaps: list[tuple[float, str]] = []  # Without a replica that is ready, by kill.
        self._above: list[float] = []  # How long a rank stood above its batch.
        self._over = self._two_s = 0

    async def run(self, minutes: float, every_s: float) -> None:
        """Kill who leads every so many seconds."""
        answers = await asyncio.gather(*(self._ask(self._engine, n) for n in range(STREAMS)))
        self._right = {number: told.text for number, told in enumerate(answers)}
        works = [self._look(), self._watch_ranks(), *map(self._send, range(STREAMS))]
        tasks = [asyncio.create_task(one) for one in works]
        await self._ready()
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s:
            await asyncio.sleep(every_s)
            await self._kill()
        self._over = 1
        await asyncio.gather(*tasks)
        for how, most_s in MOST_S.items():
            gaps = sorted(gap_s for gap_s, kind in self._gaps if kind == how)
            if gaps:
                shown = f"{gaps[-1]:.2f} s of {len(gaps)}, median {gaps[len(gaps) // 2]:.2f} s"
                self.report.check(f"longest without service ({how})", shown, gaps[-1] <= most_s)
        for name, count in sorted(self._ends.items()):
            self.report.note(f"answers {name}", count)
        self.report.check("looks at which two were ready", self._two_s, not self._two_s)
        self.report.faults("wrong or doubled", self._wrong)
        longest_s = max(self._above, default=0.0)
        shown = f"{len(self._above)} times, at most {longest_s:.2f} s"
        # A step, and what a look takes on a busy machine.
        self.report.check("ranks above their batch", shown, longest_s <= STEP_S + 3 * LOOK_S)

    async def _kill(self) -> None:
        kinds = list(SIGNALS) if self._how == "all" else [self._how]
        kind = kinds[len(self._gaps) % len(kinds)]
        leader = await self._ready()
        began_s = time.monotonic()
        leader.process.send_signal(SIGNALS[kind])
        while self._leader() in (None, leader):  # noqa: ASYNC110 - nobody tells.
            await asyncio.sleep(LOOK_S)
        self._gaps.append((time.monotonic() - began_s, kind))
        await asyncio.sleep(BEGIN_AGAIN_S)
        if kind == "stop":
            leader.process.send_signal(signal.SIGCONT)
        else:
            await asyncio.to_thread(leader.process.wait)
            leader.begin()

    async def _ready(self) -> Replica:
        while (leader := self._leader()) is None:  # noqa: ASYNC110 - nobody tells.
            await asyncio.sleep(LOOK_S)
        return leader

    def _leader(self) -> Replica | None:
        return next((one for one in self._replicas if one.ready), None)

    async def _look(self) -> None:
        """See who is ready. One that is stopped may be so in its kernel's queue alone."""

        async def look(one: Replica) -> None:
            while not self._over:
                one.ready = await self._status(one, b"/ready") == 200
                self._two_s += all(other.ready for other in self._replicas)
                await asyncio.sleep(LOOK_S)

        await asyncio.gather(*map(look, self._replicas))

    async def _status(self, one: Replica, path: bytes) -> int:
        with suppress(WireError):
            return (
                await fetch(one.endpoint, b"GET", path, [], b"", timeout_s=0.3, max_bytes=1 << 16)
            ).status
        return 0

    async def _watch_ranks(self) -> None:
        since: dict[int, float] = {}
        while not self._over:
            page = await fetch(
                self._engine, b"GET", b"/emulation/stats", [], b"", timeout_s=9.0, max_bytes=1 << 20
            )
            stats, now_s = json.loads(page.body), time.monotonic()
            loads = zip(stats["running"], stats["waiting"], stats["arriving"], strict=True)
            for rank, load in enumerate(loads):
                if sum(load) > BATCH:
                    since.setdefault(rank, now_s)
                elif rank in since:
                    self._above.append(now_s - since.pop(rank))
            await asyncio.sleep(LOOK_S)

    async def _send(self, number: int) -> None:
        turn = 0
        while not self._over:
            told = await self._ask(self._replicas[turn % 2].endpoint, number)
            self._ends[self._judge(number, told)] += 1
            if told.status in (503, 0):
                turn += 1
                await asyncio.sleep(RETRY_S)

    async def _ask(self, endpoint: Endpoint, number: int) -> Told:
        values = {"prompt": f"stream {number}", "max_tokens": 40 + number, "temperature": 0}
        body = json.dumps(values | {"ignore_eos": True, "stream": True}).encode()
        told = Told()
        call = endpoint.request(b"POST", b"/v1/completions", [], body, told)
        with suppress(TimeoutError):
            async with asyncio.timeout(20.0):
                await told.over.wait()
        call.abort()
        return told

    def _judge(self, number: int, told: Told) -> str:
        if told.status != 200:
            return f"refused with {told.status}" if told.status else "not answered"
        text, right = told.text, self._right[number]
        if not right.startswith(text):
            self._wrong.append(f"stream {number}: {text[-80:]!r} is not of {right[-80:]!r}")
        if told.error or not told.whole:
            return "cut"
        if text != right:
            self._wrong.append(
                f"stream {number}: {len(text)} of {len(right)} characters, and whole"
            )
        return "whole"


def leader_kills(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Kills who leads under load: how long is there no service, and is any answer wrong or doubled?

    Starts emulated engines and two proxies, of which one leads: by a Lease of a small API server that the command
    has itself, by that of a real one (--api), or by a lock (--lock). Who leads is killed, told to end, or stopped
    and let go on (--how), and begun again some seconds later. Streams run all the while; each that ends whole has to
    be that of one engine. Exits 1 if there was no service for too long, two were ready at a time, an answer was wrong,
    or a rank stood above its batch for more than a step.
    """
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="how long")
    parser.add_argument(
        "--every-s", type=positive, default=20, metavar="S", help="between two kills"
    )
    parser.add_argument(
        "--how", choices=[*SIGNALS, "all"], default="kill", help="what is done to it"
    )
    parser.add_argument("--lock", action="store_true", help="they agree by a lock on a file")
    parser.add_argument("--api", metavar="URL", help="of a Kubernetes API server")
    parser.add_argument("--account", type=Path, metavar="DIR", help="the account there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the proxies' logs there")
    options = parser.parse_args(words)
    engines = [f"--prefillers={PREFILLERS}", f"--ranks={RANKS}", f"--batch={BATCH}"]
    with tempfile.TemporaryDirectory() as scratch, emulated(engines) as urls:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(_run(options, urls, folder))
    print(report.text())
    return 1 if report.wrong else 0


async def _run(options: argparse.Namespace, urls: dict[str, list[str]], folder: Path) -> SoakReport:
    server = LeaseServer()
    await server.start()
    where = [
        "--leader-lease",
        "serving/balanceroute",
        "--kubernetes-api",
        options.api or server.url,
    ]
    if options.account:
        where += ["--kubernetes-account", str(options.account)]
    if options.lock:
        where = ["--leader-lock", str(folder / "leader")]
    fleet = ["--prefill", *urls["prefill"], "--decode", *urls["decode"]]
    words = [*where, *fleet, *SERVE.split()]
    replicas = [Replica(number, words, folder) for number in (1, 2)]
    try:
        for one in replicas:
            # The server of the Lease is this process.
            await asyncio.to_thread(one.await_port)
            one.endpoint = Endpoint("127.0.0.1", one.port)
        kills = Kills(replicas, urls, options.how)
        await kills.run(options.minutes, options.every_s)
    finally:
        for one in replicas:
            one.end()
        await server.close()
    return kills.report
