"""What traces cost: opcodes that the proxy executes for a request, which a busy machine does not change."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.tracing.otlp import URL, Collector

from balanceroute import proxy

if TYPE_CHECKING:
    from tests.live.conftest import Play, Site

PACKAGE = str(Path(proxy.__file__).parent) + "/"
# The share that is the proxy's: the client and the engines of the test use the same wire.
PROXY = {"live": 1.0, "core": 1.0, "wire": 0.5}
# What there is for traces alone.
OF_TRACES = ("live/tracing/", "live/request/session_trace.py", "live/telemetry/stages.py")
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 1, "ignore_eos": True}
REQUESTS = 32


@contextmanager
def counted(opcodes: "Counter[str]") -> Iterator[None]:
    """Count the opcodes that are executed in each file of the proxy meanwhile."""

    def count(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "opcode":
            opcodes[frame.f_code.co_filename.removeprefix(PACKAGE)] += 1
        return count

    folders = tuple(f"{PACKAGE}{name}/" for name in PROXY)

    def enter(frame: FrameType, _event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(folders):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return count

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def opcodes_of(play: "Play", *, traced: bool, stream: bool) -> "Counter[str]":
    """Return the opcodes of some requests, by file."""
    opcodes = Counter[str]()

    async def scenario(site: "Site") -> None:
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
def test_a_trace_is_a_small_part_of_the_shortest_request(play: "Play", stream: bool) -> None:
    off = opcodes_of(play, traced=False, stream=stream)
    on = opcodes_of(play, traced=True, stream=stream)
    whole = sum(count * PROXY[name.partition("/")[0]] for name, count in off.items())
    assert (on - off).total() < 0.05 * whole
    # Off, nothing of it is executed.
    assert not [name for name in off if name.startswith(OF_TRACES)]


def test_without_traces_nothing_that_exports_them_is_imported() -> None:
    program = "import sys; from balanceroute.proxy.live import serve; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert b"balanceroute.proxy.live.serve" in found.stdout
    assert b"balanceroute.proxy.live.tracing.exporter" not in found.stdout
    assert b"balanceroute.proxy.live.tracing.spans" not in found.stdout
