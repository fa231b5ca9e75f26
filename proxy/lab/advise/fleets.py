"""Fleets of several sizes under one load, in virtual time, against targets of latency."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from balanceroute.proxy.capacity import Bound, BoundVerdict, judge
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.service_levels import ServiceTargets
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import Forecast, make_simulation
from balanceroute.proxy.lab.sim.recorder import ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload

# Requests that finish in the measured time before a run is stopped, so that its figures say what bounds it.
_LEAST = 50


@dataclass(frozen=True, slots=True)
class Slo:
    """The latencies that a fleet has to keep."""

    ttft_p99_s: float = inf  # At most; the 99th percentile of the times to the first token.
    tpot_p95_s: float = inf  # At most; the 95th percentile of the mean times between tokens.


class MissWatch(ServiceLog):
    """The account of a run in open loop that is stopped once it must miss its targets."""

    def __init__(self, workload: Workload, slo: Slo) -> None:
        super().__init__(workload.requests)
        self._arrivals_ns = workload.arrivals_ns()
        self._slo = slo
        self._since_ns: int | None = None
        # Of the requests that arrive in the measured time: late first tokens, slow answers, and how many
        # of each are too many, whatever comes.
        self._late = self._slow = 0
        self._too_late = self._too_slow = inf
        self._left = _LEAST

    @property
    def misses(self) -> bool:
        """Whether the targets are missed, however well it goes on."""
        missed = self._late >= self._too_late or self._slow >= self._too_slow
        return missed and self._left <= 0

    def open(self, now_ns: int) -> None:
        super().open(now_ns)
        self._since_ns = now_ns
        measured = self._requests[bisect_left(self._arrivals_ns, now_ns) :]
        self._too_late = beyond(len(measured), 99)
        self._too_slow = beyond(sum(one.output_tokens > 1 for one in measured), 95)

    def first_token(self, request: RequestId, now_ns: int) -> None:
        super().first_token(request, now_ns)
        if self._is_measured(request):
            took_s = (now_ns - self._times[request].arrived_ns) / 1e9
            self._late += took_s > self._slo.ttft_p99_s

    def finish(self, request: RequestId, now_ns: int) -> None:
        super().finish(request, now_ns)
        gaps = self._requests[request].output_tokens - 1
        if self._since_ns is None or not gaps:
            return
        self._left -= self._closed is None
        first_ns = self._times[request].first_ns
        if first_ns is not None and self._is_measured(request):
            self._slow += (now_ns - first_ns) / gaps / 1e9 > self._slo.tpot_p95_s

    def _is_measured(self, request: RequestId) -> bool:
        return self._since_ns is not None and self._times[request].arrived_ns >= self._since_ns


def beyond(values: int, percent: int) -> int:
    """Return how many of at most `values` values beyond a limit put the percentile beyond it.

    A percentile lies between two of the sorted values, of which the lower one has place
    (values - 1) x percent / 100, rounded down. It is beyond the limit if that one is.
    """
    return values - (values - 1) * percent // 100


@dataclass(frozen=True, slots=True)
class FleetTrial:
    """The figures of a fleet of P prefillers and G ranks under the load."""

    prefillers: int
    ranks: int
    # Of all requests that arrived in the measured time, whenever they were served.
    ttft_p99_s: float
    tpot_p95_s: float  # Of those of them that were answered.
    # The part of the time to the first token in which requests wait for ranks.
    pool_wait_p99_s: float
    output_tokens_per_s: float
    idle: float  # Share of rank time lost at the barrier.
    prefill_work: float  # Prefillers that are busy all the time, if there were enough of them.
    slots_share: float  # Share of the ranks' slots in use.
    # Whether it was stopped, as it could no longer meet the targets; the figures are then those
    # until it was.
    stopped: bool = False

    @property
    def verdict(self) -> BoundVerdict:
        return judge(
            prefillers=self.prefillers,
            ranks=self.ranks,
            prefill_busy=min(1.0, self.prefill_work / self.prefillers),
            slots_share=self.slots_share,
            idle=self.idle,
        )

    def meets(self, slo: Slo) -> bool:
        return self.ttft_p99_s <= slo.ttft_p99_s and self.tpot_p95_s <= slo.tpot_p95_s

    def lacks_ranks(self, slo: Slo) -> bool:
        """Return whether more ranks would help more than more prefillers."""
        full = self.verdict.bound in (Bound.DECODE, Bound.BARRIER)
        waits_for_ranks = 2 * self.pool_wait_p99_s > self.ttft_p99_s
        return self.tpot_p95_s > slo.tpot_p95_s or full or waits_for_ranks


class Fleets:
    """Tries fleets of the same machines and policy under a load in open loop, each size once."""

    def __init__(
        self,
        deployment: SimulatedDeployment,
        workload: Workload,
        policy: str,
        forecast: Forecast,
        *,
        seed: int,
        tried: Callable[[FleetTrial], None] = lambda _: None,
    ) -> None:
        self.trials: dict[tuple[int, int], FleetTrial] = {}
        # Tenants are one group here.
        requests = [replace(one, tenant="", level=0) for one in workload.requests]
        self._workload = replace(workload, requests=requests)
        self._deployment, self._policy, self._forecast = deployment, policy, forecast
        self._seed, self._tried = seed, tried
        prefill = deployment.prefill
        assert prefill is not None
        arrivals = self._workload.arrivals_ns()
        self._span_ns = arrivals[-1] - arrivals[0]
        if self._span_ns <= 0:
            raise ConfigError(
                "all requests of the trace arrive at once: it has no load to plan for"
            )
        self._base_ns = prefill.base_ns * len(requests)
        self._token_ns = prefill.ns_per_token * sum(one.prompt_tokens for one in requests)

    @property
    def least(self) -> tuple[int, int]:
        """The fewest prefillers and ranks that could keep up, if nothing were ever idle."""
        steps = sum(one.output_tokens for one in self._workload.requests)
        slots_ns = self._deployment.step_base_ns * steps / self._deployment.batch_limit
        cached = 1.0 if self._has_cache else 0.0
        work = (self._base_ns + (1.0 - cached) * self._token_ns) / self._span_ns
        return max(1, int(work)), max(1, int(slots_ns / self._span_ns))

    @property
    def _has_cache(self) -> bool:
        prefill = self._deployment.prefill
        return prefill is not None and bool(prefill.cache_tokens)

    def alone(self) -> Slo:
        """Return the latencies that no number of instances can improve: of requests that are alone."""
        deployment, prefill = self._deployment, self._deployment.prefill
        assert prefill is not None
        prompts = sorted(one.prompt_tokens for one in self._workload.requests)
        longest = 0 if self._has_cache else prompts[int(0.99 * (len(prompts) - 1))]
        transfer_ns = deployment.transfer_base_ns + deployment.transfer_ns_per_token * longest
        first_ns = prefill.service_ns(longest) + transfer_ns + deployment.step_base_ns
        return Slo(first_ns / 1e9, deployment.step_base_ns / 1e9)

    def trial(self, prefillers: int, ranks: int, slo: Slo = Slo()) -> FleetTrial:
        """Return the figures of a fleet of this size; its run stops once it cannot meet `slo` any more."""
        known = self.trials.get((prefillers, ranks))
        if known is None:
            known = self.trials[prefillers, ranks] = self._try(prefillers, ranks, slo)
            self._tried(known)
        return known

    def _try(self, prefillers: int, ranks: int, slo: Slo) -> FleetTrial:
        prefill = self._deployment.prefill
        assert prefill is not None
        deployment = replace(
            self._deployment, ranks=ranks, prefill=replace(prefill, servers=prefillers)
        )
        watch = MissWatch(self._workload, slo)

        def look(_: int) -> None:
            if watch.misses:
                simulation.stop()

        simulation = make_simulation(
            deployment,
            self._workload,
            self._policy,
            PolicySettings(),
            self._forecast,
            seed=f"{self._seed}/0/{self._policy}",
            service=watch,
            on_finished=look,
        )
        figures = simulation.run().metrics()
        (group,) = watch.figures(ServiceTargets()).values()
        computed = self._base_ns + self._token_ns * (1.0 - figures.prefix_hit_fraction)
        return FleetTrial(
            prefillers,
            ranks,
            inf if group.ttft_s_p99 is None else group.ttft_s_p99,
            inf if group.tpot_ms_p95 is None else group.tpot_ms_p95 / 1e3,
            figures.pool_wait_s_p99,
            figures.output_tokens_per_s,
            figures.idle_fraction,
            computed / self._span_ns,
            figures.mean_running / (ranks * deployment.batch_limit),
            stopped=watch.misses,
        )


@dataclass(frozen=True, slots=True)
class SizePlan:
    """The smallest fleet found, and why no role can have one less."""

    chosen: FleetTrial  # It meets the targets.
    # The fleets with one prefiller, or one rank, less; none of one where there is one only.
    fewer: Sequence[FleetTrial]


def plan(fleets: Fleets, slo: Slo, *, most: int) -> SizePlan:
    """Return a fleet that meets the targets and of which neither role can have one less.

    Raises:
        ConfigError: No fleet with at most `most` instances of each role was found.
    """
    alone = fleets.alone()
    for name, target, best in (
        ("--ttft-p99", slo.ttft_p99_s, alone.ttft_p99_s),
        ("--tpot-p95", slo.tpot_p95_s, alone.tpot_p95_s),
    ):
        if target < best:
            raise ConfigError(
                f"{name} is {target:g}, and a request that is alone on the fleet takes {best:.3g} s: no "
                "number of instances helps"
            )
    prefillers, ranks = fleets.least
    while not fleets.trial(prefillers, ranks, slo).meets(slo):
        if fleets.trial(prefillers, ranks, slo).lacks_ranks(slo):
            ranks = _more(ranks)
        else:
            prefillers = _more(prefillers)
        if max(prefillers, ranks) > most:
            last = list(fleets.trials.values())[-1]
            raise ConfigError(
                f"no fleet of up to {most} instances of each role meets the targets: {last.prefillers} "
                f"prefillers and {last.ranks} ranks have a TTFT p99 of {last.ttft_p99_s:.3g} s and a "
                f"TPOT p95 of {last.tpot_p95_s:.3g} s{' when they were stopped' if last.stopped else ''}"
            )
    least = fleets.least
    while True:
        before = prefillers, ranks
        ranks = _fewest([(prefillers, n) for n in range(least[1], ranks + 1)], fleets, slo)[1]
        prefillers = _fewest([(n, ranks) for n in range(least[0], prefillers + 1)], fleets, slo)[0]
        fewer = [(prefillers - 1, ranks), (prefillers, ranks - 1)]
        trials = [fleets.trial(*size, slo) for size in fewer if min(size) > 0]
        better = next((one for one in trials if one.meets(slo)), None)
        if better is not None:  # More instances are not better in every case.
            prefillers, ranks = better.prefillers, better.ranks
        elif before == (prefillers, ranks):
            return SizePlan(fleets.trial(prefillers, ranks, slo), trials)


def _more(instances: int) -> int:
    return instances + max(1, instances // 2)


def _fewest(sizes: Sequence[tuple[int, int]], fleets: Fleets, slo: Slo) -> tuple[int, int]:
    """Return the first of ascending sizes that meets the targets, by halving; the last one does."""
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        if fleets.trial(*sizes[middle], slo).meets(slo):
            high = middle
        else:
            low = middle + 1
    return sizes[high]
