"""A fleet as it was seen: loads by rank over time, and what follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.audit.pages import Lengths, RankPage
from balanceroute.proxy.audit.step_time import fit_looks
from balanceroute.proxy.audit.verdict import Verdict, judge
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.validate.fit import Fit

MIN_SAMPLES = 20
_PARTS = 10
_FIGURES = ("running", "waiting", "kv_tokens", "generated")
_UNTOLD = {
    "kv_tokens": "tells neither its KV tokens in use nor its capacity "
    "(vllm:cache_config_info, sglang:num_used_tokens)",
    "generated": "does not tell the tokens that it generated "
    "(vllm:generation_tokens_total, sglang:generation_tokens_total)",
}
_FULL = 0.95
"""Share of the slots in use from which a rank counts as full: one that ended leaves a gap."""
_MANY_LOOKS = 5.0
"""At which a request runs, so that few join a rank and leave it between two."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at all engines: seconds, and what each rank told, by its name."""

    time_s: float
    decode: Mapping[str, RankPage]
    prefill: Mapping[str, RankPage]


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of a fleet of G ranks.

    Attributes:
        ranks: Names, G.
        prefillers: P.
        seconds: From the first look to the last.
        loads: float64[looks, G], KV tokens.
        batch: Slots of a rank: as given, or the most requests that any rank ran.
        idle: Share of rank time lost at the barrier, by the loads: sum (max L - L_g) / sum G max L.
        idle_error: Its standard error, by the spread between parts of the time.
        mean_load: Mean KV tokens of a rank, over the steps as `idle` is.
        imbalance_tokens: Mean of max L - min L.
        output_tokens_per_s: Of all ranks; NaN if they do not tell it.
        running: Mean requests in the batches of all ranks.
        waiting: Mean requests that wait in the decode engines.
        prefilling: Mean requests that run or wait at all prefillers.
        fit: The line of the step's time over max L, in time of the wall; None if it cannot be told.
        prefill_busy: Mean share of prefillers that have a request; None without prefillers.
        prefill_waiting: Mean requests that wait at a prefiller.
        prefill_ns_per_token: Time of a prefiller for a prompt token; None if no prefill was seen.
        prompts: Lengths of the prompts that ended meanwhile, by bucket.
        longest_prompt: About the longest of them; inf if the looks do not tell.
        outputs: Lengths of their outputs.
    """

    ranks: tuple[str, ...]
    prefillers: int
    seconds: float
    loads: NDArray[np.float64]
    batch: int
    idle: float
    idle_error: float
    mean_load: float
    imbalance_tokens: float
    output_tokens_per_s: float
    running: float
    waiting: float
    prefilling: float
    fit: Fit | None
    prefill_busy: float | None
    prefill_waiting: float
    prefill_ns_per_token: float | None
    prompts: Lengths
    longest_prompt: float
    outputs: Lengths

    @property
    def slots_share(self) -> float:
        """Share of the slots in use."""
        return self.running / (self.batch * len(self.ranks))

    @property
    def verdict(self) -> Verdict:
        """What bounds it."""
        return judge(
            prefillers=self.prefillers,
            ranks=len(self.ranks),
            prefill_busy=self.prefill_busy,
            slots_share=self.slots_share,
            idle=self.idle,
        )

    @property
    def saturated(self) -> bool:
        """Whether the ranks were full, so that requests waited for slots."""
        return self.slots_share >= _FULL


def observe(
    looks: Sequence[Look], *, batch: int | None = None, outputs_told: bool = True
) -> Observation:
    """Return what the looks say.

    Args:
        looks: All of the same engines.
        batch: Slots of a rank; None for the most that were in use.
        outputs_told: Whether ranks tell the tokens that they generate; a proxy does not tell them.

    Raises:
        ConfigError: They are too few, ranks do not tell what they must, or nothing was decoded.
    """
    looks = _whole(looks)
    if len(looks) < MIN_SAMPLES:
        raise ConfigError(
            f"{len(looks)} looks at all engines are too few, {MIN_SAMPLES} the least: more --minutes"
        )
    ranks = tuple(looks[0].decode)
    loads = _told_by_all(looks, ranks, "kv_tokens")
    running = _series(looks, ranks, "running")
    generated = _counted((_told_by_all if outputs_told else _series)(looks, ranks, "generated"))
    peaks = loads.max(axis=1)
    if not peaks.any():
        raise ConfigError("nothing was decoded meanwhile")
    times = np.array([look.time_s for look in looks])
    fit = fit_looks(times, peaks, running.sum(axis=1), generated.sum(axis=1))
    # A look finds a long step more often than a short one; each step counts once.
    steps = np.ones(len(peaks)) if fit is None else 1.0 / _step_ms(fit, peaks)
    prefillers = tuple(looks[0].prefill)
    prompts, outputs = (_ended(looks, ranks, what) for what in ("prompts", "outputs"))
    queues, work = _series(looks, prefillers, "waiting"), _series(looks, prefillers, "running")
    busy = float((queues + work > 0).mean()) if prefillers else None
    seconds = float(times[-1] - times[0])
    # Those that prefillers ended: of a queue that grows or shrinks meanwhile the ranks tell others.
    prefilled = _ended(looks, prefillers, "prompts").total or prompts.total
    return Observation(
        ranks=ranks,
        prefillers=len(prefillers),
        seconds=seconds,
        loads=loads,
        batch=batch or max(1, round(running.max())),
        idle=_idle(loads, steps),
        idle_error=_idle_error(loads, steps),
        mean_load=float(steps @ loads.mean(axis=1) / steps.sum()),
        imbalance_tokens=float((peaks - loads.min(axis=1)).mean()),
        output_tokens_per_s=float((generated[-1] - generated[0]).sum() / seconds),
        running=float(running.sum(axis=1).mean()),
        waiting=float(np.nan_to_num(_series(looks, ranks, "waiting")).sum(axis=1).mean()),
        prefilling=float(np.nan_to_num(queues + work).sum(axis=1).mean()),
        fit=fit,
        prefill_busy=busy,
        prefill_waiting=float(np.nan_to_num(queues).mean()) if prefillers else 0.0,
        prefill_ns_per_token=(
            1e9 * len(prefillers) * busy * seconds / prefilled if busy and prefilled else None
        ),
        prompts=prompts,
        longest_prompt=_longest_prompt(loads, running, outputs),
        outputs=outputs,
    )


def _told_by_all(looks: Sequence[Look], ranks: Sequence[str], what: str) -> NDArray[np.float64]:
    found = _series(looks, ranks, what)
    silent = np.isnan(found).any(axis=0)
    if silent.any():
        raise ConfigError(f"{ranks[int(silent.argmax())]} {_UNTOLD[what]}")
    return found


def _series(looks: Sequence[Look], ranks: Sequence[str], what: str) -> NDArray[np.float64]:
    """Return float64[looks, ranks]; NaN for what was not told."""
    rows = [
        [
            getattr((look.decode if name in look.decode else look.prefill)[name], what)
            for name in ranks
        ]
        for look in looks
    ]
    return np.array(rows, np.float64).reshape(len(looks), len(ranks))


def _whole(looks: Sequence[Look]) -> Sequence[Look]:
    """Leave out looks in which a rank does not tell what it tells in others, as while it starts."""
    told: dict[str, set[str]] = {}
    for look in looks:
        for name, page in (*look.prefill.items(), *look.decode.items()):
            told.setdefault(name, set()).update(_figures_of(page))
    return [
        look
        for look in looks
        if all(
            _figures_of(page) == told[name]
            for name, page in (*look.prefill.items(), *look.decode.items())
        )
    ]


def _figures_of(page: RankPage) -> set[str]:
    values = {name: getattr(page, name) for name in _FIGURES}
    return {name for name, value in values.items() if value is not None and isfinite(value)}


def _counted(counters: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64[looks, ranks] that never fall: what was counted since the first look.

    A counter that falls began anew at 0, as its engine was restarted.
    """
    before, after = counters[:-1], counters[1:]
    more = np.where(after < before, after, after - before)
    return np.concatenate([np.zeros_like(counters[:1]), np.cumsum(more, axis=0)])


def _idle(loads: NDArray[np.float64], steps: NDArray[np.float64]) -> float:
    return float(1.0 - steps @ loads.mean(axis=1) / (steps @ loads.max(axis=1)))


def _idle_error(loads: NDArray[np.float64], steps: NDArray[np.float64]) -> float:
    parts = zip(np.array_split(loads, _PARTS), np.array_split(steps, _PARTS), strict=True)
    idle = [_idle(*part) for part in parts if part[0].any()]
    return float(np.std(idle, ddof=1) / len(idle) ** 0.5) if len(idle) > 1 else 0.0


def _longest_prompt(
    loads: NDArray[np.float64],
    running: NDArray[np.float64],
    outputs: Lengths,
) -> float:
    """Return the most that a rank's load grew between two looks, and what the mean request holds.

    A long prompt joins in the place of another request. That is right if a request runs for many looks.
    """
    ended = max(outputs.counts.values(), default=0.0)
    lasts_looks = running.sum() / ended if ended else 0.0
    if lasts_looks < _MANY_LOOKS:
        return inf
    return float(np.diff(loads, axis=0).max() + loads.sum() / running.sum())


def _step_ms(fit: Fit, peaks: NDArray[np.float64]) -> NDArray[np.float64]:
    step_ms: NDArray[np.float64] = fit.base_ms + fit.us_per_token / 1e3 * peaks
    return step_ms


def _ended(looks: Sequence[Look], ranks: Sequence[str], what: str) -> Lengths:
    """Return the lengths of what ended between the first look and the last, of some engines."""
    result = Lengths()
    pages = [{**look.prefill, **look.decode} for look in looks]
    for name in ranks:
        told: list[Lengths] = [getattr(page[name], what) for page in pages]
        for before, after in pairwise(told):
            # All begins anew with a restart, so that what a bucket lost tells it of the others, too.
            anew = after.total < before.total or any(
                count < before.counts.get(bound, 0.0) for bound, count in after.counts.items()
            )
            since = Lengths() if anew else before
            result.total += after.total - since.total
            for bound, count in after.counts.items():
                more = count - since.counts.get(bound, 0.0)
                result.counts[bound] = result.counts.get(bound, 0.0) + more
    return result
