"""Traces in a run: a collector that does not always take them, and whether each request has one."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from balanceroute.proxy.live.telemetry.component_metrics import DROPS
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import HttpRequest, Reply

_PORT = 4318
FLAGS = {"otlp_traces_endpoint": f"http://127.0.0.1:{_PORT}/v1/traces"}
"""Of a proxy that sends its traces there."""
_SHARE = 0.3
_STATUSES = (200, 200, 200, 200, 503, 429, 400)
_SERVER = 2


def draw_collector(seed: int) -> tuple[int, ...]:
    """Return what the collector of a run answers, over and over; empty if nothing is traced."""
    rng = random.Random(f"traces {seed}")
    return tuple(rng.choices(_STATUSES, k=7)) if rng.random() < _SHARE else ()


class SpanCollector:
    """Takes spans while it runs."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self._statuses = statuses
        self._willing_s = 0.0
        self._exports = 0
        self._server = Server(self._answer)
        self.spans: list[dict[str, Any]] = []  # Those that it took.

    async def start(self, *, refuses_s: float = 0.0) -> None:
        """Listen, and take everything after so many seconds."""
        self._willing_s = asyncio.get_running_loop().time() + refuses_s
        await self._server.start("127.0.0.1", _PORT)

    async def close(self) -> None:
        self._server.close()
        await self._server.drain()

    def _answer(self, request: HttpRequest, reply: Reply) -> None:
        willing = asyncio.get_running_loop().time() >= self._willing_s
        status = 200 if willing else self._statuses[self._exports % len(self._statuses)]
        self._exports += 1
        if status == 200:
            (resource,) = json.loads(request.body)["resourceSpans"]
            (scope,) = resource["scopeSpans"]
            self.spans += scope["spans"]
        reply.send(status, [(b"content-type", b"application/json")], b"{}")

    def audit(self, ended: Sequence[RequestRecord], page: bytes) -> list[str]:
        """Return what is wrong with what it got.

        Args:
            ended: All requests that ended.
            page: The proxy's metrics at its end.
        """
        traced = {record.trace.span_id: record for record in ended if record.trace is not None}
        roots = {span["spanId"]: span for span in self.spans if span["kind"] == _SERVER}
        times = Counter(span["spanId"] for span in self.spans)
        found = [f"traces: span {name} was sent {n} times" for name, n in times.items() if n > 1]
        found += [f"traces: no request has span {name}" for name in roots.keys() - traced.keys()]
        for span in self.spans:
            if span["kind"] != _SERVER:
                found += _misplaced(span, roots.get(span["parentSpanId"]))
        dropped = sum(_dropped(page, reason) for reason in DROPS)
        if len(roots) + dropped != len(traced):
            found.append(
                f"traces: {len(traced)} ended, {len(roots)} came and {dropped} were dropped"
            )
        return found


def _misplaced(span: dict[str, Any], root: dict[str, Any] | None) -> list[str]:
    """Return whether a stage is outside of its request."""
    name = f"{span['name']} {span['spanId']}"
    if root is None:
        return [f"traces: {name} has no parent"]
    if root["traceId"] != span["traceId"]:
        return [f"traces: {name} is of another trace than its parent"]
    times = [one["startTimeUnixNano"] for one in (root, span)]
    times += [one["endTimeUnixNano"] for one in (span, root)]
    return [] if times == sorted(times) else [f"traces: {name} is not within its parent: {times}"]


def _dropped(page: bytes, reason: str) -> int:
    label = f'balanceroute_traces_dropped_total{{reason="{reason}"}} '.encode()
    return sum(
        int(float(line[len(label) :])) for line in page.splitlines() if line.startswith(label)
    )
