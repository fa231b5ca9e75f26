"""Trace replay over HTTP: sends the requests of a trace, open or closed loop, and measures.

Open loop: every request is sent at its recorded time, whatever the answers do. Closed loop: a
request is sent whenever one ends, so that the same number is always outstanding.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.lab.replay.exchange import (
    ReplayExchange,
    ReplayTarget,
    TargetError,
    call_json,
    first_model,
    parse_target,
)
from balanceroute.proxy.lab.replay.figures import (
    STEADY_STATE,
    UNREAD_FLEET,
    FaultCount,
    ReplayFault,
    ReplayFigures,
    ReplayRecorder,
    RequestSample,
    count_faults,
    group_figures,
    shown,
)
from balanceroute.proxy.lab.replay.requests import (
    PlannedRequest,
    PromptBuilder,
    ReplayBodies,
    ReplayLengths,
    ReplaySettings,
    check,
    due_s,
    headers_of,
)
from balanceroute.proxy.lab.service_levels import ByGroup
from balanceroute.proxy.wire.messages import Caller, Headers

# An emulated fleet's own figures, which only the ranks know, such as idle time at the barrier.

# Per call: half a megabyte.
LENGTHS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The figures of the decode ranks over a stretch of time."""

    mean_imbalance_tokens: float  # max − min of the ranks' loads, mean over steps.
    idle_fraction: float  # The share of rank time spent waiting at the barrier.
    # Output tokens over the emulated time of the steps. A machine that cannot keep up makes the
    # client's rate smaller, but not this one.
    tokens_per_s: float
    steps: float  # Decode steps.
    mean_late_s: float  # How much later than due a step ended, mean over steps, in real seconds.
    late_s: float  # The maximum of that.


class FleetClient:
    """Resets and reads the figures of an emulated fleet, at the URL of any of its servers; sends it lengths.

    Raises:
        ConfigError: The URL is malformed.
    """

    def __init__(self, url: str) -> None:
        self._target = parse_target("--emulation", url)
        self._endpoint = self._target.connect()

    async def reset(self) -> None:
        """Start a new time span.

        Raises:
            TargetError: The server has no such figures.
            WireError: There is no answer.
        """
        await call_json(self._endpoint, self._target, "POST", "/emulation/stats/reset", [])

    async def send_lengths(self, lengths: Mapping[str, int]) -> None:
        """Send how many tokens the answers have, by the requests' ids.

        Raises:
            TargetError: The server is not of an emulated fleet that takes lengths.
            WireError: There is no answer.
        """
        names = list(lengths)
        for start in range(0, len(names), LENGTHS_AT_ONCE):
            some = {name: lengths[name] for name in names[start : start + LENGTHS_AT_ONCE]}
            body = json.dumps(some).encode()
            await call_json(
                self._endpoint, self._target, "POST", "/emulation/lengths", [], body=body
            )

    async def read(self) -> FleetFigures:
        """Return the figures since the last reset.

        Raises:
            TargetError: The server has no such figures.
            WireError: There is no answer.
        """
        answer = await call_json(self._endpoint, self._target, "GET", "/emulation/stats", [])
        values: dict[str, float] = {}
        for one in fields(FleetFigures):
            value = answer.get(one.name) if isinstance(answer, dict) else None
            if not isinstance(value, int | float) or not isfinite(value):
                url = f"{self._target.url}/emulation/stats"
                raise TargetError(f"GET {url}: no number {one.name} in the answer")
            values[one.name] = value
        return FleetFigures(**values)

    def close(self) -> None:
        self._endpoint.close()


_PROGRESS_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    total: int  # Requests of the run.
    ended: int  # Those that have finished, failed or been cancelled.
    running: int  # Those sent and not ended.
    errors: int
    token_events: int  # Token events so far.
    elapsed_s: float  # Seconds of the target's time since the replay began.


@dataclass(frozen=True, slots=True)
class ReplayResult:
    model: str
    figures: ReplayFigures
    # The emulated fleet's own figures of the same window; None if there are none.
    fleet: FleetFigures | None
    faults: Sequence[FaultCount]  # The kinds of failure, the most frequent first.
    # The record of each sent request, in order, in times of the clock.
    samples: Sequence[RequestSample]
    start_ns: int  # The clock when the replay began.
    interrupted: bool  # Whether it was stopped before its end.
    # The figures of each tenant and class; empty if not asked for.
    groups: ByGroup = field(default_factory=dict)


async def replay(
    settings: ReplaySettings,
    requests: Sequence[PlannedRequest],
    *,
    progress: Callable[[ReplayProgress], None] | None = None,
    stop: asyncio.Event | None = None,
    clock_ns: Callable[[], int] | None = None,
) -> ReplayResult:
    """Replay requests until all have ended, or been sent; their failures are in the result.

    Args:
        requests: In order of arrival, at least one.
        progress: Called a few times a second, and at the end.
        stop: Once set, nothing more is sent and running requests are cancelled.
        clock_ns: The clock of the measurements, as the loop's own may be coarse (uvloop's has
            milliseconds, and stands still while callbacks run). None for the loop's own.

    Raises:
        ConfigError: A URL is malformed, or the headers of a request cannot be written.
        TargetError: The target names no model, or the emulated fleet has no figures.
        WireError: The target or the fleet does not answer at the start.
    """
    assert requests, "nothing to replay"
    assert settings.emulation is not None or settings.lengths is not ReplayLengths.HIDDEN
    target = parse_target("--target", settings.target)
    check(requests, settings.tenant_keys)
    fleet_client = None if settings.emulation is None else FleetClient(settings.emulation)
    headers: Headers = []
    if settings.api_key is not None:
        headers.append((b"authorization", b"Bearer " + settings.api_key.encode()))
    with closing(target.connect(http3=settings.http3)) as endpoint:
        try:
            if fleet_client is not None:
                await fleet_client.reset()
                if settings.lengths is ReplayLengths.HIDDEN:
                    await fleet_client.send_lengths(
                        {
                            request.name(settings.request_ids): request.output_tokens
                            for request in requests
                        }
                    )
            model = settings.model or await first_model(endpoint, target, headers)
            run = _Run(
                settings,
                requests,
                target=target,
                endpoint=endpoint,
                headers=headers,
                model=model,
                clock_ns=clock_ns,
            )
            return await run.complete(fleet_client, progress, stop or asyncio.Event())
        finally:
            if fleet_client is not None:
                fleet_client.close()


class _Run:
    def __init__(
        self,
        settings: ReplaySettings,
        requests: Sequence[PlannedRequest],
        *,
        target: ReplayTarget,
        endpoint: Caller,
        headers: Headers,
        model: str,
        clock_ns: Callable[[], int] | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._settings = settings
        self._requests = requests
        self._endpoint = endpoint
        self._path = target.path(settings.api.path)
        self._headers = [
            *headers,
            (b"content-type", b"application/json"),
            (b"accept", b"text/event-stream"),
        ]
        self._model = model
        self._loop = loop
        self._recorder = ReplayRecorder(len(requests))
        self._bodies = ReplayBodies(
            requests,
            PromptBuilder(settings.seed),
            api=settings.api,
            model=model,
            lengths=settings.lengths,
            request_ids=settings.request_ids,
            loop=loop,
        )
        self._running: dict[int, ReplayExchange] = {}
        self._clock_ns = clock_ns or (lambda: round(1e9 * loop.time()))
        self._start_s, self._start_ns = loop.time(), self._clock_ns()
        # Since the start.
        self._due_s = due_s(requests, speed=settings.rate * settings.time_scale)
        self._arrival: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = loop.create_future()
        # Its result is whether the window ever opened.
        self._opened: asyncio.Future[bool] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()

    async def complete(
        self,
        fleet_client: FleetClient | None,
        progress: Callable[[ReplayProgress], None] | None,
        stop: asyncio.Event,
    ) -> ReplayResult:
        """Send everything and wait for its end, or for `stop`."""
        fleet = asyncio.ensure_future(self._watch_fleet(fleet_client))
        stopping = asyncio.ensure_future(stop.wait())
        reporting = asyncio.ensure_future(self._report(progress))
        try:
            self._begin()
            ends: tuple[asyncio.Future[Any], ...] = (self._over, stopping)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            interrupted = not self._over.done()
            self._end()
            fleet_figures, fleet_faults = await fleet
        finally:
            self._end()
            tasks = (fleet, stopping, reporting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if progress is not None:
            progress(self._progress())
        figures = self._recorder.figures(time_scale=self._settings.time_scale)
        if self._opened.result() != (figures.window == STEADY_STATE):
            fleet_figures = None  # Of another stretch of time.
        samples = self._recorder.samples
        faults = [sample.fault for sample in samples if sample.fault is not None]
        return ReplayResult(
            model=self._model,
            figures=figures,
            fleet=fleet_figures,
            faults=count_faults([*faults, *fleet_faults]),
            samples=samples,
            start_ns=self._start_ns,
            interrupted=interrupted,
            groups=self._groups(figures.window),
        )

    def _groups(self, window: str) -> ByGroup:
        settings = self._settings
        if settings.targets is None:
            return {}
        span_ns = self._recorder.span_ns(steady=window == STEADY_STATE)
        samples, scale = self._recorder.samples, settings.time_scale
        return group_figures(samples, span_ns, settings.targets, time_scale=scale)

    def _begin(self) -> None:
        if self._settings.concurrency is None:
            self._send_due()
        else:
            for _ in range(min(self._settings.concurrency, len(self._requests))):
                self._send(self._clock_ns())

    def _end(self) -> None:
        """Send nothing more and cancel running requests. Idempotent."""
        if self._arrival is not None:
            self._arrival.cancel()
        self._bodies.close()
        self._recorder.close(self._clock_ns())
        for exchange in self._running.values():
            exchange.cancel()
        self._running.clear()
        self._note_window()
        for edge in (self._over, self._closed):
            if not edge.done():
                edge.set_result(None)
        if not self._opened.done():
            self._opened.set_result(False)

    def _send_due(self) -> None:
        now_s = self._loop.time()
        while not self._all_sent:
            due_s = self._due_s[len(self._recorder.samples)]
            # The same sum as the timer's: a difference may round to a time before the timer's.
            if self._start_s + due_s > now_s:
                self._arrival = self._loop.call_at(self._start_s + due_s, self._send_due)
                return
            self._send(self._start_ns + round(1e9 * due_s))

    @property
    def _all_sent(self) -> bool:
        return len(self._recorder.samples) == len(self._requests)

    def _send(self, due_ns: int) -> None:
        place = len(self._recorder.samples)
        request = self._requests[place]
        body = self._bodies.take()
        sample = self._recorder.sent(request, due_ns, self._clock_ns())
        exchange = ReplayExchange(
            sample,
            self._recorder,
            self._loop,
            clock_ns=self._clock_ns,
            on_over=lambda: self._ended(place),
        )
        exchange.start(
            self._endpoint,
            self._path,
            self._headers_of(request),
            body,
            timeout_s=self._settings.timeout_s / self._settings.time_scale,
        )
        self._running[place] = exchange
        self._note_window()
        if self._all_sent and not self._settings.drain:
            self._over.set_result(None)

    def _headers_of(self, request: PlannedRequest) -> Headers:
        settings = self._settings
        return [
            *self._headers,
            *headers_of(request, settings.tenant_keys, time_scale=settings.time_scale),
            (b"x-request-id", request.name(settings.request_ids).encode()),
        ]

    def _ended(self, place: int) -> None:
        del self._running[place]
        self._note_window()
        if self._recorder.ended == len(self._requests):
            if not self._over.done():
                self._over.set_result(None)
        elif self._settings.concurrency is not None and not self._all_sent:
            self._send(self._clock_ns())

    def _note_window(self) -> None:
        """Set the futures of the window's edges once they are known."""
        if self._recorder.opened is None:
            return
        if not self._opened.done():
            self._opened.set_result(True)
        if self._recorder.closed is not None and not self._closed.done():
            self._closed.set_result(None)

    async def _watch_fleet(
        self, fleet_client: FleetClient | None
    ) -> tuple[FleetFigures | None, Sequence[ReplayFault]]:
        """Return the emulated fleet's figures of the window, or of the whole run without one."""
        if fleet_client is None:
            return None, ()
        try:
            if await self._opened:
                await fleet_client.reset()
            await self._closed
            return await fleet_client.read(), ()
        except BalanceRouteError as error:
            return None, (ReplayFault(UNREAD_FLEET, shown(str(error))),)

    async def _report(self, progress: Callable[[ReplayProgress], None] | None) -> None:
        while progress is not None:
            progress(self._progress())
            await asyncio.sleep(_PROGRESS_INTERVAL_S)

    def _progress(self) -> ReplayProgress:
        recorder = self._recorder
        return ReplayProgress(
            total=len(self._requests),
            ended=recorder.ended,
            running=recorder.running,
            errors=recorder.errors,
            token_events=recorder.events,
            elapsed_s=(self._loop.time() - self._start_s) * self._settings.time_scale,
        )
