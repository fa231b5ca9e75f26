"""Traces on their way to a collector: OTLP over HTTP, as JSON (https://opentelemetry.io/docs/specs/otlp/).

A request's spans are made when it has ended, and wait here until a few seconds have passed or many wait.
So many may wait; what comes beyond that is dropped and counted, so a collector that is slow or gone
costs some memory and nothing else.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from gzip import compress
from typing import TYPE_CHECKING

import msgspec

from balanceroute import __version__
from balanceroute.proxy.live.tracing.spans import resource_of, spans_of
from balanceroute.proxy.wire.http1.fetch import fetch
from balanceroute.proxy.wire.messages import Headers, Response, WireError

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import Log, RequestRecord
    from balanceroute.proxy.live.telemetry.trace_metrics import TraceMetrics
    from balanceroute.proxy.live.tracing.export_settings import ExportSettings
    from balanceroute.proxy.wire.http1.client import Endpoint

MOST_WAITING = 4096
"""Requests whose spans wait; one takes 2 to 4 kB."""

BATCH = 256
"""Requests whose spans are sent at once, at most."""

DELAY_S = 2.0
"""How long spans wait for others."""

_log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_ANSWER_BYTES = 65_536
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_MOST_BACKOFF_S = 60.0
# What the specification says may be sent again.
_RETRYABLE = frozenset({429, 502, 503, 504})
_COMPLAINT_S = 60.0

InThread = Callable[[Callable[[], None]], Awaitable[None]]


class SpanExporter:
    """Sends spans to one collector. `run` it, and `close` it when no more come.

    Args:
        settings: Where and how.
        endpoint: The collector.
        metrics: Told of what was exported and dropped.
        in_thread: Runs what takes long.
        rng: Spreads attempts that are repeated.
    """

    def __init__(
        self,
        settings: "ExportSettings",
        endpoint: "Endpoint",
        metrics: "TraceMetrics",
        *,
        in_thread: InThread,
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._metrics = metrics
        self._in_thread = in_thread
        self._rng = rng
        self._target = settings.path.encode()
        self._headers: Headers = [
            (b"content-type", b"application/json"),
            (b"user-agent", f"balanceroute/{__version__}".encode()),
            *((name.lower().encode(), secret.value) for name, secret in settings.headers),
        ]
        if settings.gzip:
            self._headers.append((b"content-encoding", b"gzip"))
        scope = msgspec.json.encode({"name": "balanceroute", "version": __version__})
        resource = resource_of(dict(settings.resource))
        self._before = (
            b'{"resourceSpans":[{"resource":' + resource + b',"scopeSpans":[{"scope":' + scope
        ) + b',"spans":['
        self._waiting: deque[str] = deque()
        self._batch: list[str] = []
        self._some, self._many = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._complained_s = -_COMPLAINT_S

    def take(self, record: "RequestRecord") -> None:
        """Take the spans of a traced request that has ended; never waits."""
        if len(self._waiting) >= MOST_WAITING:
            self._drop(1, "queue_full", "they come faster than they are taken")
            return
        self._waiting.append(spans_of(record))
        self._some.set()
        if len(self._waiting) >= BATCH:
            self._many.set()

    def behind(self, log: "Log") -> "Log":
        """Return a log in front of another, that has the spans of traced requests exported."""
        return _TracedLog(log, self)

    async def run(self) -> None:
        """Export for ever."""
        while True:
            await self._some.wait()
            try:
                async with asyncio.timeout(DELAY_S):
                    await self._many.wait()
            except TimeoutError:
                pass
            while self._fill():
                await self._export()
                if len(self._waiting) < BATCH:
                    break

    async def close(self) -> None:
        """Export what waits, if the collector takes it at once, and close the connection."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                while self._fill() and await self._attempt() is None:
                    pass
        except TimeoutError:
            pass
        left = len(self._batch) + len(self._waiting)
        self._batch, self._waiting = [], deque()
        self._drop(left, "closed", "the proxy ends")
        self._endpoint.close()

    def _fill(self) -> bool:
        """Have something to send, which may be what was not sent yet; return whether there is any."""
        if not self._batch:
            count = min(BATCH, len(self._waiting))
            self._batch = [self._waiting.popleft() for _ in range(count)]
        if not self._waiting:
            self._some.clear()
        if len(self._waiting) < BATCH:
            self._many.clear()
        return bool(self._batch)

    async def _export(self) -> None:
        """Send what is to be sent, again if that may help."""
        for backoff_s in _BACKOFF_S:
            asked_s = await self._attempt()
            if asked_s is None:
                return
            spread_s = backoff_s * self._rng.uniform(0.5, 1.0)
            await asyncio.sleep(min(max(asked_s, spread_s), _MOST_BACKOFF_S))
        self._lose("unreachable", "the collector does not take them")

    async def _attempt(self) -> float | None:
        """Send it once; return how long to wait at least before another attempt, None for no other."""
        body = b"".join((self._before, ",".join(self._batch).encode(), b"]}]}]}"))
        if self._settings.gzip:
            packed: list[bytes] = []
            await self._in_thread(lambda: packed.append(compress(body, 1)))
            body = packed[0]
        try:
            response = await fetch(
                self._endpoint,
                b"POST",
                self._target,
                self._headers,
                body,
                timeout_s=self._settings.timeout_s,
                max_bytes=_ANSWER_BYTES,
                cut=True,
            )
        except WireError as error:
            self._complain(str(error))
            return 0.0
        if response.status in _RETRYABLE:
            self._complain(f"status {response.status}")
            return _retry_after_s(response)
        if response.status >= 300:
            self._lose("refused", f"status {response.status}")
            return None
        count, self._batch = len(self._batch), []
        self._metrics.exported(count)
        self._take_answer(response)
        return None

    def _take_answer(self, response: Response) -> None:
        """Log what the collector says that it did not take: spans, not whole traces."""
        try:
            partial_success = msgspec.json.decode(response.body)["partialSuccess"]
            rejected = int(partial_success.get("rejectedSpans", 0))
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return  # There is none.
        if rejected:
            reason = str(partial_success.get("errorMessage", ""))[:200]
            self._complain(f"it rejected {rejected} spans: {reason}")

    def _lose(self, what: str, reason: str) -> None:
        count, self._batch = len(self._batch), []
        self._drop(count, what, reason)

    def _drop(self, count: int, what: str, reason: str) -> None:
        if count:
            self._metrics.dropped(count, what)
            self._complain(reason)

    def _complain(self, reason: str) -> None:
        """Log, at most once a minute, that the collector does not take spans."""
        now_s = self._loop.time()
        if now_s >= self._complained_s + _COMPLAINT_S:
            self._complained_s = now_s
            fields = {"collector": self._endpoint.name, "reason": reason}
            _log.warning("traces are not exported", extra={"fields": fields})


class _TracedLog:
    def __init__(self, log: "Log", exporter: SpanExporter) -> None:
        self._log = log
        self._exporter = exporter

    def request_ended(self, record: "RequestRecord") -> None:
        self._log.request_ended(record)
        if record.trace is not None:
            self._exporter.take(record)


def _retry_after_s(response: Response) -> float:
    value = response.header(b"retry-after") or b""
    return float(value) if value.isdigit() else 0.0
