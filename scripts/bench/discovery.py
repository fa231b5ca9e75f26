"""What many engines cost that are told at once."""

import argparse
import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import uvloop
from tests.support.arguments import positive

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import WireError
from bench.targets import cpu_s, ended, family
from experiment import table_head, table_row

STATES = ("alive", "dead", "silent")
_READY = re.compile(r"listening on http://(\S+):(\d+), admin on http://\S+:(\d+)\n")
_READY_S = 60.0
_SLOW_S = 20.0
_EVERY_S = 0.05
# Two requests at a time, and one look at /health.
_CLIENTS = 2
_BODY = json.dumps({"model": "m", "prompt": "x y z", "max_tokens": 3}).encode()
_JSON = [(b"content-type", b"application/json")]
_OTHER_METRICS = "".join(
    f'vllm:request_seconds_bucket{{engine="0",le="{number}"}} {number}\n' for number in range(900)
)
_PAGES = {
    "/health": b"",
    "/version": b'{"version":"0.32.0"}',
    "/v1/models": b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":8192}]}',
    "/metrics": (
        'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:num_requests_running{engine="0"} 0\n'
        f'{_OTHER_METRICS}vllm:num_requests_waiting{{engine="0"}} 0\n'
    ).encode(),
}


# Engines.


class _Engine(asyncio.Protocol):
    """Answers each request at once; what is sent together is one request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        if not mark or len(body) < int(length[1] if length else 0):
            return
        self._received = b""
        answer = _PAGES.get(head.split(b" ", 2)[1].decode(), b"{}")
        if head.startswith(b"POST"):
            answer = self._completion(json.loads(body or b"{}"))
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(answer), answer)
        )

    def _completion(self, body: dict[str, object]) -> bytes:
        choice = {"index": 0, "text": " a b c", "finish_reason": "length", "logprobs": None}
        answer: dict[str, object] = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
        }
        asked = body.get("kv_transfer_params")
        if isinstance(asked, dict) and asked.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "e",
                "remote_block_ids": [1],
                "remote_host": "127.0.0.1",
                "remote_port": 1,
            }
        return json.dumps(answer).encode()


def _address(number: int) -> str:
    return f"127.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def _bound(count: int) -> tuple[list[socket.socket], int]:
    """Return sockets on so many addresses, all of one port, and that port."""
    sockets: list[socket.socket] = []
    port = 0
    for number in range(count):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((_address(number), port))
        port = one.getsockname()[1]
        sockets.append(one)
    return sockets, port


def serve_engines(living: int, others: int, state: str) -> None:
    """Serve until standard input ends; print the port first."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sockets, port = _bound(living + others)

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        for number, one in enumerate(sockets):
            if number < living or state == "alive":
                await loop.create_server(_Engine, sock=one, backlog=128)
            elif state == "silent":
                one.listen(128)
        print(port, flush=True)
        await loop.run_in_executor(None, sys.stdin.read)

    uvloop.run(listen())


# Processes.


def _started(command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env
    )


def _busy_s(pid: int) -> float:
    """Return the CPU time of a process, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _peak_mib(pid: int) -> int:
    """Return the largest memory of a process, of the largest one."""
    most = 0
    for one in family(pid):
        with suppress(OSError):
            status = Path(f"/proc/{one}/status").read_text()
            found = re.search(r"VmHWM:\s+(\d+)", status)
            most = max(most, int(found[1]) if found else 0)
    return most // 1024


# Clients.


@dataclass
class Answers:
    """How long answers took, in seconds."""

    waits_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    failed: int = 0

    def take(self) -> "tuple[Slowest, int]":
        """Return the slowest, and how many failed, and begin anew."""
        slowest = Slowest(max(self.waits_s, default=0.0), max(self.busy_s, default=0.0))
        found = slowest, self.failed
        self.waits_s, self.busy_s, self.failed = [], [], 0
        return found


class Slowest(NamedTuple):
    """The longest that an answer took, and the most that the proxy computed meanwhile, in seconds.

    On a machine that others use, the first of them says little.
    """

    wait_s: float
    busy_s: float


async def _ask(pid: int, endpoint: Endpoint, answers: Answers, method: bytes, path: bytes) -> None:
    loop = asyncio.get_running_loop()
    body = _BODY if method == b"POST" else b""
    while True:
        began_s, busy_s = loop.time(), _busy_s(pid)
        try:
            response = await fetch(
                endpoint, method, path, _JSON, body, timeout_s=_SLOW_S, max_bytes=1 << 24
            )
            answers.failed += response.status != 200
        except WireError:
            answers.failed += 1
        answers.waits_s.append(loop.time() - began_s)
        answers.busy_s.append(_busy_s(pid) - busy_s)
        await asyncio.sleep(_EVERY_S)


class Figures(NamedTuple):
    """What one run showed."""

    # The slowest answer to a client, of requests and of /health, in each phase.
    slowest: dict[str, Slowest]
    failed: int  # Those that were no 200.
    cpu_s: float  # CPU time from the telling until it was over.
    steady: float  # CPU seconds a second with all engines there.
    peak_mib: int
    pages_s: dict[str, float]  # The time of each page of the admin listener with them.
    registered: int  # Engines, as /admin/instances shows them.
    left: int


def _write(path: Path, port: int, numbers: range) -> None:
    """Tell engines: the first three, and those with these numbers."""
    roles = {0: "prefill", 1: "decode", 2: "decode"}
    roles |= {number: ("prefill", "decode")[number % 2] for number in numbers}
    lines = [
        f'[[{role}]]\nurl = "http://{_address(number)}:{port}"\n' for number, role in roles.items()
    ]
    new = path.with_suffix(".new")
    new.write_text("".join(lines), encoding="utf-8")
    new.replace(path)


async def _watch(
    pid: int,
    ports: tuple[int, int],
    told: Path,
    engines: tuple[int, range],
    times: tuple[float, ...],
) -> Figures:
    """Tell the engines, look, have them go, look again."""
    await asyncio.sleep(3.0)  # The three engines of the beginning are found.
    tell_s, look_s, gone_s = times
    answers = Answers()
    admin = Endpoint("127.0.0.1", ports[1])
    public = [Endpoint("127.0.0.1", ports[0]) for _ in range(_CLIENTS + 1)]
    tasks = [
        asyncio.create_task(_ask(pid, one, answers, b"POST", b"/v1/completions"))
        for one in public[:_CLIENTS]
    ]
    tasks.append(asyncio.create_task(_ask(pid, public[-1], answers, b"GET", b"/health")))
    await asyncio.sleep(2.0)
    slowest: dict[str, Slowest] = {}
    failed = 0

    def end(phase: str) -> None:
        nonlocal failed
        slowest[phase], more = answers.take()
        failed += more

    end("before")
    spent_s = cpu_s(pid)
    _write(told, *engines)
    await asyncio.sleep(tell_s)
    end("told")
    spent_s, began_s = cpu_s(pid) - spent_s, cpu_s(pid)
    await asyncio.sleep(look_s)
    steady = (cpu_s(pid) - began_s) / look_s
    end("steady")
    pages_s, registered = await _pages(admin)
    end("pages")
    _write(told, engines[0], range(0))
    await asyncio.sleep(gone_s)
    end("gone")
    left = (await _pages(admin))[1]
    for task in tasks:
        task.cancel()
    for one in (admin, *public):
        one.close()
    return Figures(slowest, failed, spent_s, steady, _peak_mib(pid), pages_s, registered, left)


async def _pages(admin: Endpoint) -> tuple[dict[str, float], int]:
    loop, pages_s, registered = asyncio.get_running_loop(), {}, 0
    for path in ("/metrics", "/admin/state", "/admin/instances", "/workers", "/ready"):
        began_s = loop.time()
        try:
            response = await fetch(
                admin, b"GET", path.encode(), [], b"", timeout_s=_SLOW_S, max_bytes=1 << 26
            )
        except WireError:
            continue
        pages_s[path] = loop.time() - began_s
        if path == "/admin/instances":
            registered = len(json.loads(response.body)["instances"])
        await asyncio.sleep(0.5)
    return pages_s, registered


def measure(count: int, state: str, *, tree: Path | None, times: tuple[float, ...]) -> Figures:
    """Return what a run with `count` engines shows."""
    with tempfile.TemporaryDirectory() as name:
        told = Path(name) / "engines.toml"
        own = [sys.executable, str(Path(__file__).parent), "discovery"]
        own += ["--serve", str(count), state]
        env = os.environ | ({} if tree is None else {"PYTHONPATH": str(tree / ".src")})
        with ended(_started(own)) as engines:
            assert engines.stdout is not None
            port = int(engines.stdout.readline())
            _write(told, port, range(0))
            command = [sys.executable, "-m", "balanceroute.proxy", "serve", "--port", "0"]
            command += ["--admin-port", "0", "--batch", "64"]
            command += ["--discover", f"file:{told}", "--discover-interval-s", "0.5"]
            command += ["--discover-hold-s", "1", "--log", str(Path(name) / "log")]
            with ended(_started(command, env)) as proxy:
                assert proxy.stdout is not None
                ready = _READY.fullmatch(proxy.stdout.readline())
                if ready is None:
                    raise SystemExit("the proxy did not start")
                ports = int(ready[2]), int(ready[3])
                seen = range(3, 3 + count)
                return uvloop.run(_watch(proxy.pid, ports, told, (port, seen), times))


def discovery(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Measures what clients notice while a discovery source tells many engines at once.

        scripts/bench discovery --engines 320 2000
        scripts/bench discovery --state dead
        scripts/bench discovery --against ../before    # the proxy of another checkout too

    A file tells one prefiller and two ranks, and clients send requests. Then it tells N engines more, half
    of them prefillers: living ones, dead ones, which refuse connections, or silent ones, which take them and
    answer nothing. After a while they are gone again. All engines are one process that listens on addresses
    of 127.0.0.0/8. Prints the slowest answer of each phase, with the most that the proxy computed within one
    (on a machine that others use, this is the figure to look at), and what it took.
    """
    parser.add_argument("--engines", type=positive, nargs="+", default=[320, 640, 1000, 2000])
    parser.add_argument("--state", choices=STATES, nargs="+", default=["alive", "dead"])
    parser.add_argument("--against", type=Path, help="another checkout, measured too")
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=3,
        default=[20.0, 10.0, 10.0],
        metavar=("TOLD", "STEADY", "GONE"),
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.serve:
        serve_engines(3, int(arguments.serve[0]), arguments.serve[1])
        return 0
    print(
        table_head(
            *("engines", "proxy", "slowest s: before", "told", "steady", "pages", "gone", "failed"),
            *("CPU s", "steady CPU/s", "peak MiB", "engines there, then left", "pages s"),
        )
    )
    trees = [None] if arguments.against is None else [arguments.against, None]
    for state in arguments.state:
        for count in arguments.engines:
            for tree in trees:
                found = measure(count, state, tree=tree, times=tuple(arguments.seconds))
                _print(f"{count} {state}", tree, found)
    return 0


def _print(engines: str, tree: Path | None, found: Figures) -> None:
    phases = [f"{one.wait_s:.2f} ({one.busy_s:.2f})" for one in found.slowest.values()]
    pages = ", ".join(f"{path} {wait_s:.2f}" for path, wait_s in found.pages_s.items())
    cells = [engines, "this" if tree is None else str(tree), *phases]
    cells += [str(found.failed), f"{found.cpu_s:.1f}", f"{found.steady:.2f}", str(found.peak_mib)]
    print(table_row(*cells, f"{found.registered}, {found.left}", pages), flush=True)
