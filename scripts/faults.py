"""Faults and hostile requests against the whole proxy: `python scripts/faults.py NAME ..`; `--list` tells the names."""

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from tests.support.arguments import positive
from tests.support.certificate import make_certificate
from tests.support.chaos.deaths import freeze_ranks, kill_decoders
from tests.support.chaos.exactness import compare
from tests.support.chaos.fuzz import fuzz as fuzz_seed
from tests.support.chaos.groups import run_seed_of_groups
from tests.support.chaos.trial import Summary, run_seed
from tests.support.soak.proxy_process import ProxyProcess, running_proxy
from tests.support.soak.run import SoakControl, SoakReport, SoakSettings
from tests.support.soak.run import soak as run_soak

from balanceroute.proxy.live.request.leg_settings import FirstTokenFrom, Resume
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.messages import WireError
from balanceroute.topologies import CONNECTORS
from commands import main
from experiment import emulated

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.chaos.trial import TrialReport


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
    parser.add_argument("--seeds", type=positive, default=20, metavar="N", help="how many seeds")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of them")
    parser.add_argument("--seed", type=int, metavar="N", help="run this one alone")
    parser.add_argument("--requests", type=positive, default=100, metavar="N", help="of each seed")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes")
    parser.add_argument(
        "--force",
        choices=["locality"],
        help="in every seed: prefix-aware choice, ranks that compute prompts, conversations, two versions",
    )
    parser.add_argument("--groups", action="store_true", help="several groups of engines")
    parser.add_argument("--http3", action="store_true", help="clients speak HTTP/3 (extra h3)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what happened in the one seed")
    arguments = parser.parse_args(words)
    if arguments.log is not None and arguments.seed is None:
        parser.error("--log goes with --seed")
    alone = [flag for flag in ("groups", "http3") if getattr(arguments, flag)]
    if alone and (arguments.force or len(alone) > 1):
        parser.error(f"--{alone[0]} goes with none of the other kinds of runs")
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.seed is not None:
        seeds = range(arguments.seed, arguments.seed + 1)
    begin = time.perf_counter()
    summary = Summary()
    # Fresh processes: what one run leaves in memory can then be of no consequence to another.
    with (
        TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool,
    ):
        run: Callable[[int], TrialReport] = partial(
            run_seed,
            requests=arguments.requests,
            near=arguments.force == "locality",
        )
        if arguments.groups:
            run = partial(run_seed_of_groups, requests=arguments.requests)
        if arguments.http3:
            # Here: an extra.
            from tests.support.chaos.http3_trial import (  # noqa: PLC0415
                run_seed_over_http3,
            )

            cert, key = make_certificate(Path(folder), kind="ed25519")
            run = partial(run_seed_over_http3, requests=arguments.requests, cert=cert, key=key)
        for report in pool.imap_unordered(run, seeds):
            summary.add(report)
            if report.violations:
                print(f"seed {report.seed}: {report.violations[0]}", file=sys.stderr)
            if arguments.log is not None:
                arguments.log.write_text("\n".join([*report.lines, ""]))
    print("\n".join(summary.lines()))
    print(f"took            {time.perf_counter() - begin:.0f} s, {arguments.jobs} jobs")
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
    parser.add_argument("--seed", type=int, metavar="N", help="this seed alone")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes")
    arguments = parser.parse_args(words)
    each = min(arguments.cases, _CASES_OF_A_SEED)
    seeds = range(arguments.first, arguments.first + -(-arguments.cases // each))
    if arguments.seed is not None:
        each, seeds = arguments.cases, range(arguments.seed, arguments.seed + 1)
    begin = time.perf_counter()
    kinds: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    cases = violations = 0
    # Fresh processes: what one run leaves in memory can then be of no consequence to another.
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for report in pool.imap_unordered(partial(fuzz_seed, cases=each), seeds):
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
    print(f"took        {time.perf_counter() - begin:.0f} s, {arguments.jobs} jobs")
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
    parser.add_argument("--policy", default="br-h", help="of the proxy")
    parser.add_argument(
        "--native",
        choices=["auto", "off", "require"],
        default="auto",
        help="whether the native library moves streams",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the proxy's logs there")
    arguments = parser.parse_args(words)
    settings = SoakSettings(
        requests=arguments.requests,
        warm_up=max(10, arguments.requests // 25),
        afterwards=max(10, arguments.requests // 50),
        seed=arguments.seed,
        wait_for_idle=True,
        connector=arguments.connector,
        policy=arguments.policy,
        native=arguments.native,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = run_soak(settings, folder)
    print(report.text())
    return 1 if report.wrong else 0


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
    arguments = parser.parse_args(words)
    if arguments.freeze is not None:
        return _freeze_ranks(arguments)
    found = kill_decoders(
        arguments.seed,
        requests=arguments.requests,
        resume=arguments.resume,
        agents=arguments.agents,
        dp_size=arguments.dp_size,
    )
    print(
        f"{found.killed} decode engines killed under {arguments.requests} greedy streams: "
        f"{found.hit} streams hit, {found.exact} exact, {found.failed} ended with an error "
        f"({found.twice} of them with the second engine that died under it), {len(found.wrong)} wrong, {found.held} left"
    )
    if found.gaps_s:
        worst = max(found.gaps_s)
        print(
            f"longest gap of a stream that went on: median {median(found.gaps_s):.2f} s, at most {worst:.2f} s"
        )
    for wrong in found.wrong:
        print(f"  {wrong}")
    return 1 if found.wrong or found.held else 0


def _freeze_ranks(arguments: argparse.Namespace) -> int:
    found = freeze_ranks(arguments.seed, seconds=arguments.freeze, resume=arguments.resume)
    print(
        f"{found.requests} requests in {arguments.freeze} s; {found.frozen} ranks frozen under streams, "
        f"{found.paused} pauses of a rank, {found.held} standstills of all ({found.told} told), "
        f"{found.stood} of the proxy"
    )
    if found.found_s:
        beyond = max(out - limit for out, limit in zip(found.found_s, found.limits_s, strict=False))
        print(
            f"left out after {median(found.found_s):.2f} s in the median, at most {max(found.found_s):.2f} s, "
            f"and at most {beyond:.2f} s behind the limit of its own pace"
        )
    if found.gaps_s:
        print(
            f"{len(found.gaps_s)} streams went on elsewhere; longest silence: median "
            f"{median(found.gaps_s):.2f} s, at most {max(found.gaps_s):.2f} s"
        )
    print(
        f"{len(found.missed)} not left out in time, {len(found.false)} left out without reason, "
        f"{len(found.wrong)} answers wrong or lost, {found.left} left"
    )
    for line in (*found.missed, *found.false, *found.wrong):
        print(f"  {line}")
    return 1 if found.missed or found.false or found.wrong or found.left else 0


PREFILLERS, RANKS, BATCH = 2, 4, 4
PREFILL_MS = 120.0
TIME_SCALE = 3.0
MEAN_OUTPUT = 60.0
LOOK_S = 0.02
LEASE_S = 10.0
STREAMS, FROZEN_S, MOST_OUT_S, MOST_SILENT_S = 8, 6.0, 3.5, 5.0
SERVE = (
    f"--port 0 --admin-port 0 --batch {BATCH} --pool-limit 8 --lease-s {LEASE_S:g} "
    "--lease-margin-s 3 --queue-ttl-s 20 --health-interval-s 0.5 --resume exact"
)


class Run:
    """One run."""

    def __init__(
        self, freezes: int, proxy: ProxyProcess, ranks: dict[str, int], direct: str
    ) -> None:
        self.report = SoakReport()  # What was found.
        self._freezes = freezes
        self._admin = SoakControl(f"http://{proxy.host}:{proxy.admin_port}")
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
    """What a stream brought; see `ResponseHandler`."""

    def __init__(self) -> None:
        self.status = 0
        self.error = ""
        self.silence_s = 0.0  # The longest time without any of it, behind its first event.
        self.over = asyncio.Event()
        self._body = bytearray()
        self._last_s = 0.0

    @property
    def text(self) -> str:
        lines = [one[6:] for one in bytes(self._body).split(b"\n") if one.startswith(b"data: {")]
        choices = [one for line in lines for one in json.loads(line).get("choices", ())]
        return "".join(one["text"] for one in choices)

    @property
    def whole(self) -> bool:
        """Whether it came to its proper end."""
        return bytes(self._body).endswith(b"data: [DONE]\n\n")

    def on_head(self, status: int, headers: object) -> None:
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
            command = [sys.executable, __file__, "freeze-engines", "--pass-on", url]
            one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            running.append(one)
            assert one.stdout is not None
            found[f"http://127.0.0.1:{int(one.stdout.readline())}"] = one.pid
        yield found
    finally:
        for one in running:
            one.kill()
            one.communicate()


def _freeze(freezes: int, urls: dict[str, list[str]], folder: Path) -> SoakReport:
    flags = SERVE.split()
    with _passing_on(urls["decode"]) as ranks:
        flags += ["--prefill", *urls["prefill"], "--decode", *ranks]
        with running_proxy(flags, engines=[*urls["prefill"], *ranks], folder=folder) as proxy:

            async def run() -> SoakReport:
                one = Run(freezes, proxy, ranks, urls["decode"][0])
                await one.run()
                return one.report

            return asyncio.run(run())


def freeze_engines(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Freezes decode ranks under load: how soon is each left out, and is every answer still that of one engine?

    Starts emulated engines and the proxy. A process that passes on what is for a rank and from it gets SIGSTOP, so
    that the proxy sees what it sees of a host that hangs, and SIGCONT after FROZEN_S. Greedy streams run all the
    while with `--resume exact`. The table says how long it took until the rank was left out, and the longest silence
    of a stream; each answer has to be that of one engine. Exits 1 if anything is wrong.
    """
    parser.add_argument("--freezes", type=positive, default=3, metavar="N", help="how many")
    parser.add_argument("--pass-on", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the proxy's logs there")
    options = parser.parse_args(words)
    if options.pass_on is not None:
        asyncio.run(_pass_on(options.pass_on))
        return 0
    command = [f"--prefillers={PREFILLERS}", f"--ranks={RANKS}", f"--batch={BATCH}"]
    command += [f"--time-scale={TIME_SCALE}", f"--lease-s={LEASE_S * TIME_SCALE}"]
    command += [f"--mean-output={MEAN_OUTPUT}", f"--prefill-base-ms={PREFILL_MS}"]
    with tempfile.TemporaryDirectory() as scratch, emulated(command) as urls:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = _freeze(options.freezes, urls, folder)
    print(report.text())
    return 1 if report.wrong else 0


COMMANDS = dict.fromkeys(
    ("chaos", "decoder-deaths", "exactness", "freeze-engines", "fuzz", "soak"), "faults"
) | {"leader-kills": "leader_kills"}

if __name__ == "__main__":
    sys.exit(main("faults.py", COMMANDS))
