"""Freezes decode ranks under load: how soon is each left out, and is every answer still that of one engine?

    python scripts/freeze_engines.py [--freezes 3]

Starts emulated engines and the proxy. A process that passes on what is for a rank and from it gets SIGSTOP, so
that the proxy sees what it sees of a host that hangs, and SIGCONT after FROZEN_S. Greedy streams run all the
while with `--resume exact`. The table says how long it took until the rank was left out, and the longest silence
of a stream; each answer has to be that of one engine. Exits 1 if anything is wrong.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.soak.proxy_process import ProxyProcess, running_proxy
from balanceroute.proxy.testing.soak.run import SoakControl, SoakReport
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.messages import WireError

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
    """One run.

    Attributes:
        report: What was found.
    """

    def __init__(
        self, freezes: int, proxy: ProxyProcess, ranks: dict[str, int], direct: str
    ) -> None:
        self.report = SoakReport()
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


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--freezes", type=positive, default=3, metavar="N", help="how many")
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
        report = _freeze(options.freezes, urls, folder)
    print(report.text())
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
