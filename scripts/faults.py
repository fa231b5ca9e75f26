"""Faults and hostile requests against the whole proxy: `python scripts/faults.py NAME ..`; `--list` tells the names."""

import argparse
import asyncio
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from tests.live.leader.lease_server import LeaseServer
from tests.support.arguments import positive
from tests.support.certificate import make_certificate
from tests.support.chaos.deaths import Deaths, Freezes, freeze_ranks, kill_decoders
from tests.support.chaos.exactness import compare
from tests.support.chaos.fuzz import fuzz as fuzz_seed
from tests.support.chaos.groups import run_seed_of_groups
from tests.support.chaos.trial import Summary, TrialReport, run_seed
from tests.support.site import Exchanged
from tests.support.soak.run import SoakControl, SoakReport, SoakSettings
from tests.support.soak.run import soak as run_soak

from balanceroute.proxy.live.request.leg_settings import FirstTokenFrom, Resume
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import WireError
from balanceroute.topologies import CONNECTORS
from commands import main
from experiment import emulated, proxy_before

_Report = TypeVar("_Report")


def _each(run: Callable[[int], _Report], seeds: Iterable[int], jobs: int) -> Iterator[_Report]:
    """Run each seed, and print how long all took."""
    begin_s = time.perf_counter()
    # Fresh processes: what one run leaves in memory can then be of no consequence to another.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run, seeds)
    print(f"took {time.perf_counter() - begin_s:.0f} s, {jobs} jobs")


def chaos(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the whole proxy in virtual time against emulated engines, with faults drawn from seeds.

        scripts/faults.py chaos --seeds 500 --requests 100 --jobs 2
        scripts/faults.py chaos --seed 17 --requests 100 --log 17.log
        scripts/faults.py chaos --seeds 100 --groups
        scripts/faults.py chaos --seeds 100 --http3

    With --groups there are several groups of engines behind the proxy, with aliases and fall-back chains, and
    groups are drained, removed and added while requests run. With --http3 clients speak HTTP/3 over links that
    lose, repeat, delay and corrupt packets.

    The same seed with the same number of requests does the same thing again, whatever it was.
    """
    parser.add_argument(
        "--seeds", type=positive, metavar="N", help="how many (default: 20, or one of --seed)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the first of them")
    parser.add_argument("--requests", type=positive, default=100, metavar="N", help="of each seed")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--force",
        choices=["locality"],
        help="in every seed: prefix-aware choice, ranks that compute prompts, conversations, two versions",
    )
    kinds.add_argument("--groups", action="store_true", help="several groups of engines")
    kinds.add_argument("--http3", action="store_true", help="clients speak HTTP/3 (extra h3)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what happened in the one seed")
    given = parser.parse_args(words)
    first, count = given.seed or 0, given.seeds or (20 if given.seed is None else 1)
    if given.log is not None and count > 1:
        parser.error("--log goes with one --seed")
    summary = Summary()
    with TemporaryDirectory() as folder:
        run: Callable[[int], TrialReport] = partial(
            run_seed, requests=given.requests, near=given.force == "locality"
        )
        if given.groups:
            run = partial(run_seed_of_groups, requests=given.requests)
        if given.http3:
            # Here: an extra.
            from tests.support.chaos.http3_trial import run_seed_over_http3  # noqa: PLC0415

            cert, key = make_certificate(Path(folder), kind="ed25519")
            run = partial(run_seed_over_http3, requests=given.requests, cert=cert, key=key)
        for report in _each(run, range(first, first + count), given.jobs):
            summary.add(report)
            if report.violations:
                print(f"seed {report.seed}: {report.violations[0]}", file=sys.stderr)
            if given.log is not None:
                given.log.write_text("\n".join([*report.lines, ""]))
    print("\n".join(summary.lines()))
    return 1 if summary.violations else 0


_CASES_OF_A_SEED = 2_000


def fuzz(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Sends hostile requests to the whole proxy in virtual time, and an honest one after each.

        scripts/faults.py fuzz --cases 300000 --jobs 2
        scripts/faults.py fuzz --seed 17 --cases 2000

    Cases are drawn from seeds, 2,000 of each. Exits with 1 if the proxy made an answer of 500 or more,
    refused without a reason, or answered an honest request wrongly.
    """
    parser.add_argument(
        "--cases", type=positive, default=20_000, metavar="N", help="how many in all"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes")
    given = parser.parse_args(words)
    each = min(given.cases, _CASES_OF_A_SEED)
    seeds = range(given.seed, given.seed + -(-given.cases // each))
    kinds: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    cases = violations = 0
    for report in _each(partial(fuzz_seed, cases=each), seeds, given.jobs):
        cases += report.cases
        kinds += report.kinds
        statuses += report.statuses
        violations += len(report.violations)
        for violation in report.violations:
            print(f"seed {report.seed}: {violation}", flush=True)
    print(f"cases       {cases} of {len(seeds)} seeds, as many canaries")
    print(f"spoiled     {', '.join(f'{kind} {n}' for kind, n in sorted(kinds.items()))}")
    print(f"statuses    {', '.join(f'{status}: {n}' for status, n in sorted(statuses.items()))}")
    print(f"violations  {violations}")
    return 1 if violations else 0


def exactness(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Compares the proxy's answers with those of one engine, byte for byte, in virtual time.

    For each way of moving KV caches, so that many requests are drawn of every shape that a client may
    send. Exits with 1 if any answer differs.
    """
    parser.add_argument(
        "--requests", type=positive, default=2000, metavar="N", help="for each connector"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--resume", choices=[one.value for one in Resume], default="off")
    parser.add_argument(
        "--first-token", choices=[one.value for one in FirstTokenFrom], default="decode"
    )
    arguments = parser.parse_args(words)
    differences, first_token = 0, FirstTokenFrom(arguments.first_token)
    for connector, facts in CONNECTORS.items():
        if first_token is FirstTokenFrom.PREFILL and not facts.says_first:
            print(f"{connector:20} refuses a prefiller's first token")
            continue
        begin = time.perf_counter()
        found = compare(
            arguments.seed,
            requests=arguments.requests,
            connector=connector,
            resume=Resume(arguments.resume),
            first_token=first_token,
        )
        differences += len(found.differences)
        statuses = ", ".join(f"{count} of {one}" for one, count in sorted(found.statuses.items()))
        print(
            f"{connector:20} {found.requests} requests ({statuses}): {found.identical} the "
            f"same bytes, {found.interleaved} the same for each choice, "
            f"{len(found.differences)} different; {found.early} first tokens came early; {time.perf_counter() - begin:.1f} s"
        )
        for difference in found.differences:
            print(f"  {difference}")
    return 1 if differences else 0


def _judged(report: SoakReport) -> int:
    print(report.text())
    return 1 if report.wrong else 0


def soak(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Clients that leave and engines that fail, on real sockets: is anything left behind?

    Starts emulated engines and the proxy as processes of their own and sends them requests, a fifth of
    which are left in the middle while engines fail, die and come back, all as in a chaos run. Every
    answer is compared with that of an engine which nothing is wrong with. Then all clients go, and
    whatever the proxy or the engines still hold is an error. Prints a table; exits 1 if anything is wrong.
    """
    parser.add_argument("--requests", type=positive, default=5000, help="how many to send")
    parser.add_argument("--seed", type=int, default=0, help="decides requests and faults")
    parser.add_argument("--connector", default="nixl", help="how KV caches travel")
    parser.add_argument(
        "--native",
        choices=["auto", "off", "require"],
        default="auto",
        help="whether the native library moves streams",
    )
    given = parser.parse_args(words)
    settings = SoakSettings(
        requests=given.requests,
        warm_up=max(10, given.requests // 25),
        afterwards=max(10, given.requests // 50),
        seed=given.seed,
        wait_for_idle=True,
        connector=given.connector,
        native=given.native,
    )
    with TemporaryDirectory() as folder:
        return _judged(run_soak(settings, Path(folder)))


def decoder_deaths(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Kills decode engines under greedy streams, in virtual time, and says what the clients got.

        scripts/faults.py decoder-deaths --requests 2000 --resume exact
        scripts/faults.py decoder-deaths --requests 2000 --resume off
        scripts/faults.py decoder-deaths --requests 2000 --agents 1    # messages, responses and chats with tools and thoughts
        scripts/faults.py decoder-deaths --requests 2000 --dp-size 2   # ranks end by twos
        scripts/faults.py decoder-deaths --freeze 3600 --resume exact

    Every answer is compared with that of one engine. A stream under which two engines die is not continued: it
    ends with an error. Exits with 1 if an answer is wrong, if more than two engines died under a request, or
    if a request is left.

    With --freeze ranks stop for a while instead, each by itself or all at a barrier, beside others that are slow,
    send in bursts, or pause for a moment, and the proxy stands still at times. The script says how long it takes
    until a frozen rank is left out. Exits with 1 if one is not in time, or one that did not stand still is.
    """
    parser.add_argument("--requests", type=positive, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--agents",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="as agents ask, with tools and thoughts",
    )
    parser.add_argument("--resume", choices=[one.value for one in Resume], default="exact")
    parser.add_argument(
        "--dp-size", type=int, choices=(1, 2, 4), default=1, help="ranks that end together"
    )
    parser.add_argument("--freeze", type=positive, metavar="S", help="for so many virtual seconds")
    given = parser.parse_args(words)
    if given.freeze is not None:
        frozen = freeze_ranks(given.seed, seconds=given.freeze, resume=given.resume)
        return _report(frozen, frozen.missed, frozen.false, frozen.wrong, [frozen.left])
    options = {name: getattr(given, name) for name in ("requests", "resume", "agents", "dp_size")}
    died = kill_decoders(given.seed, **options)
    return _report(died, died.wrong, [died.held])


def _report(found: Deaths | Freezes, *wrong: list[Any]) -> int:
    """Print each figure of what was found; return 1 if any of those that are wrong is not nothing."""
    for one in fields(found):
        value = getattr(found, one.name)
        if isinstance(value, list):
            lines = [text for text in value if isinstance(text, str)]
            spread = (
                f", median {median(value):.2f}, at most {max(value):.2f}"
                if value and not lines
                else ""
            )
            value = "".join([f"{len(value)}{spread}", *(f"\n  {text}" for text in lines)])
        print(f"{one.name:<10} {value}")
    return int(any(map(any, wrong)))


# Greedy streams on real sockets, while ranks freeze or leaders die.

PREFILLERS, RANKS = 2, 4
LOOK_S, RETRY_S, ANSWER_S = 0.02, 0.5, 30.0


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


class Load:
    """Greedy streams that clients send again and again, each compared with what one engine says.

    Args:
        engine: The URL of that engine.
        streams: How many at a time.
        tokens: Of an answer; of each stream one more than of the one before.
    """

    def __init__(self, engine: str, streams: int, tokens: int) -> None:
        self.report = SoakReport()
        self.over = False  # Set by what goes wrong, when it has.
        self.silence_s = 0.0  # The longest time without an event, behind the first one of a stream.
        self.engine = engine
        self._engine = Endpoint(*_address(engine))
        self.ends: Counter[str] = Counter()
        self._streams, self._tokens = streams, tokens
        self._right: list[str] = []
        self._wrong: list[str] = []

    async def run(self, proxies: Sequence[Endpoint], *works: Coroutine[Any, Any, None]) -> None:
        """Send to whichever of the proxies takes it, until one of the works says that it is over."""
        numbers = range(self._streams)
        alone = await asyncio.gather(*(self._ask(self._engine, number) for number in numbers))
        self._right = ["".join(one.texts()) for one in alone]
        async with asyncio.TaskGroup() as group:
            for work in (*works, *(self._send(number, proxies) for number in numbers)):
                group.create_task(work)
        for name, count in sorted(self.ends.items()):
            self.report.note(f"answers {name}", count)
        self.report.faults("wrong or doubled", self._wrong)

    async def _send(self, number: int, proxies: Sequence[Endpoint]) -> None:
        turn = 0
        while not self.over:
            one = await self._ask(proxies[turn % len(proxies)], number)
            self.ends[self._judge(number, one)] += 1
            gaps = (after - before for before, after in pairwise(one.times_s))
            self.silence_s = max(self.silence_s, *gaps, 0.0)
            if one.status in (503, 0):
                turn += 1
                await asyncio.sleep(RETRY_S)

    async def _ask(self, endpoint: Endpoint, number: int) -> Exchanged:
        values = {"prompt": f"stream {number}", "max_tokens": self._tokens + number}
        body = json.dumps(values | {"temperature": 0, "ignore_eos": True, "stream": True}).encode()
        one = Exchanged()
        call = endpoint.request(b"POST", b"/v1/completions", [], body, one)
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await one.end()
        call.abort()
        return one

    def _judge(self, number: int, one: Exchanged) -> str:
        if one.status != 200:
            return f"refused with {one.status}" if one.status else "not answered"
        text, right = "".join(one.texts()), self._right[number]
        if not right.startswith(text):
            self._wrong.append(f"stream {number}: {text[-80:]!r} is not of {right[-80:]!r}")
        elif one.done and text != right:
            self._wrong.append(f"stream {number}: {len(text)} of {len(right)} characters, whole")
        return "whole" if one.done else "cut"


class FrozenRanks:
    """Relays the traffic of ranks, and freezes one after the other."""

    FROZEN_S, MOST_OUT_S, MOST_SILENT_S = 6.0, 3.5, 5.0
    STREAMS, TOKENS, TIME_SCALE, LEASE_S, BATCH = 8, 143, 3.0, 10.0, 4
    ENGINES = (
        f"--prefillers={PREFILLERS} --ranks={RANKS} --batch={BATCH} --time-scale={TIME_SCALE} "
        f"--lease-s={LEASE_S * TIME_SCALE} --mean-output=60 --prefill-base-ms=120"
    )
    SERVE = (
        f"--batch {BATCH} --pool-limit 8 --lease-s {LEASE_S:g} --lease-margin-s 3 --queue-ttl-s 20 "
        "--health-interval-s 0.5 --resume exact"
    )

    def __init__(self, engine: str, freezes: int) -> None:
        self._load, self._freezes = Load(engine, self.STREAMS, self.TOKENS), freezes
        self._going: dict[str, asyncio.Event] = {}  # By the address that the proxy has of a rank.

    async def pass_on(self, rank: str) -> str:
        """Accept connections for a rank; return the URL. While it is frozen nothing moves, nor ends."""
        going = asyncio.Event()
        going.set()

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await source.read(1 << 16):
                    await going.wait()
                    sink.write(data)
                    await sink.drain()
            await going.wait()
            sink.close()

        async def accept(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
            engine, request = await asyncio.open_connection(*_address(rank))
            await asyncio.gather(copy(client, request), copy(engine, answer))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._going[url] = going
        return url

    async def freeze(self, admin: SoakControl) -> None:
        """Freeze ranks in turn, and see how soon the proxy leaves each out."""
        await asyncio.sleep(self.FROZEN_S)
        outs = []
        for url, going in (list(self._going.items()) * self._freezes)[: self._freezes]:
            going.clear()
            begin_s, out_s = time.monotonic(), None
            while (past_s := time.monotonic() - begin_s) < self.FROZEN_S:
                ranks = (await admin.get("/admin/state"))["state"]["ranks"]
                if out_s is None and not next(one["open"] for one in ranks if one["url"] == url):
                    out_s = past_s
                await asyncio.sleep(LOOK_S)
            going.set()
            outs.append(out_s)
            await asyncio.sleep(self.FROZEN_S)  # It is tried again.
        self._load.over = True
        late = [out_s for out_s in outs if out_s is None or out_s > self.MOST_OUT_S]
        shown = ", ".join("never" if out_s is None else f"{out_s:.2f} s" for out_s in outs)
        self._load.report.check("left out after", shown, not late)
        state = (await admin.get("/admin/state"))["state"]
        vetoes = sum(rank["vetoes"] for rank in state["ranks"])
        self._load.report.check("times a rank was left out", vetoes, vetoes >= len(outs))

    async def run(self, urls: dict[str, list[str]], folder: Path) -> SoakReport:
        """Serve the load meanwhile."""
        ranks = [await self.pass_on(url) for url in urls["decode"]]
        proxies = proxy_before(urls | {"decode": ranks}, self.SERVE.split(), folder)
        proxy = await asyncio.to_thread(proxies.__enter__)
        admin = SoakControl(f"http://{proxy.host}:{proxy.admin_port}")
        try:
            await self._load.run([Endpoint(proxy.host, proxy.port)], self.freeze(admin))
        finally:
            await asyncio.to_thread(proxies.__exit__, None, None, None)
        lost = self._load.ends.total() - self._load.ends["whole"]
        self._load.report.check("answers not whole", lost, not lost)
        silence_s = self._load.silence_s
        shown = f"{silence_s:.2f} s"
        self._load.report.check("longest silence", shown, silence_s <= self.MOST_SILENT_S)
        return self._load.report


def freeze_engines(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Freezes decode ranks under load: how soon is each left out, and is every answer still that of one engine?

    Starts emulated engines and the proxy. What is for a rank and from it is passed on, and stands still for
    some seconds, so that the proxy sees what it sees of a host that hangs. Greedy streams run all the
    while with `--resume exact`. The table says how long it took until the rank was left out, and the longest silence
    of a stream; each answer has to be that of one engine. Exits 1 if anything is wrong.
    """
    parser.add_argument("--freezes", type=positive, default=3, metavar="N", help="how many")
    given = parser.parse_args(words)
    with TemporaryDirectory() as folder, emulated(FrozenRanks.ENGINES.split()) as urls:

        async def run() -> SoakReport:
            return await FrozenRanks(urls["decode"][0], given.freezes).run(urls, Path(folder))

        return _judged(asyncio.run(run()))


class Replica:
    """One of the proxies of which one leads, at the same port whenever it is begun again."""

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


# By what is done to a leader: the signal, and for how long there may be no service.
HOW = {
    "kill": (signal.SIGKILL, 5.0),
    "end": (signal.SIGTERM, 2.5),
    "stop": (signal.SIGSTOP, 5.0),
}


class LeaderKills:
    """Kills, ends or stops the leader, and begins it again."""

    STEP_S, BEGIN_AGAIN_S, BATCH, STREAMS, TOKENS = 0.03, 4.0, 8, 48, 40
    ENGINES = (f"--prefillers={PREFILLERS}", f"--ranks={RANKS}", f"--batch={BATCH}")

    def __init__(self, engine: str, replicas: Sequence[Replica], kinds: Sequence[str]) -> None:
        self._load = Load(engine, self.STREAMS, self.TOKENS)
        self._replicas, self._kinds = replicas, kinds
        self._gaps: list[tuple[float, str]] = []  # Without a replica that is ready, by kill.
        self._above: list[float] = []  # How long a rank stood above its batch.
        self._two = 0

    async def run(self, minutes: float, every_s: float) -> SoakReport:
        """Kill the leader every so many seconds, under the load."""
        works = [
            self._kill(minutes, every_s),
            self._watch_ranks(),
            *map(self._look, self._replicas),
        ]
        await self._load.run([one.endpoint for one in self._replicas], *works)
        report = self._load.report
        for how, (_, most_s) in HOW.items():
            gaps = sorted(gap_s for gap_s, kind in self._gaps if kind == how)
            if gaps:
                shown = f"{gaps[-1]:.2f} s of {len(gaps)}, median {gaps[len(gaps) // 2]:.2f} s"
                report.check(f"longest without service ({how})", shown, gaps[-1] <= most_s)
        report.check("looks at which two were ready", self._two, not self._two)
        longest_s = max(self._above, default=0.0)
        shown = f"{len(self._above)} times, at most {longest_s:.2f} s"
        # A step, and what a look takes on a busy machine.
        report.check("ranks above their batch", shown, longest_s <= self.STEP_S + 3 * LOOK_S)
        return report

    async def _kill(self, minutes: float, every_s: float) -> None:
        await self._leader()
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s:
            await asyncio.sleep(every_s)
            kind = self._kinds[len(self._gaps) % len(self._kinds)]
            leader, began_s = await self._leader(), time.monotonic()
            leader.process.send_signal(HOW[kind][0])
            await self._leader(other_than=leader)
            self._gaps.append((time.monotonic() - began_s, kind))
            await asyncio.sleep(self.BEGIN_AGAIN_S)
            if kind == "stop":
                leader.process.send_signal(signal.SIGCONT)
            else:
                await asyncio.to_thread(leader.process.wait)
                leader.begin()
        self._load.over = True

    async def _leader(self, other_than: Replica | None = None) -> Replica:
        """Return the proxy that is ready, once one is."""
        while True:
            leader = next((one for one in self._replicas if one.ready), None)
            if leader not in (None, other_than):
                return leader
            await asyncio.sleep(LOOK_S)  # No proxy reports it.

    async def _look(self, one: Replica) -> None:
        """See whether one is ready. One that is stopped may be so in its kernel's queue alone."""
        while not self._load.over:
            status = 0
            with suppress(WireError):
                answer = await fetch(
                    one.endpoint, b"GET", b"/ready", [], b"", timeout_s=0.3, max_bytes=1 << 16
                )
                status = answer.status
            one.ready = status == 200
            self._two += all(other.ready for other in self._replicas)
            await asyncio.sleep(LOOK_S)

    async def _watch_ranks(self) -> None:
        since: dict[int, float] = {}
        engine = SoakControl(self._load.engine)
        while not self._load.over:
            stats, now_s = await engine.get("/emulation/stats"), time.monotonic()
            loads = zip(stats["running"], stats["waiting"], stats["arriving"], strict=True)
            for rank, load in enumerate(loads):
                if sum(load) > self.BATCH:
                    since.setdefault(rank, now_s)
                elif rank in since:
                    self._above.append(now_s - since.pop(rank))
            await asyncio.sleep(LOOK_S)


def leader_kills(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Kills who leads under load: how long is there no service, and is any answer wrong or doubled?

    Starts emulated engines and two proxies, of which one leads: by a Lease of a small API server that the command
    has itself, by that of a real one (--api), or by a lock (--lock). Who leads is killed, told to end, or stopped
    and let go on (--how), and begun again some seconds later. Streams run all the while; each that ends whole has to
    be that of one engine. Exits 1 if there was no service for too long, two were ready at a time, an answer was wrong,
    or a rank stood above its batch for more than a step.
    """
    hows = [*HOW, "all"]
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="how long")
    parser.add_argument(
        "--every-s", type=positive, default=20, metavar="S", help="between two kills"
    )
    parser.add_argument("--how", choices=hows, default="kill", help="what is done to it")
    parser.add_argument("--lock", action="store_true", help="they agree by a lock on a file")
    parser.add_argument("--api", metavar="URL", help="of a Kubernetes API server")
    parser.add_argument("--account", type=Path, metavar="DIR", help="the account there")
    given = parser.parse_args(words)
    with TemporaryDirectory() as folder, emulated(LeaderKills.ENGINES) as urls:
        return _judged(asyncio.run(_with_replicas(given, urls, Path(folder))))


async def _with_replicas(
    given: argparse.Namespace, urls: dict[str, list[str]], folder: Path
) -> SoakReport:
    server = LeaseServer()
    await server.start()
    where = ["--leader-lease", "serving/balanceroute"]
    where += ["--kubernetes-api", given.api or server.url]
    if given.account:
        where += ["--kubernetes-account", str(given.account)]
    if given.lock:
        where = ["--leader-lock", str(folder / "leader")]
    fleet = ["--prefill", *urls["prefill"], "--decode", *urls["decode"]]
    words = [*where, *fleet, "--no-admin", f"--batch={LeaderKills.BATCH}", "--log"]
    replicas = [Replica(number, words, folder) for number in (1, 2)]
    try:
        for one in replicas:
            # The server of the Lease is this process.
            await asyncio.to_thread(one.await_port)
            one.endpoint = Endpoint("127.0.0.1", one.port)
        kinds = list(HOW) if given.how == "all" else [given.how]
        kills = LeaderKills(urls["decode"][0], replicas, kinds)
        return await kills.run(given.minutes, given.every_s)
    finally:
        for one in replicas:
            one.end()
        await server.close()


COMMANDS = dict.fromkeys(
    ("chaos", "decoder-deaths", "exactness", "freeze-engines", "fuzz", "leader-kills", "soak"),
    "faults",
)

if __name__ == "__main__":
    sys.exit(main("faults.py", COMMANDS))
