"""`balanceroute pick` behind real Envoy: a Coordinator that makes two calls of each request, and what goes wrong."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_server
from typing import Any

import httpx
from tests.support.soak.proxy_process import ProxyProcess

from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import (
    Headers,
    HttpRequest,
    Rejection,
    Reply,
    ServerLimits,
    WireError,
)
from experiment import MOONCAKE, emulated, proxy_before

_ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_JSON: Headers = [(b"content-type", b"application/json")]
ENGINES = ("--prefillers=2", "--ranks=4", "--batch=8", "--lease-s=300")
FLAGS = ("--batch=8", "--lease-s=300", "--scrape-interval-s=0.5")
_LOAD_ENGINES = (
    *("--prefillers=2", "--ranks=8", "--batch=16", "--prefill-us-per-token=5"),
    "--lease-s=300",
)
_LOAD_FLAGS = ("--batch=16", "--lease-s=300", "--probe-limit=1")
_STEP_S = 0.03  # Of an emulated rank, about.
_PATIENCE_S = 30.0
_SLOTS = 32


# A stand-in for llm-d's Coordinator, or its sidecar: one call for each phase.


@dataclass
class _Phase:
    """One call; a decode's answer goes to the client as it comes."""

    done: "Callable[[_Phase], None]"
    reply: Reply | None = None  # Who gets the answer; None to keep it.
    status: int = 0
    body: bytes = b""
    error: str = ""
    began_s: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0  # Until its answer began.

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.waited_s = status, time.monotonic() - self.began_s
        if self.reply is not None:
            kept = [one for one in headers if one[0] == b"content-type"]
            self.reply.start(status, kept)

    def on_data(self, data: bytes) -> None:
        if self.reply is None:
            self.body += data
        else:
            self.reply.write(data)

    def on_end(self) -> None:
        if self.reply is not None:
            self.reply.end()
        self.done(self)

    def on_error(self, error: WireError) -> None:
        self.error = str(error)
        if self.reply is not None and self.reply.started:
            self.reply.abort()
        self.done(self)


class Coordinator:
    """Serves clients, and calls the gateway twice for each; a sidecar, the named prefiller and then its rank."""

    def __init__(self, port: int, *, sidecar: bool) -> None:
        self._next, self._sidecar = Endpoint("127.0.0.1", port), sidecar
        self._prefillers: dict[bytes, Endpoint] = {}
        self._number = 0
        self.longest_s = 0.0  # The longest wait of a decode call for the head of its answer.

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        first = self._first(request)
        if request.method != b"POST" or first is None:  # It goes to a decode engine as it is.
            self._call(self._next, request, b"decode", None, _Phase(lambda _: None, reply))
            return
        values = json.loads(request.body)
        self._number += 1
        request_id = request.header(b"x-request-id") or b"request-%d" % self._number

        def prefilled(phase: _Phase) -> None:
            if phase.status != 200:
                reply.send(phase.status or 502, _JSON, phase.body or phase.error.encode())
                return
            kv = json.loads(phase.body)["kv_transfer_params"]
            kv |= {"do_remote_decode": False, "do_remote_prefill": True}
            more = values | {"kv_transfer_params": kv}
            self._call(self._next, request, b"decode", more, decode, request_id=request_id)

        def decoded(phase: _Phase) -> None:
            self.longest_s = max(self.longest_s, phase.waited_s)
            if not phase.status:
                reply.send(502, _JSON, phase.error.encode())

        decode = _Phase(decoded, reply)
        asked = {name: value for name, value in values.items() if name != "stream_options"}
        asked |= {"max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": _ASKS}
        self._call(first, request, b"prefill", asked, _Phase(prefilled), request_id=request_id)

    def _first(self, request: HttpRequest) -> Endpoint | None:
        """Return where a prompt is computed; None for where its answer is."""
        if not self._sidecar:
            return self._next
        named = request.header(b"x-prefiller-host-port")
        if named is None:
            return None
        host, _, port = named.decode().rpartition(":")
        return self._prefillers.setdefault(named, Endpoint(host, int(port)))

    def _call(
        self,
        where: Endpoint,
        request: HttpRequest,
        phase: bytes,
        values: dict[str, Any] | None,
        handler: _Phase,
        *,
        request_id: bytes = b"other",
    ) -> None:
        headers = [*_JSON, (b"epp-profile", phase), (b"x-request-id", request_id)]
        handler.began_s = time.monotonic()
        body = request.body if values is None else json.dumps(values).encode()
        where.request(request.method, request.path, headers, body, handler)


@contextmanager
def stand_in(url: str, *, sidecar: bool = False) -> Iterator[tuple[str, Coordinator]]:
    """Run the stand-in before a gateway, or a sidecar's before a rank; yield its address, and itself."""
    ready, stop = threading.Event(), threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        one = Coordinator(int(url.rpartition(":")[2]), sidecar=sidecar)
        server = Server(one, limits=ServerLimits(), refuse=_refuse)
        await server.start("127.0.0.1", 0)
        found.extend((f"http://127.0.0.1:{server.port}", one))
        ready.set()
        while not stop.is_set():  # noqa: ASYNC110 - another thread sets it.
            await asyncio.sleep(0.05)
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(_PATIENCE_S)
        yield found[0], found[1]
    finally:
        stop.set()
        thread.join()


def _refuse(rejection: Rejection, head: object, peer: str) -> tuple[Headers, bytes]:
    del head, peer
    return _JSON, json.dumps({"error": rejection.message}).encode()


@contextmanager
def real(program: Path, gateway: str, port: int) -> Iterator[str]:
    """Run llm-d's own Coordinator, for text alone; yield its address."""
    settings = {
        "log_level": 1,
        "server": {"listen_addr": f"127.0.0.1:{port}", "write_timeout": "600s"},
        "gateway": {"address": gateway, "timeout": "600s"},
        "pipeline": {
            "kv_connector": "kv-nixl",
            "ec_connector": "ec-shared-storage",
            "steps": [{"type": "prefill"}, {"type": "decode"}],
        },
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(settings, file)  # JSON is YAML.
        file.flush()
        process = subprocess.Popen([str(program), "--config", file.name])
        try:
            transport = httpx.HTTPTransport(retries=8)
            with httpx.Client(transport=transport, trust_env=False) as client:
                client.get(f"http://127.0.0.1:{port}/healthz").raise_for_status()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)


@contextmanager
def sidecars(program: Path | None, engines: dict[str, list[str]]) -> Iterator[dict[str, list[str]]]:
    """Run a sidecar before each decode rank, llm-d's own if it is there; yield the engines with these for ranks."""
    with ExitStack() as stack:
        found = []
        for url in engines["decode"]:
            if program is None:
                found.append(stack.enter_context(stand_in(url, sidecar=True))[0])
                continue
            with create_server(("127.0.0.1", 0)) as one:
                port = one.getsockname()[1]
            words = [
                *(str(program), "--secure-proxy=false", "--kv-connector=nixlv2"),
                *(f"--port={port}", f"--model-server-port={url.rpartition(':')[2]}"),
            ]
            process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, _PATIENCE_S)
            stack.callback(process.terminate)
            found.append(f"http://127.0.0.1:{port}")
        transport = httpx.HTTPTransport(retries=8)
        with httpx.Client(transport=transport, trust_env=False) as client:
            for url in found:
                client.get(f"{url}/v1/models").raise_for_status()
        yield engines | {"decode": found}


# A unit behind Envoy.


@dataclass
class Unit:
    """Emulated engines, a picker and Envoy."""

    url: str  # Envoy's.
    engines: dict[str, list[str]]
    picker: ProxyProcess

    def stats(self) -> dict[str, Any]:
        url = f"{self.engines['decode'][0]}/emulation/stats"
        found: dict[str, Any] = httpx.get(url, trust_env=False).json()
        return found

    def held(self) -> int:
        """Return the requests that the picker has books of."""
        page = httpx.get(f"http://127.0.0.1:{self.picker.admin_port}/admin/state?requests=1")
        return len(page.json()["state"]["requests"])


Before = Callable[..., Any]
"""Runs Envoy before engines and a picker; see `gateway.envoy_before`."""


@contextmanager
def picked(
    words: Sequence[str],
    flags: Sequence[str],
    pick_port: int,
    envoy_before: Before,
    *,
    mode: str = "coordinator",
    program: Path | None = None,
) -> Iterator[Unit]:
    """Run engines, picker and Envoy, and with the mode `sidecar` these; `program` is theirs, if it is there."""
    with ExitStack() as stack:
        known = engines = stack.enter_context(emulated(words))
        if mode == "sidecar":
            known = stack.enter_context(sidecars(program, engines))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = (*flags, f"--pick={mode}", f"--pick-port={pick_port}")
        picker = stack.enter_context(proxy_before(known, flags, folder))
        ports = [int(url.rpartition(":")[2]) for urls in known.values() for url in urls]
        url = stack.enter_context(envoy_before(ports, pick_port, http2=False, answers=True))
        yield Unit(url, engines, picker)


async def several(url: str, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Ask for streams of so many tokens at once; return the status and the events with text of each."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client:

        async def ask(number: int, most: int) -> tuple[int, int]:
            body = {
                "model": "emulated",
                "prompt": f"{number} a b",
                "max_tokens": most,
                "ignore_eos": True,
                "stream": True,
            }
            status, events = 0, 0
            with suppress(httpx.TransportError):  # It broke off.
                async with client.stream("POST", f"{url}/v1/completions", json=body) as got:
                    status = got.status_code
                    async for line in got.aiter_lines():
                        events += '"text"' in line
            return status, events

        return await asyncio.gather(*(ask(*one) for one in enumerate(tokens)))


def held_calls(unit: Unit, hold_s: float) -> bool:
    """Fill all slots for a while, and see that the decode calls of others wait without an error."""
    with stand_in(unit.url) as (url, coordinator):
        long = int(hold_s / _STEP_S)
        given = [long] * _SLOTS + [8] * 4
        got = asyncio.run(several(url, given))
    whole = sum(one == (200, asked) for one, asked in zip(got, given, strict=True))
    waited_s = coordinator.longest_s
    print(f"held: {whole} of {len(given)} answers whole, a decode call waited {waited_s:.1f} s")
    return whole == len(given) and waited_s > hold_s / 2


def restarted(unit: Unit, number: signal.Signals, start: Callable[[], ProxyProcess]) -> bool:
    """End the picker while streams run, ask, start another, ask; return whether all is as configured.

    Told to end, it waits for begun answers. Killed, it cuts them: with trailers sent to it Envoy breaks off.
    """
    with stand_in(unit.url) as (url, _):
        begun: list[tuple[int, int]] = []
        tokens = [200] * 8
        asking = threading.Thread(target=lambda: begun.extend(asyncio.run(several(url, tokens))))
        asking.start()
        while sum(unit.stats()["running"]) < len(tokens):
            time.sleep(0.05)
        os.kill(unit.picker.pid, number)
        meanwhile = asyncio.run(several(url, [8] * 4))
        asking.join()
        _await_end(unit.picker.pid)
        unit.picker = start()
        after = asyncio.run(_until_served(url))
        whole = sum(one == (200, 200) for one in begun)
        refused = sum(status in (500, 503) for status, _ in meanwhile)
        print(
            f"{number.name}: {whole} of {len(tokens)} begun answers whole, {refused} of 4 refused meanwhile, "
            f"{after} of 8 served by the next picker"
        )
    wanted = len(tokens) if number is signal.SIGTERM else whole
    return (whole, refused, after) == (wanted, 4, 8) and not leaks(unit)


def _await_end(pid: int) -> None:
    """Wait until a process is gone, or is its parent's to forget."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)


async def _until_served(url: str) -> int:
    """Ask until Envoy has found the picker again, then eight times; return how many were served."""
    end_s = time.monotonic() + _PATIENCE_S
    while (await several(url, [8]))[0][0] != 200 and time.monotonic() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(0.2)  # Envoy tells nobody when.
    return sum(one == (200, 8) for one in await several(url, [8] * 8))


def leaks(unit: Unit) -> bool:
    """Return whether anything is still held once nothing runs, and tell."""
    end_s = time.monotonic() + _PATIENCE_S
    while (unit.held() or not unit.stats()["idle"]) and time.monotonic() < end_s:
        time.sleep(0.2)
    stats = unit.stats()
    kept = {name: stats["leases"][name] for name in ("held", "expired", "lost")}
    print(
        f"left: {unit.held()} requests in the picker's books, {stats['misreads']} misread, KV {kept}"
    )
    return bool(unit.held() or stats["misreads"])


def idle_of(url: str, fleet: str, requests: int) -> tuple[float, int]:
    """Replay the demo's load; return the share of rank time that is idle, and the requests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "replay.json")
        words = [
            *(sys.executable, "-m", "balanceroute.proxy", "replay", "--target", url),
            *("--emulation", fleet, "--trace", str(MOONCAKE), "--skip=5000"),
            *(f"--requests={requests}", "--concurrency=192", "--lengths=hidden"),
            *("--api=completions", "--stop-at-last-arrival", "--json", str(report)),
        ]
        subprocess.run(words, check=False, stdout=subprocess.DEVNULL)
        (row,) = json.loads(report.read_text(encoding="utf-8"))["results"]
    return 100 * row["idle_fraction"], row["errors"]


def compared(requests: int, pick_port: int, envoy_before: Before) -> bool:
    """Compare the idle share behind the picker with that of `serve`."""
    with (
        emulated(_LOAD_ENGINES) as engines,
        tempfile.TemporaryDirectory() as folder,
        proxy_before(engines, _LOAD_FLAGS, Path(folder)) as proxy,
    ):
        url = f"http://127.0.0.1:{proxy.port}"
        serve, failed = idle_of(url, engines["decode"][0], requests)
    flags = (*_LOAD_FLAGS, "--scrape-interval-s=0.25")
    with (
        picked(_LOAD_ENGINES, flags, pick_port, envoy_before) as unit,
        stand_in(unit.url) as (url, _),
    ):
        pick, lost = idle_of(url, unit.engines["decode"][0], requests)
    print(f"idle: serve {serve:.1f} % ({failed} failed), pick {pick:.1f} % ({lost} failed)")
    return pick <= serve + 2.0 and not (failed or lost)
