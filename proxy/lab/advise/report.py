"""Advice, for people and as JSON."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from balanceroute.proxy.capacity import MEANINGS, Bound, Need, Needs
from balanceroute.proxy.lab.advise.fleets import FleetTrial, SizePlan, Slo
from balanceroute.proxy.lab.audit.observation import (
    Look,
    PageError,
    RankPage,
    Watcher,
    checked,
    metrics_url,
)
from balanceroute.proxy.page_client import UnansweredError

if TYPE_CHECKING:
    from balanceroute.proxy.page_client import PageClient


def lines(needs: Needs, busy: float) -> Iterator[str]:
    yield f"bound by      {MEANINGS[needs.verdict.bound]}"
    yield f"prefillers    {_need(needs.prefillers, busy, 'busy')}"
    yield f"ranks         {_need(needs.ranks, busy, 'full')}"
    if needs.verdict.bound is Bound.BARRIER:
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
    plan: SizePlan, slo: Slo, trials: Sequence[FleetTrial], present: FleetTrial | None
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


def _size(one: FleetTrial) -> str:
    return f"{_count(one.prefillers, 'prefiller')} and {_count(one.ranks, 'rank')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _latencies(one: FleetTrial) -> str:
    stopped = " when it was stopped" if one.stopped else ""
    return f"TTFT p99 {one.ttft_p99_s:.2f} s, TPOT p95 {1e3 * one.tpot_p95_s:.1f} ms{stopped}"


def _targets(slo: Slo) -> str:
    named = (("TTFT p99", slo.ttft_p99_s), ("TPOT p95", slo.tpot_p95_s))
    return " and ".join(f"{name} <= {most:g} s" for name, most in named if most < inf)


def as_json(needs: Needs) -> dict[str, object]:
    return {
        "bound": needs.verdict.bound.value,
        "prefillers": asdict(needs.prefillers),
        "ranks": asdict(needs.ranks),
    }


def plan_as_json(
    plan: SizePlan, slo: Slo, trials: Sequence[FleetTrial], present: FleetTrial | None
) -> dict[str, object]:
    def row(one: FleetTrial) -> dict[str, object]:
        return asdict(one) | {"bound": one.verdict.bound.value, "meets": one.meets(slo)}

    return {
        "wanted": row(plan.chosen),
        "fewer": [row(one) for one in plan.fewer],
        "now": None if present is None else row(present),
        "trials": [row(one) for one in trials],
    }


# A fleet by its proxy's metrics, in place of those of all its engines.

_PREFIX = "balanceroute_"
_BATCH = "batch_limit"
# By our field, the metric of each rank.
_RANK = {"kv_tokens": "rank_kv_tokens", "running": "rank_bound_requests"}
_PREFILLER = "prefiller_probes"
_WAITING = "live_requests"
_WANTED = tuple(
    (_PREFIX + name).encode() for name in (*_RANK.values(), _PREFILLER, _WAITING, _BATCH)
)


class ProxyPages(Watcher):
    """The metrics of a proxy, at its public or its admin address."""

    def __init__(self, url: str, pages: "PageClient") -> None:
        self.batch = 1  # Slots of a rank, once it was looked at.
        self._url, self._at = url, metrics_url("--proxy", url)
        self._pages = pages

    async def look(self) -> Look:
        try:
            page = await self._pages.page(self._at)
            look, self.batch = read_proxy_page(page, asyncio.get_running_loop().time())
        except (UnansweredError, PageError) as error:
            raise PageError(f"{self._url}: {error}") from None
        return look


def read_proxy_page(page: bytes, time_s: float) -> tuple[Look, int]:
    """Return the fleet's state on a page of /metrics at a time, and the slots of a rank.

    Requests that wait in the proxy count as waiting at the engines, in equal parts. Pooled requests wait for
    ranks. Those before prefill wait for prefillers if all of these have work, else for ranks: the pool
    is full.

    Raises:
        PageError: It is not a page of this proxy.
    """
    lines = [line for line in page.splitlines() if line.startswith(_WANTED)]
    decode: dict[str, RankPage] = {}
    prefill: dict[str, RankPage] = {}
    waiting: dict[str, float] = {}
    batch = 0
    try:
        for family in text_string_to_metric_families(b"\n".join(lines).decode() + "\n"):
            for sample in family.samples:
                name = sample.name.removeprefix(_PREFIX)
                value = checked(sample.name, sample.value)
                if name == _BATCH:
                    batch = int(value)
                elif name == _WAITING:
                    waiting[sample.labels.get("state", "")] = value
                elif name == _PREFILLER:
                    prefill[sample.labels["name"]] = RankPage(running=value)
                for field, metric in _RANK.items():
                    if name == metric:
                        rank_page = decode.setdefault(sample.labels["name"], RankPage())
                        setattr(rank_page, field, value)
    except (ValueError, KeyError) as error:
        raise PageError(f"not a page of the proxy's metrics: {error}") from error
    if not decode or not batch or any(one.kv_tokens is None for one in decode.values()):
        raise PageError(
            "not a page of the proxy's metrics: it tells no ranks (balanceroute_rank_..)"
        )
    pooled, queued = waiting.get("pooled", 0.0), waiting.get("queued", 0.0)
    if not all(rank_page.running for rank_page in prefill.values()):
        pooled, queued = pooled + queued, 0.0
    for rank_page in decode.values():
        rank_page.waiting = pooled / len(decode)
    for rank_page in prefill.values():
        rank_page.waiting = queued / len(prefill)
    return Look(time_s, decode, prefill), batch
