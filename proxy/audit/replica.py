"""The observed load in the simulator: what each policy would make of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from balanceroute.proxy.audit.observation import Observation
from balanceroute.proxy.audit.pages import Lengths
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.sim.driver import Deployment
from balanceroute.proxy.sim.experiment import PolicyResult, run_experiment
from balanceroute.proxy.sim.forecast import forecast_called
from balanceroute.proxy.sim.workload import playable, split
from balanceroute.traces import TraceRequest

BASELINES = ("jsq", "least-kv", "round-robin", "power-of-two", "random")
OURS = ("br-0", "br-h")
_BACKLOG = 64
_SEGMENTS = 3
_LEAST_ENDED = 100
# As many slots' worth of requests a segment has: its steady state is then longer than its ends.
_TURNS = 12
# Of the last bucket, which has no upper end.
_OVERFLOW = 2.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a policy would make of the load.

    Attributes:
        gain: Output tokens per second beside those of the baseline, less 1.
        error: Of the gain: the spread of the runs, and how far the baseline's idle share is from what
            was seen.
    """

    policy: str
    idle: float
    output_tokens_per_s: float
    gain: float
    error: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the policies would make of the load.

    Attributes:
        baseline: The simple policy whose idle share is nearest to what was seen.
        predictions: Of all policies.
    """

    baseline: str
    predictions: tuple[Prediction, ...]


def requests_like(
    prompts: Lengths, outputs: Lengths, count: int, *, seed: int
) -> list[TraceRequest]:
    """Draw requests with the observed lengths; prompts and outputs are drawn apart.

    Raises:
        ConfigError: Too few requests ended.
    """
    if max(outputs.counts.values(), default=0.0) < _LEAST_ENDED:
        raise ConfigError(
            f"fewer than {_LEAST_ENDED} requests ended, or the engines tell no lengths "
            "(vllm:request_generation_tokens): audit for longer, or give --trace"
        )
    rng = random.Random(seed)
    drawn = [_draw(lengths, count, rng) for lengths in (prompts, outputs)]
    return [
        TraceRequest(arrival, prompt, output)
        for arrival, (prompt, output) in enumerate(zip(*drawn, strict=True))
    ]


def _draw(lengths: Lengths, count: int, rng: random.Random) -> list[int]:
    """Draw lengths: within a bucket evenly over the logarithm, then scaled to the mean."""
    bounds = sorted(lengths.counts)
    cumulated = [lengths.counts[bound] for bound in bounds]
    weights = [after - before for before, after in zip([0.0, *cumulated], cumulated, strict=False)]
    lows = [1.0, *bounds]
    values = []
    for place in rng.choices(range(len(bounds)), weights, k=count):
        low, high = lows[place], bounds[place]
        if high == float("inf"):
            high = _OVERFLOW * low
        values.append(low * (high / low) ** rng.random())
    scale = lengths.total / cumulated[-1] * count / sum(values)
    return [max(1, round(scale * value)) for value in values]


def recover(
    seen: Observation,
    requests: Sequence[TraceRequest] | None,
    *,
    step_base_ms: float,
    step_us_per_token: float,
    policies: Sequence[str] = OURS,
    seed: int = 0,
) -> Recovery:
    """Simulate the load.

    Args:
        seen: What was observed.
        requests: The same load as a trace; None to draw requests from the engines' histograms.
        step_base_ms: a of a step's time, where the observation does not tell it.
        step_us_per_token: b, likewise.
        policies: To predict, beside the baselines.
        seed: Of the draws.

    Raises:
        ConfigError: There are too few requests, or a policy is unknown.
    """
    slots = seen.batch * len(seen.ranks)
    if requests is None:
        size = _SEGMENTS * max(1000, _TURNS * slots)
        requests = requests_like(seen.prompts, seen.outputs, size, seed=seed)
    fit = seen.fit
    deployment = Deployment(
        ranks=len(seen.ranks),
        batch_limit=seen.batch,
        step_base_ns=round(1e6 * (step_base_ms if fit is None else fit.base_ms)),
        step_ns_per_token=1e3 * (step_us_per_token if fit is None else fit.us_per_token),
    )
    workloads = split(
        playable(requests),
        segments=_SEGMENTS,
        backlog=_BACKLOG if seen.saturated else None,
        concurrency=None if seen.saturated else max(1, round(seen.running + seen.waiting)),
    )
    results = {
        result.policy: result
        for result in run_experiment(
            deployment,
            workloads,
            [*BASELINES, *(policy for policy in policies if policy not in BASELINES)],
            PolicySettings(),
            forecast_called("survival"),
            seed=seed,
        )
    }
    base = min(BASELINES, key=lambda name: abs(results[name].mean["idle_fraction"] - seen.idle))
    missed = abs(results[base].mean["idle_fraction"] - seen.idle)
    return Recovery(base, tuple(_predict(one, results[base], missed) for one in results.values()))


def _predict(one: PolicyResult, base: PolicyResult, missed: float) -> Prediction:
    rate = "output_tokens_per_s"
    ratio = one.mean[rate] / base.mean[rate]
    spread = ratio * (one.stderr[rate] / one.mean[rate] + base.stderr[rate] / base.mean[rate])
    return Prediction(
        one.policy,
        one.mean["idle_fraction"],
        one.mean[rate],
        ratio - 1.0,
        0.0 if one is base else spread + missed,
    )
