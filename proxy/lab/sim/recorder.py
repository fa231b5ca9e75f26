"""The measurements of a run, inside its steady-state window.

The window opens when a tenth of the requests have ended (the fleet is then full of requests of
all ages) and closes when the last request has arrived (from then on the backlog drains). Steps,
waits of requests that join a batch, and requests that finish are counted only inside it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.core.subset import idle_tokens, imbalance_tokens
from balanceroute.proxy.lab.service_levels import (
    ByGroup,
    GivenService,
    ServiceGroup,
    ServiceOutcome,
    ServiceTargets,
    figures_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from balanceroute.traces import TraceRequest


# The demand and the service of each tenant and class in a simulated run; see `service_levels`.

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
    """The account of one run, in which a request's id is its place."""

    def __init__(self, requests: "Sequence[TraceRequest]") -> None:
        self.groups = groups_of(requests)  # The tenants and classes, in order.
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
        self.samples: list[Sample] = []  # The sums, about once a second.
        # Times and the limit on requests in flight from then on.
        self.limits: list[tuple[int, int]] = []

    def arrived(self, request: RequestId, now_ns: int) -> None:
        self._times[request] = _Times(self._group[request], now_ns)

    def refused(self, request: RequestId) -> None:
        self._times[request].refused = True

    def joined(self, request: RequestId, kv_tokens: int) -> None:
        group = self._group[request]
        self._loads[group] += kv_tokens
        self._tokens[group] += kv_tokens
        self._running[group] += 1

    def step(self, now_ns: int, duration_ns: int, emissions: Mapping[RequestId, int]) -> None:
        """Note that a step begins, and its emissions; empty for a token of each request."""
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
        if not self.limits or self.limits[-1][1] != requests:
            self.limits.append((now_ns, requests))

    def left(self, request: RequestId, kv_tokens: int) -> None:
        group = self._group[request]
        self._loads[group] -= kv_tokens
        self._running[group] -= 1

    def finish(self, request: RequestId, now_ns: int) -> None:
        traced = self._requests[request]
        self.left(request, traced.prompt_tokens + traced.output_tokens)
        self._finished[self._group[request]] += 1
        self._times[request].ended_ns = now_ns

    def open(self, now_ns: int) -> None:
        self._opened = self._sample(now_ns)

    def close(self, now_ns: int) -> None:
        self._closed = self._sample(now_ns)

    def figures(self, targets: ServiceTargets) -> ByGroup:
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

    def _outcome(self, request: RequestId, times: _Times) -> ServiceOutcome:
        ttft_s = tpot_s = None
        if times.first_ns is not None:
            ttft_s = (times.first_ns - times.arrived_ns) / 1e9
            gaps = self._requests[request].output_tokens - 1
            if times.ended_ns is not None and gaps:
                tpot_s = (times.ended_ns - times.first_ns) / gaps / 1e9
        finished = times.ended_ns is not None
        return ServiceOutcome(self.groups[times.group], finished, times.refused, ttft_s, tpot_s)

    def _service(self, opened: Sample, closed: Sample) -> dict[ServiceGroup, GivenService]:
        return {
            group: GivenService(
                float(closed.requests[number] - opened.requests[number]),
                float(closed.tokens[number] - opened.tokens[number]),
                float(closed.kv_token_ns[number] - opened.kv_token_ns[number]) / 1e9,
            )
            for number, group in enumerate(self.groups)
        }

    def _sample(self, now_ns: int) -> Sample:
        return Sample(now_ns, self._finished.copy(), self._tokens.copy(), self._kv_token_ns.copy())


def groups_of(requests: "Sequence[TraceRequest]") -> list[ServiceGroup]:
    """Return the tenants and classes of a workload, in order."""
    return sorted(set(map(_group, requests)))


def _group(request: "TraceRequest") -> ServiceGroup:
    return ServiceGroup(request.tenant, request.level)


# Steps kept for the picture of per-rank loads.
PICTURE_STEPS = 500


@dataclass(slots=True)
class RunMetrics:
    """The figures of one run; the field names are those of the JSON report."""

    mean_imbalance_tokens: float
    idle_fraction: float
    output_tokens_per_s: float
    tpot_ms_p50: float
    tpot_ms_p95: float
    pool_wait_s_p50: float
    pool_wait_s_p99: float
    pool_wait_s_max: float
    ttft_s_p50: float
    ttft_s_p95: float
    ttft_s_p99: float
    ttft_s_max: float
    latency_s_mean: float  # From the arrival to the last token.
    steps: float
    requests: float
    recomputes: float
    lease_lapses: float
    dispatch_us_p50: float
    dispatch_us_p99: float
    mean_running: float
    refused: float
    expired: float
    prefill_tokens: float  # Prompt tokens that prefillers computed.
    prefix_hit_fraction: float  # Share of the prompt tokens that they had in their prefix caches.
    prefiller_peak: float  # Computed tokens of the busiest prefiller over the mean; 0 for none.
    local_prefills: float  # Requests whose prompts ranks computed.
    # Share of the KV tokens of requests from prefillers that their ranks pulled, as they had no
    # more in their prefix caches.
    pulled_fraction: float
    # KV tokens of the rank with the most over the window, over the mean of all ranks.
    hottest_rank: float
    prefilled_s_p50: float  # From the arrival to the end of the first prefill.
    prefilled_s_p99: float
    held_tokens: float  # KV tokens that prefillers held for requests, mean over the steps.


@dataclass(slots=True)
class Recorder:
    num_requests: int  # Requests of the run.
    # Receives the events of tenants and classes; None if no report needs it.
    service: ServiceLog | None = None
    prefillers: int = 1  # P.
    # Loads by rank of the first `PICTURE_STEPS` steps of the window.
    picture: list[list[int]] = field(default_factory=list)
    ended: int = 0  # Requests that finished, were refused or expired.
    _open: bool = False
    _closed: bool = False
    _imbalance: int = 0
    _idle: int = 0
    _capacity: int = 0
    _running: int = 0
    _tokens: int = 0
    _steps: int = 0
    _requests: int = 0
    _recomputes: int = 0
    _lapses: int = 0
    _refused: int = 0
    _expired: int = 0
    _time_ns: int = 0
    _tpot_ns: list[float] = field(default_factory=list)
    _waits_ns: list[int] = field(default_factory=list)
    _ttft_ns: list[int] = field(default_factory=list)
    _latency_ns: int = 0
    _dispatch_ns: list[int] = field(default_factory=list)
    _computed: Counter[PrefillerId] = field(default_factory=Counter)
    _prompt_tokens: int = 0
    _local_prefills: int = 0
    _pulled: int = 0
    _sent: int = 0
    _rank_tokens: Counter[int] = field(default_factory=Counter)
    _first_prefills_ns: list[int] = field(default_factory=list)
    _held: int = 0
    _arrived_ns: dict[RequestId, int] = field(default_factory=dict)
    _prefilled_ns: dict[RequestId, int] = field(default_factory=dict)
    _first_token_ns: dict[RequestId, int] = field(default_factory=dict)

    def arrived(self, request: RequestId, now_ns: int) -> None:
        self._arrived_ns[request] = now_ns
        if self.service is not None:
            self.service.arrived(request, now_ns)

    def close(self, now_ns: int) -> None:
        """Close the window, unless it is closed: the last request arrived, or the run is stopped."""
        if self._closed:
            return
        self._closed = True
        if self.service is not None:
            self.service.close(now_ns)

    def refused(self, request: RequestId, now_ns: int) -> None:
        del self._arrived_ns[request]
        self._refused += self._steady
        if self.service is not None:
            self.service.refused(request)
        self._end(now_ns)

    def expired(self, request: RequestId, now_ns: int) -> None:
        """Note that a request was not decoded in time."""
        del self._arrived_ns[request]
        self._prefilled_ns.pop(request, None)
        self._first_token_ns.pop(request, None)
        self._expired += self._steady
        self._end(now_ns)

    def dispatched(self, cost_ns: int) -> None:
        """Note the cost of a decision that admitted something."""
        self._dispatch_ns.append(cost_ns)

    def prefilled(self, request: RequestId, now_ns: int) -> None:
        """Note that a request can be decoded from now on; if its lease lapses, from then on."""
        first = request not in self._prefilled_ns and request not in self._first_token_ns
        if first and self._steady:
            self._first_prefills_ns.append(now_ns - self._arrived_ns[request])
        self._prefilled_ns.setdefault(request, now_ns)

    def computed(self, prefiller: PrefillerId, tokens: int, prompt_tokens: int) -> None:
        if self._steady:
            self._computed[prefiller] += tokens
            self._prompt_tokens += prompt_tokens

    def local_prefill(self) -> None:
        """Note a request whose prompt its rank is to compute."""
        self._local_prefills += self._steady

    def pulled(self, tokens: int, kv_tokens: int) -> None:
        if self._steady:
            self._pulled += tokens
            self._sent += kv_tokens

    def joined(self, request: RequestId, kv_tokens: int, now_ns: int) -> None:
        wait = now_ns - self._prefilled_ns.pop(request)
        if self._steady:
            self._waits_ns.append(wait)
        if self.service is not None:
            self.service.joined(request, kv_tokens)

    def step(
        self,
        loads: Sequence[int],
        running: int,
        duration_ns: int,
        now_ns: int,
        emissions: Mapping[RequestId, int],
    ) -> None:
        """Note one step: each rank's load, the running requests, and the tokens they emit.

        Without `emissions` each emits one.
        """
        if self.service is not None:
            self.service.step(now_ns, duration_ns, emissions)
        if not self._steady:
            return
        self._imbalance += imbalance_tokens(loads)
        self._idle += idle_tokens(loads)
        self._capacity += len(loads) * max(loads)
        self._running += running
        for rank, load in enumerate(loads):
            self._rank_tokens[rank] += load
        self._tokens += sum(emissions.values()) if emissions else running
        self._steps += 1
        self._time_ns += duration_ns
        if len(self.picture) < PICTURE_STEPS:
            self.picture.append(list(loads))

    def first_token(self, request: RequestId, now_ns: int) -> None:
        """Note the first token of a binding; after a recompute the request's own first one stays."""
        if request in self._first_token_ns:
            return
        self._first_token_ns[request] = now_ns
        ttft_ns = now_ns - self._arrived_ns[request]
        if self._steady:
            self._ttft_ns.append(ttft_ns)
        if self.service is not None:
            self.service.first_token(request, now_ns)

    def finish(self, request: RequestId, output_tokens: int, now_ns: int) -> None:
        first_ns = self._first_token_ns.pop(request)
        arrived_ns = self._arrived_ns.pop(request)
        if self._steady:
            self._requests += 1
            self._latency_ns += now_ns - arrived_ns
        if self._steady and output_tokens > 1:  # One token has no time between tokens.
            self._tpot_ns.append((now_ns - first_ns) / (output_tokens - 1))
        if self.service is not None:
            self.service.finish(request, now_ns)
        self._end(now_ns)

    def preempted(self, requests: int) -> None:
        """Note that ranks dropped requests, and will compute them again themselves."""
        self._recomputes += requests * self._steady

    def recomputed(self, request: RequestId, kv_tokens: int) -> None:
        """Note that a rank dropped a request's KV cache."""
        self._recomputes += self._steady
        if self.service is not None:
            self.service.left(request, kv_tokens)

    def lapsed(self) -> None:
        """Note that the lease of a request's KV cache ended in the pool."""
        self._lapses += self._steady

    def held(self, tokens: int) -> None:
        """Note the KV tokens that prefillers hold for requests as a step begins."""
        self._held += tokens * self._steady

    def idle_time(self, duration_ns: int) -> None:
        """Note a time without anything to decode."""
        if self._steady:
            self._time_ns += duration_ns

    def metrics(self) -> RunMetrics:
        """Return the figures.

        Raises:
            ConfigError: The window is empty.
        """
        if not (self._steps and self._tpot_ns and self._waits_ns and self._ttft_ns):
            raise ConfigError(
                f"a segment of {self.num_requests} requests never reached a steady state: "
                "use more requests, fewer segments or a smaller backlog"
            )
        tpot = np.percentile(self._tpot_ns, [50, 95]) / 1e6
        waits = np.percentile(self._waits_ns, [50, 99, 100]) / 1e9
        ttft = np.percentile(self._ttft_ns, [50, 95, 99, 100]) / 1e9
        prefilled = np.percentile(self._first_prefills_ns or [0], [50, 99]) / 1e9
        loads = self._computed.values()
        total = sum(loads)
        held = self._rank_tokens.values()
        dispatch = np.percentile(self._dispatch_ns, [50, 99]) / 1e3
        return RunMetrics(
            mean_imbalance_tokens=self._imbalance / self._steps,
            idle_fraction=self._idle / self._capacity,
            output_tokens_per_s=self._tokens / (self._time_ns / 1e9),
            tpot_ms_p50=float(tpot[0]),
            tpot_ms_p95=float(tpot[1]),
            pool_wait_s_p50=float(waits[0]),
            pool_wait_s_p99=float(waits[1]),
            pool_wait_s_max=float(waits[2]),
            ttft_s_p50=float(ttft[0]),
            ttft_s_p95=float(ttft[1]),
            ttft_s_p99=float(ttft[2]),
            ttft_s_max=float(ttft[3]),
            latency_s_mean=self._latency_ns / self._requests / 1e9,
            steps=self._steps,
            requests=self._requests,
            recomputes=self._recomputes,
            lease_lapses=self._lapses,
            dispatch_us_p50=float(dispatch[0]),
            dispatch_us_p99=float(dispatch[1]),
            mean_running=self._running / self._steps,
            refused=self._refused,
            expired=self._expired,
            prefill_tokens=total,
            prefix_hit_fraction=1.0 - total / self._prompt_tokens if self._prompt_tokens else 0.0,
            prefiller_peak=max(loads) * self.prefillers / total if total else 0.0,
            local_prefills=self._local_prefills,
            pulled_fraction=self._pulled / self._sent if self._sent else 0.0,
            hottest_rank=len(held) * max(held) / sum(held) if any(held) else 1.0,
            prefilled_s_p50=float(prefilled[0]),
            prefilled_s_p99=float(prefilled[1]),
            held_tokens=self._held / self._steps,
        )

    def _end(self, now_ns: int) -> None:
        self.ended += 1
        if not self._open and self.ended * 10 >= self.num_requests:
            self._open = True
            if self.service is not None:
                self.service.open(now_ns)

    @property
    def _steady(self) -> bool:
        return self._open and not self._closed
