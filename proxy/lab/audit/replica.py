"""The observed load in the simulator: the figures of each policy under it, in this proxy.

The simulation gives the idle share of a policy, and how many slots it keeps busy. The time of a step follows
from the fitted line, with the observed KV tokens: T = a + b x mean L / (1 - idle).

As in the fleet that was seen, so many requests are in flight, and one that ends makes room for the next.
And as in the proxy, a KV cache has a lease, which bounds the pool; prefillers take their time; and a slot
that is free is filled a step late, because the step after has begun when the proxy hears of it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot, inf

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.audit.observation import LengthSums, Observation
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import PolicyResult, forecast_called, run_experiment
from balanceroute.proxy.lab.sim.workload import playable, split
from balanceroute.traces import TraceRequest

BASELINES = ("jsq", "least-kv", "round-robin", "power-of-two", "random")
_OURS = ("br-0", "br-h")
# Requests that wait in a router, where the engines do not see them, unless given: as many as the proxy has
# in its pool at least.
_UNSEEN = 24
_LEASE_NS = 30_000_000_000  # NIXL's.
# To join a step late, however long it takes.
_HANDOVER_NS = 1_000_000
_SEGMENTS = 3
_LEAST_ENDED = 100
# As many slots' worth of requests a segment has: its steady state is then longer than its ends.
_TURNS = 12
_MOST_IDLE = 0.99
# Of the last bucket, which has no upper end.
_OVERFLOW = 2.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The figures of a policy under the load."""

    policy: str
    idle: float
    output_tokens_per_s: float
    gain: float  # Output tokens per second beside those that were seen, less 1.
    # Standard error of the gain, by those of both idle shares. The simulated one is taken to be as
    # wrong, in proportion, as that of the baseline is.
    error: float


@dataclass(frozen=True, slots=True)
class AuditRecovery:
    """The figures of the policies under the load."""

    in_flight: int  # Requests that are always under way.
    baseline: str  # The simple policy with idle share and busy slots nearest to the observed ones.
    predictions: tuple[Prediction, ...]  # Of all policies.


def requests_like(
    prompts: LengthSums, outputs: LengthSums, count: int, *, seed: int, longest_prompt: float = inf
) -> list[TraceRequest]:
    """Draw requests with the observed lengths; prompts and outputs are drawn apart.

    The last bucket that has prompts ends at `longest_prompt` if it is not shorter anyway.

    Raises:
        ConfigError: Too few requests ended.
    """
    if max(outputs.counts.values(), default=0.0) < _LEAST_ENDED:
        raise ConfigError(
            f"fewer than {_LEAST_ENDED} requests ended, or the engines tell no lengths "
            "(vllm:request_generation_tokens): audit for longer, or give --trace"
        )
    rng = random.Random(seed)
    drawn = [_draw(prompts, longest_prompt, count, rng), _draw(outputs, inf, count, rng)]
    return [
        TraceRequest(arrival, prompt, output)
        for arrival, (prompt, output) in enumerate(zip(*drawn, strict=True))
    ]


def _draw(lengths: LengthSums, longest: float, count: int, rng: random.Random) -> list[int]:
    """Draw lengths: within a bucket evenly over the logarithm, then scaled to the mean."""
    bounds = sorted(lengths.counts)
    cumulated = [lengths.counts[bound] for bound in bounds]
    weights = [after - before for before, after in zip([0.0, *cumulated], cumulated, strict=False)]
    lows = [1.0, *bounds]
    last = max(place for place, weight in enumerate(weights) if weight > 0)
    highs = [
        _OVERFLOW * low if high == inf else high for low, high in zip(lows, bounds, strict=False)
    ]
    # A few requests that are much longer than any was would idle the other ranks by themselves.
    highs[last] = max(lows[last], min(highs[last], longest))
    values = []
    for place in rng.choices(range(len(bounds)), weights, k=count):
        low, high = lows[place], highs[place]
        values.append(low * (high / low) ** rng.random())
    scale = lengths.total / cumulated[-1] * count / sum(values)
    return [max(1, round(scale * value)) for value in values]


def recover(
    seen: Observation,
    requests: Sequence[TraceRequest] | None,
    *,
    step_base_ms: float,
    step_us_per_token: float,
    in_flight: int | None = None,
    seed: int = 0,
) -> AuditRecovery:
    """Simulate the observed load, or `requests` as the same load.

    The step times count where the observation has none. `in_flight` is the number of requests that clients
    have under way; None for those in the engines.

    Raises:
        ConfigError: There are too few requests.
    """
    slots = seen.batch * len(seen.ranks)
    if requests is None:
        size = _SEGMENTS * max(1000, _TURNS * slots)
        requests = requests_like(
            seen.prompts, seen.outputs, size, seed=seed, longest_prompt=seen.longest_prompt
        )
    if in_flight is None:
        in_flight = _in_flight(seen)
    workloads = split(playable(requests), segments=_SEGMENTS, concurrency=in_flight)
    deployment = _deployment(seen, step_base_ms, step_us_per_token)
    results = {
        result.policy: result
        for result in run_experiment(
            deployment,
            workloads,
            [*BASELINES, *_OURS],
            PolicySettings(),
            forecast_called("survival"),
            seed=seed,
        )
    }
    base = min((results[name] for name in BASELINES), key=partial(_distance, seen))
    predictions = tuple(_predict(seen, deployment, one, base) for one in results.values())
    return AuditRecovery(in_flight, base.policy, predictions)


def _distance(seen: Observation, one: PolicyResult) -> float:
    idle = abs(one.mean["idle_fraction"] - seen.idle)
    return idle + abs(one.mean["mean_running"] - seen.running) / (seen.batch * len(seen.ranks))


def _in_flight(seen: Observation) -> int:
    """Return how many requests are under way, from the engines' counts."""
    in_engines = max(1, round(seen.running + seen.waiting + seen.prefilling))
    # Full engines in which nothing waits: then it waits in the router.
    waits_elsewhere = seen.saturated and seen.waiting + seen.prefilling < 1.0
    return seen.batch * len(seen.ranks) + _UNSEEN if waits_elsewhere else in_engines


def _deployment(seen: Observation, base_ms: float, us_per_token: float) -> SimulatedDeployment:
    fit = seen.fit
    return SimulatedDeployment(
        ranks=len(seen.ranks),
        batch_limit=seen.batch,
        step_base_ns=round(1e6 * (base_ms if fit is None else fit.base_ms)),
        step_ns_per_token=1e3 * (us_per_token if fit is None else fit.us_per_token),
        prefill=_prefill(seen),
        transfer_base_ns=_HANDOVER_NS,
        lease_ns=_LEASE_NS,
    )


def _prefill(seen: Observation) -> PrefillModel | None:
    """Return prefillers that take as long for a token as those that were seen."""
    token_ns = seen.prefill_ns_per_token
    return None if token_ns is None else PrefillModel(seen.prefillers, 0, token_ns)


def _predict(
    seen: Observation, deployment: SimulatedDeployment, one: PolicyResult, base: PolicyResult
) -> Prediction:
    busier = one.mean["mean_running"] / base.mean["mean_running"]

    def step_ns(idle: float, more: float = 1.0) -> float:
        peak = more * seen.mean_load / (1.0 - min(idle, _MOST_IDLE))
        return deployment.step_base_ns + deployment.step_ns_per_token * peak

    def gain(seen_idle: float, idle: float) -> float:
        return busier * step_ns(seen_idle) / step_ns(idle, busier) - 1.0

    idle, missed = one.mean["idle_fraction"], abs(base.mean["idle_fraction"] - seen.idle)
    idle_error = one.stderr["idle_fraction"] + missed * idle / max(seen.idle, missed, 1e-9)
    found = gain(seen.idle, idle)
    error = hypot(
        gain(seen.idle, idle + idle_error) - found, gain(seen.idle + seen.idle_error, idle) - found
    )
    rate = seen.output_tokens_per_s * (1.0 + found)
    return Prediction(one.policy, idle, rate, found, error)
