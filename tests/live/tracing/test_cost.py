"""What traces cost: opcodes that the proxy executes for a request, which a busy machine does not change."""

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from tests.live.opcodes import counted, share
from tests.live.tracing.otlp import URL, Collector
from tests.support.site import Site, play

# What there is for traces alone.
OF_TRACES = ("live/tracing/", "live/request/session_trace.py", "live/telemetry/stages.py")
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 1, "ignore_eos": True}
REQUESTS = 32


def opcodes_of(*, traced: bool, stream: bool) -> "Counter[str]":
    """Return the opcodes of some requests, by file."""
    opcodes = Counter[str]()

    async def scenario(site: Site) -> None:
        collector = Collector()
        await collector.start()
        await site.post("/v1/completions", BODY | {"stream": stream})  # What is made once.
        with counted(opcodes):
            for _ in range(REQUESTS):
                await site.post("/v1/completions", BODY | {"stream": stream})
        await collector.close()

    play(scenario, flags={"otlp_traces_endpoint": URL} if traced else {})
    return opcodes


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_is_a_small_part_of_the_shortest_request(stream: bool) -> None:
    off = opcodes_of(traced=False, stream=stream)
    on = opcodes_of(traced=True, stream=stream)
    assert (on - off).total() < 0.06 * share(off)  # It is 4.7 % (Python 3.11) to 5.1 % (3.13).
    # Off, nothing of it is executed.
    assert not [name for name in off if name.startswith(OF_TRACES)]


def test_without_traces_nothing_that_exports_them_is_imported() -> None:
    program = "import sys; from balanceroute.proxy.live import serve; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert b"balanceroute.proxy.live.serve" in found.stdout
    assert b"balanceroute.proxy.live.tracing.exporter" not in found.stdout
    assert b"balanceroute.proxy.live.tracing.exporter" not in found.stdout
