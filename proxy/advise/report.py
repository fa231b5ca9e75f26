"""Advice, for people and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf

from balanceroute.proxy.advise.fleets import Plan, Trial
from balanceroute.proxy.advise.miss_watch import Slo
from balanceroute.proxy.advise.need import Need, Needs
from balanceroute.proxy.audit.verdict import MEANINGS, Bound


def lines(told: Needs, busy: float) -> Iterator[str]:
    """Yield what a load needs."""
    yield f"bound by      {MEANINGS[told.verdict.bound]}"
    yield f"prefillers    {_need(told.prefillers, busy, 'busy')}"
    yield f"ranks         {_need(told.ranks, busy, 'full')}"
    if told.verdict.bound is Bound.BARRIER:
        yield (
            "              even loads come before more ranks: `balanceroute audit` tells what a policy "
            "recovers"
        )


def _need(need: Need, busy: float, word: str) -> str:
    if need.work is None or need.wanted is None:
        return f"{need.now} now; their load is not known"
    least = "at least " if need.at_least else ""
    return (
        f"{need.now} now, {least}{need.wanted} wanted: the load keeps {need.work:.2f} {word}, "
        f"{100 * busy:.0f} % is the aim"
    )


def plan_lines(
    plan: Plan, slo: Slo, trials: Sequence[Trial], present: Trial | None
) -> Iterator[str]:
    """Yield the trials by size, the advice, and why fewer do not do."""
    yield "prefillers  ranks  TTFT p99 s  TPOT p95 ms  prefill busy %  slots %  idle %  bound by"
    for one in sorted(trials, key=lambda one: (one.prefillers, one.ranks)):
        miss = " misses, stopped" if one.stopped else " misses"
        mark = " <" if one is plan.chosen else "" if one.meets(slo) else miss
        yield (
            f"{one.prefillers:10}  {one.ranks:5}  {one.ttft_p99_s:10.2f}  {1e3 * one.tpot_p95_s:11.1f}  "
            f"{100 * min(1.0, one.prefill_work / one.prefillers):14.0f}  {100 * one.slots_share:7.0f}  "
            f"{100 * one.idle:6.1f}  {one.verdict.bound.value}{mark}"
        )
    chosen = plan.chosen
    yield f"wanted: {_size(chosen)}, for {_targets(slo)}"
    for one in plan.fewer:
        yield f"  {_size(one)}: {_latencies(one)}"
    if present is not None:
        verb = "meets" if present.meets(slo) else "misses"
        yield f"now: {_size(present)} {verb} the targets: {_latencies(present)}"


def _size(one: Trial) -> str:
    return f"{_count(one.prefillers, 'prefiller')} and {_count(one.ranks, 'rank')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _latencies(one: Trial) -> str:
    stopped = " when it was stopped" if one.stopped else ""
    return f"TTFT p99 {one.ttft_p99_s:.2f} s, TPOT p95 {1e3 * one.tpot_p95_s:.1f} ms{stopped}"


def _targets(slo: Slo) -> str:
    named = (("TTFT p99", slo.ttft_p99_s), ("TPOT p95", slo.tpot_p95_s))
    return " and ".join(f"{name} <= {most:g} s" for name, most in named if most < inf)


def as_json(told: Needs) -> dict[str, object]:
    """Return what a load needs as JSON has it."""
    return {
        "bound": told.verdict.bound.value,
        "prefillers": asdict(told.prefillers),
        "ranks": asdict(told.ranks),
    }


def plan_as_json(
    plan: Plan, slo: Slo, trials: Sequence[Trial], present: Trial | None
) -> dict[str, object]:
    """Return the plan as JSON has it."""

    def row(one: Trial) -> dict[str, object]:
        return asdict(one) | {"bound": one.verdict.bound.value, "meets": one.meets(slo)}

    return {
        "wanted": row(plan.chosen),
        "fewer": [row(one) for one in plan.fewer],
        "now": None if present is None else row(present),
        "trials": [row(one) for one in trials],
    }
