"""The whole unit as one model server, as an endpoint picker above it reads one.

The protocol is that of the Gateway API Inference Extension (its proposal 003); the names are vLLM's
unless the settings have other ones. A picker takes the first sample of a metric, so each has one, whatever
groups there are. It prefers the endpoint that says least:

- `waiting` has no engine: requests in the queue before prefill, in the pool, and for one engine alone.
- `running` is at work on one: in prefill or decode.
- `kv-usage` is the mean of the live decode ranks by their capacity, by their engines' last report, else by
  the scheduler's ledger. A unit without a live rank is full: it must not look idle.
- `cache` has the blocks of the live ranks together.
- `lora` has the adapters of the requests that are there, while engines serve any.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.instances import Rank, Target
from balanceroute.proxy.live.frontend.groups import Group, Groups
from balanceroute.proxy.live.scheduling.scraped_loads import load_of
from balanceroute.proxy.live.telemetry.metrics import MetricsPage
from balanceroute.proxy.live.telemetry.registry import render

KEPT_S = 0.05
"""Pickers ask that often; no page is made more often."""

_BLOCK_TOKENS = 16  # Until an engine has reported.
_MOST_ADAPTERS = 64  # In each list.
_WAITING = (LifecycleState.QUEUED, LifecycleState.POOLED)


class _Size(NamedTuple):
    """The KV cache of each of an engine's ranks, as it reported."""

    tokens: int | None
    block_tokens: int | None
    max_adapters: int | None


class _Cache(NamedTuple):
    """The KV caches of the live ranks."""

    usage: float
    tokens: int
    block_tokens: int


def page_of_unit(
    names: Mapping[str, str],
    groups: Groups,
    unix_s: Callable[[], float],
    *,
    gauges: Callable[[str], Mapping[Target, EngineGauges]],
) -> Callable[[], bytes]:
    """Return what makes the page; the arguments are those of `UnitMetrics`."""
    unit = UnitMetrics(names, groups, gauges=gauges, unix_s=unix_s)
    return MetricsPage(unit.render, groups.context.clock, KEPT_S)


class UnitMetrics(Collector):
    """Renders the page.

    Args:
        names: Of the metrics, by what each is.
        gauges: Returns the latest gauges of the engines of a group, by the group's name.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        groups: Groups,
        *,
        gauges: Callable[[str], Mapping[Target, EngineGauges]],
        unix_s: Callable[[], float],
    ) -> None:
        self._names, self._groups = names, groups
        self._gauges, self._unix_s = gauges, unix_s
        # Kept while a scrape fails: sizes do not change.
        self._sizes: dict[Target, _Size] = {}
        self._block_tokens = _BLOCK_TOKENS
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return render(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Say nothing before the first page is asked for."""
        return ()

    def collect(self) -> Iterator[Metric]:
        cache = self._cache()
        waiting, in_all = map(sum, zip(*map(_counts, self._groups), strict=True))
        labels = {"engine": "0", "model_name": self._model}
        yield from self._family("waiting", "Requests that no engine has yet.", labels, waiting)
        meaning = "Requests that engines work on."
        yield from self._family("running", meaning, labels, in_all - waiting)
        meaning = "Share of the KV caches of the live decode ranks in use, 0 to 1."
        yield from self._family("kv-usage", meaning, labels, cache.usage)
        blocks = {
            "block_size": str(cache.block_tokens),
            "num_gpu_blocks": str(cache.tokens // cache.block_tokens),
            "kv_cache_size_tokens": str(cache.tokens),
        }
        meaning = "KV caches of the live decode ranks together; always 1."
        yield from self._family("cache", meaning, {"engine": "0"} | blocks, 1)
        if "lora" in self._names and (adapters := self._adapters()):
            meaning = "Adapters of the requests; when they were looked at, in seconds since 1970."
            yield from self._family("lora", meaning, adapters, self._unix_s())

    def _family(
        self, what: str, meaning: str, labels: dict[str, str], value: float
    ) -> Iterator[Metric]:
        name = self._names.get(what)
        if name is not None:
            family = Metric(name, meaning, "gauge")
            family.samples = [Sample(name, labels, value)]
            yield family

    @property
    def _model(self) -> str:
        """The model that the unit serves, if it is one."""
        first = self._groups.first
        if self._groups.several:
            return ""
        cards = first.served.cards()
        return first.model or (str(cards[0]["id"]) if cards else "")

    def _cache(self) -> _Cache:
        """Return what the live ranks have and use."""
        sizes: dict[Target, _Size] = {}
        shares: list[tuple[float, int | None]] = []
        for group in self._groups:
            gauges = self._gauges(group.name)
            for rank in group.intake.instances.ranks:
                page, target = gauges.get(rank.target), rank.target
                if page is not None:
                    sizes[target] = _Size(page.kv_tokens, page.block_tokens, page.max_adapters)
                elif target in self._sizes:
                    sizes.setdefault(target, self._sizes[target])
                if rank.usable:
                    size = sizes[target].tokens if target in sizes else None
                    shares.append((_share(group, rank, page, size), size))
        self._sizes = sizes
        blocks = [size.block_tokens for size in sizes.values() if size.block_tokens]
        self._block_tokens = min(blocks, default=self._block_tokens)
        known = [size for _, size in shares if size is not None]
        # One that has reported nothing counts as the mean of those that have.
        unknown = sum(known) / len(known) if known else 1.0
        weights = [unknown if size is None else size for _, size in shares]
        if not weights:
            return _Cache(1.0, 0, self._block_tokens)
        used = sum(share * weight for (share, _), weight in zip(shares, weights, strict=True))
        return _Cache(min(1.0, used / sum(weights)), sum(known), self._block_tokens)

    def _adapters(self) -> dict[str, str]:
        """Return the labels about adapters; empty while engines serve none."""
        served: set[str] = set()
        names: tuple[set[str], set[str]] = (set(), set())  # Of requests that run, and that wait.
        for group in self._groups:
            adapters = group.served.adapters
            served |= adapters
            requests = group.intake.scheduler.requests
            for number, session in group.intake.sessions.items() if adapters else ():
                name = session.record.model
                if name in adapters and number in requests:
                    names[requests[number].state in _WAITING].add(name)
        if not served:
            return {}
        limits = [size.max_adapters for size in self._sizes.values() if size.max_adapters]
        return {
            "max_lora": str(min(limits, default=len(served))),
            "running_lora_adapters": _listed(names[False]),
            "waiting_lora_adapters": _listed(names[True]),
        }


def _counts(group: Group) -> tuple[int, int]:
    """Return the requests of a group that no engine has, and all of them."""
    scheduler, alone = group.intake.scheduler, group.pass_through
    waiting = scheduler.prefill_queue.waiting + len(scheduler.pool.entries) + alone.waiting
    return waiting, len(scheduler.requests) + alone.in_flight


def _share(group: Group, rank: Rank, page: EngineGauges | None, tokens: int | None) -> float:
    """Return how full a rank's KV cache is, 0 to 1; by its slots if nothing else is known."""
    load = None if page is None else load_of(rank, page)
    if load is not None:
        return load.kv_usage
    scheduler = group.intake.scheduler
    if tokens is not None:
        return min(1.0, int(scheduler.ledger.loads[rank.id]) / tokens)
    return min(1.0, int(scheduler.ledger.bound[rank.id]) / scheduler.config.batch_limit)


def _listed(names: set[str]) -> str:
    """Return names as a list has them; one with a comma would be two."""
    return ",".join([one for one in sorted(names) if "," not in one][:_MOST_ADAPTERS])
