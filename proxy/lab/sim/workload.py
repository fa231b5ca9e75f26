"""The workload of a simulated run: a segment of a trace, in open or closed loop, or saturated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.traces import TraceRequest

# With fewer requests a run has no meaningful steady state.
MIN_SEGMENT_REQUESTS = 20
# Keeps scaled times finite.
MAX_RATE = 1e6


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and how they arrive."""

    requests: Sequence[TraceRequest]  # In order of arrival, each with at least one output token.
    history: Sequence[TraceRequest]  # The requests before this segment, for predictors.
    rate: float = 1.0  # Open loop: the trace's times divided by this.
    # Saturated: the number of requests that always wait for decode; None if not.
    backlog: int | None = None
    # Closed loop: the number of requests that are always in flight, as with a load generator; None
    # if not. Without either the loop is open.
    concurrency: int | None = None

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive at the trace's times."""
        return self.backlog is None and self.concurrency is None

    def arrivals_ns(self) -> list[int]:
        """Return the open-loop arrival times, the first at 0."""
        start = self.requests[0].arrival_ns
        return [round((request.arrival_ns - start) / self.rate) for request in self.requests]


def playable(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the requests that reach decode: those with output, prompts of at least one token.

    A request without output failed when it was recorded. Public traces have a few empty prompts,
    which count as one token: an engine must have something to prefill.
    """
    return [
        request if request.prompt_tokens else replace(request, prompt_tokens=1)
        for request in requests
        if request.output_tokens
    ]


def scaled(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Multiply every output, and the limit on it, by a factor; each is at least one token."""

    def times(tokens: int) -> int:
        return max(1, round(factor * tokens))

    return [
        replace(
            request,
            output_tokens=times(request.output_tokens),
            max_tokens=None if request.max_tokens is None else times(request.max_tokens),
        )
        for request in requests
    ]


def split(
    requests: Sequence[TraceRequest],
    *,
    segments: int,
    rate: float | None = None,
    backlog: int | None = None,
    concurrency: int | None = None,
    known: int = 0,
) -> list[Workload]:
    """Cut a trace into `segments` consecutive parts of equal size, in order of time.

    `requests` must be playable. The first `known` are not replayed; they only train predictors. An
    incomplete segment at the end is dropped.

    Raises:
        ConfigError: A setting is out of range, not exactly one of `rate`, `backlog` and
            `concurrency` is given, or the trace is too short.
    """
    if sum(pace is not None for pace in (rate, backlog, concurrency)) != 1:
        raise ConfigError("give one of a rate, a backlog and a concurrency")
    if rate is not None and not 1 / MAX_RATE <= rate <= MAX_RATE:
        raise ConfigError(f"rate is {rate}, must be from {1 / MAX_RATE:g} to {MAX_RATE:g}")
    for name, pace in (("backlog", backlog), ("concurrency", concurrency)):
        if pace is not None and pace < 1:
            raise ConfigError(f"{name} is {pace}, must be at least 1")
    if segments < 1:
        raise ConfigError(f"segments is {segments}, must be at least 1")
    size = max(0, len(requests) - known) // segments
    if size < MIN_SEGMENT_REQUESTS:
        raise ConfigError(
            f"{max(0, len(requests) - known)} requests with output make segments of {size}, "
            f"a segment needs at least {MIN_SEGMENT_REQUESTS}"
        )
    bounds = range(known, known + (segments + 1) * size, size)
    return [
        Workload(requests[begin:end], requests[:begin], rate or 1.0, backlog, concurrency)
        for begin, end in pairwise(bounds)
    ]
