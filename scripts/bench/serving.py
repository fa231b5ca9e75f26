"""What large bodies cost the proxy."""

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from balanceroute.proxy.__main__ import main as cli
from balanceroute.proxy.live import serve
from balanceroute.proxy.live.proxy import Proxy
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import HttpRequest, Reply, ServerLimits
from experiment import right, table_head, table_row

HOST = "127.0.0.1"
MIB = 1 << 20
_HEAD = '"model":"m","max_tokens":8,'
_SIZES_MIB = (1, 4, 16)


Gaps = Any
"""What processes share: the longest gap in processor time and in wall time, and all ticks."""


def _prompt(value: str) -> bytes:
    return f'{{{_HEAD}"prompt":{value}}}'.encode()


def _filled(unit: str, size: int) -> str:
    return unit * (size // len(unit.encode()))


def _list(unit: str, size: int) -> bytes:
    elements = _filled(unit + ",", size) + unit
    return f'{{{_HEAD}"prompt":"a","metadata":[{elements}]}}'.encode()


def _ids(size: int) -> bytes:
    rng = random.Random(1)
    return _prompt(json.dumps([rng.randrange(150_000) for _ in range(size // 8)]))


def _messages(content: str, size: int) -> bytes:
    message = f'{{"role":"user","content":"{content}"}}'
    messages = _filled(message + ",", size) + message
    return f'{{{_HEAD}"messages":[{messages}]}}'.encode()


def _members(size: int) -> bytes:
    names = ",".join(f'"m{i:07}":1' for i in range(size // 13))
    return f'{{{_HEAD}"prompt":"a",{names}}}'.encode()


KINDS: dict[str, Callable[[int], bytes]] = {
    "one ASCII text": lambda size: _prompt('"' + _filled("The quick brown fox. ", size) + '"'),
    "one Chinese text": lambda size: _prompt('"' + _filled("数据处理的", size) + '"'),
    "escaped letters": lambda size: _prompt('"' + _filled("\\u0041", size) + '"'),
    "token ids": _ids,
    "nested arrays": lambda size: _list("[]", size),
    "short messages": lambda size: _messages("why?", size),
    "long messages": lambda size: _messages("The quick\\nbrown fox. " * 100, size),
    "many members": _members,
}


def bodies(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """What a large body costs the others: how long it holds the event loop, and its memory.

    One proxy on real sockets, and an engine that refuses each request. A
    timer in the proxy's loop notes the longest time between two of its ticks, of a millisecond each: as
    processor time of the process, which other programs on the machine do not add to, and as wall time.
    """
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME")
    parser.add_argument("--native", default="auto", help="of the proxy")
    arguments = parser.parse_args(words)
    names = ("MiB", "status", "stall ms", "wall ms", "time ms", "peak MB")
    print(table_head("kind", *right(names)))
    with proxy(arguments.native) as (port, pid, gaps):
        post(port, KINDS["short messages"](1_000))
        for kind in arguments.kinds:
            for size in _SIZES_MIB:
                cells = one(port, pid, gaps, KINDS[kind](size * MIB))
                print(table_row(kind, size, *cells), flush=True)
    return 0


def one(port: int, pid: int, gaps: Gaps, body: bytes) -> tuple[str, ...]:
    """Send one body; return what it cost."""
    time.sleep(0.05)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # Forget the peak.
    before = memory(pid, "VmRSS")
    gaps[0] = gaps[1] = 0.0
    begin = time.perf_counter()
    status = post(port, body)
    took_s = time.perf_counter() - begin
    ticks = gaps[2]
    while gaps[2] < ticks + 2:  # What it held is freed after the answer.
        time.sleep(0.001)
    peak = memory(pid, "VmHWM") - before
    cells = (gaps[0] * 1e3, gaps[1] * 1e3, took_s * 1e3, peak / 1e6)
    return (str(status), *(f"{cell:.0f}" for cell in cells))


def send(port: int, body: bytes) -> socket.socket:
    """Send a request and return its connection."""
    client = socket.create_connection((HOST, port))
    path = "chat/completions" if b'"messages"' in body[:64] else "completions"
    client.sendall(
        f"POST /v1/{path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
    )
    with suppress(BrokenPipeError, ConnectionResetError):  # It may be refused before its end.
        client.sendall(body)
    return client


def post(port: int, body: bytes) -> int:
    """Send a request and return the status of its answer."""
    with send(port, body) as client:
        return int(client.recv(65_536).split(b" ", 2)[1])


def memory(pid: int, name: str) -> int:
    """Return a figure of a process's memory, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


@contextmanager
def proxy(native: str) -> Iterator[tuple[int, int, Gaps]]:
    """Run a proxy and its engine; yield its port, its process and its longest gaps."""
    context = multiprocessing.get_context("spawn")
    gaps = context.Array("d", 3)
    ours, theirs = context.Pipe()
    engine = context.Process(target=_engine, args=(theirs,))
    engine.start()
    served = context.Process(target=_proxy, args=(theirs, ours.recv(), gaps, native))
    served.start()
    try:
        port = ours.recv()
        assert served.pid is not None
        yield port, served.pid, gaps
    finally:
        for process in (served, engine):
            process.kill()
            process.join()


def _engine(pipe: Connection) -> None:
    """Refuse every request."""

    def answer(request: HttpRequest, reply: Reply) -> None:
        if request.method == b"GET":
            reply.send(200, [], b"")
        else:
            reply.send(400, [(b"content-type", b"application/json")], b'{"error":{}}')

    async def run() -> None:
        servers = [Server(answer, limits=ServerLimits(body_limit_bytes=64 * MIB)) for _ in range(2)]
        for server in servers:
            await server.start(HOST, 0)
        pipe.send([server.port for server in servers])
        await asyncio.Event().wait()

    uvloop.run(run())


def _proxy(pipe: Connection, engines: list[int], gaps: Gaps, native: str) -> None:
    """Serve, with a timer that notes how late it is."""

    class Watched(Proxy):
        async def start(self) -> None:
            await super().start()
            pipe.send(self.server.port)
            self._tasks["gaps"] = [asyncio.create_task(_tick(gaps))]

    setattr(serve, "Proxy", Watched)  # noqa: B010 - other code must not replace it.
    prefill, decode = (f"http://{HOST}:{port}" for port in engines)
    words = "serve --port 0 --no-admin --log none --predictor exact-match --scrape-interval-s 3600"
    words += (
        f" --body-limit-bytes {32 * MIB} --native {native} --prefill {prefill} --decode {decode}"
    )
    with redirect_stdout(sys.stderr):  # Where it listens is no row of the table.
        cli(words.split())


async def _tick(gaps: Gaps) -> None:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    while True:
        await asyncio.sleep(0.001)
        cpu_before_s, wall_before_s = cpu_s, wall_s
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        gaps[0] = max(gaps[0], cpu_s - cpu_before_s)
        gaps[1] = max(gaps[1], wall_s - wall_before_s)
        gaps[2] += 1
