"""What each tenant and class asked for and got in a simulated run; see `service_levels`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.service_levels import (
    ByGroup,
    Group,
    Outcome,
    Service,
    Targets,
    figures_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from balanceroute.traces import TraceRequest

# How often the sums are kept, for shares over time.
_SAMPLE_NS = 1_000_000_000


class Sample(NamedTuple):
    """Sums since the start, of each group: finished requests, tokens, KV-token-nanoseconds."""

    time_ns: int
    requests: "NDArray[np.int64]"
    tokens: "NDArray[np.int64]"
    kv_token_ns: "NDArray[np.float64]"


@dataclass(slots=True)
class _Times:
    group: int
    arrived_ns: int
    first_ns: int | None = None
    ended_ns: int | None = None
    refused: bool = False


class ServiceLog:
    """The account of one run.

    Args:
        requests: Those of the run; a request's id is its place.

    Attributes:
        groups: The tenants and classes, in order.
        samples: The sums, about once a second.
        limits: Times and the limit on requests in flight from then on.
    """

    def __init__(self, requests: "Sequence[TraceRequest]") -> None:
        self.groups = groups_of(requests)
        numbers = {group: number for number, group in enumerate(self.groups)}
        self._requests = requests
        self._group = [numbers[_group(request)] for request in requests]
        size = len(self.groups)
        self._loads = np.zeros(size, np.int64)
        self._running = np.zeros(size, np.int64)
        self._finished = np.zeros(size, np.int64)
        self._tokens = np.zeros(size, np.int64)
        self._kv_token_ns = np.zeros(size)
        self._times: dict[RequestId, _Times] = {}
        self._opened: Sample | None = None
        self._closed: Sample | None = None
        self.samples: list[Sample] = []
        self.limits: list[tuple[int, int]] = []

    def arrived(self, request: RequestId, now_ns: int) -> None:
        """Note an arrival."""
        self._times[request] = _Times(self._group[request], now_ns)

    def refused(self, request: RequestId) -> None:
        """Note that a request that arrived is not let in."""
        self._times[request].refused = True

    def joined(self, request: RequestId, kv_tokens: int) -> None:
        """Note that a request joined a batch."""
        group = self._group[request]
        self._loads[group] += kv_tokens
        self._tokens[group] += kv_tokens
        self._running[group] += 1

    def step(self, now_ns: int, duration_ns: int, emissions: Mapping[RequestId, int]) -> None:
        """Note that a step begins, and what it emits; nothing stands for a token of each request."""
        if not self.samples or now_ns - self.samples[-1].time_ns >= _SAMPLE_NS:
            self.samples.append(self._sample(now_ns))
        emitted = self._running
        if emissions:
            emitted = np.zeros_like(self._running)
            for request, tokens in emissions.items():
                emitted[self._group[request]] += tokens
        self._kv_token_ns += self._loads * float(duration_ns)
        self._tokens += emitted
        self._loads += emitted

    def first_token(self, request: RequestId, now_ns: int) -> None:
        """Note the first token of a request."""
        self._times[request].first_ns = now_ns

    def first_tokens(self, group: int) -> "tuple[NDArray[np.float64], NDArray[np.float64]]":
        """Return when a group's first tokens came, and how long each took, in seconds."""
        times = [
            (times.first_ns, times.first_ns - times.arrived_ns)
            for times in self._times.values()
            if times.group == group and times.first_ns is not None
        ]
        came, took = np.array(times, np.float64).reshape(-1, 2).T / 1e9
        return came, took

    def limit(self, requests: int, now_ns: int) -> None:
        """Note the limit on requests in flight."""
        if not self.limits or self.limits[-1][1] != requests:
            self.limits.append((now_ns, requests))

    def left(self, request: RequestId, kv_tokens: int) -> None:
        """Note that a request left its batch."""
        group = self._group[request]
        self._loads[group] -= kv_tokens
        self._running[group] -= 1

    def finish(self, request: RequestId, now_ns: int) -> None:
        """Note that a request emitted its last token."""
        traced = self._requests[request]
        self.left(request, traced.prompt_tokens + traced.output_tokens)
        self._finished[self._group[request]] += 1
        self._times[request].ended_ns = now_ns

    def open(self, now_ns: int) -> None:
        """Begin the measured time."""
        self._opened = self._sample(now_ns)

    def close(self, now_ns: int) -> None:
        """End the measured time."""
        self._closed = self._sample(now_ns)

    def figures(self, targets: Targets) -> ByGroup:
        """Return the figures of the measured time; nothing if there was none."""
        opened, closed = self._opened, self._closed
        if opened is None or closed is None:
            return {}
        outcomes = [
            self._outcome(request, times)
            for request, times in self._times.items()
            if opened.time_ns <= times.arrived_ns <= closed.time_ns
        ]
        return figures_of(outcomes, self._service(opened, closed), targets)

    def _outcome(self, request: RequestId, times: _Times) -> Outcome:
        ttft_s = tpot_s = None
        if times.first_ns is not None:
            ttft_s = (times.first_ns - times.arrived_ns) / 1e9
            gaps = self._requests[request].output_tokens - 1
            if times.ended_ns is not None and gaps:
                tpot_s = (times.ended_ns - times.first_ns) / gaps / 1e9
        finished = times.ended_ns is not None
        return Outcome(self.groups[times.group], finished, times.refused, ttft_s, tpot_s)

    def _service(self, opened: Sample, closed: Sample) -> dict[Group, Service]:
        return {
            group: Service(
                float(closed.requests[number] - opened.requests[number]),
                float(closed.tokens[number] - opened.tokens[number]),
                float(closed.kv_token_ns[number] - opened.kv_token_ns[number]) / 1e9,
            )
            for number, group in enumerate(self.groups)
        }

    def _sample(self, now_ns: int) -> Sample:
        return Sample(now_ns, self._finished.copy(), self._tokens.copy(), self._kv_token_ns.copy())


def groups_of(requests: "Sequence[TraceRequest]") -> list[Group]:
    """Return the tenants and classes of a workload, in order."""
    return sorted(set(map(_group, requests)))


def _group(request: "TraceRequest") -> Group:
    return Group(request.tenant, request.level)
