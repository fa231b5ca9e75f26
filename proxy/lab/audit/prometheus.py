"""The same looks at all engines, out of a Prometheus server that scraped them.

Source of the interface: https://prometheus.io/docs/prometheus/latest/querying/api/, range queries.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.audit.observation import (
    METRICS,
    Look,
    PageError,
    PageSample,
    RankPage,
    pages_of,
)
from balanceroute.proxy.page_client import UnansweredError, root_of

if TYPE_CHECKING:
    from balanceroute.proxy.page_client import PageClient


_MAX_ANSWER_BYTES = 256 << 20
_MOST_NAMED = 5


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Matrix(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    status: str
    data: _Matrix | None = None
    error: str = ""


class PrometheusWindow(NamedTuple):
    """When to look: from the first second since 1970 to the last, every so many seconds."""

    begin_s: float
    end_s: float
    step_s: float


async def looks_of(
    server: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    window: PrometheusWindow,
    pages: "PageClient",
) -> list[Look]:
    """Return the looks that the samples of a server are, at a URL that may have a path.

    Addresses are http://host:port; a series belongs to one by its label `instance`, which is host:port.

    Raises:
        ConfigError: The server cannot be read, or has nothing of an engine.
    """
    instances = {url: _instance(url) for url in (*prefill, *decode)}
    series = await _query(server, instances.values(), window, pages)
    _check(instances, series)
    found: dict[float, dict[str, list[PageSample]]] = {}
    for one in series:
        labels = one.metric
        name, instance = labels["__name__"], labels["instance"]
        for time_s, value in one.values:
            at = found.setdefault(time_s, {}).setdefault(instance, [])
            at.append(PageSample(name, labels, float(value)))
    looks, fault = list[Look](), None
    for time_s, seen in sorted(found.items()):
        if seen.keys() >= set(instances.values()):
            try:
                ranks = _ranks(decode, instances, seen), _ranks(prefill, instances, seen)
            except ConfigError as error:
                # An engine that has just started does not report all yet.
                fault = error
                continue
            looks.append(Look(time_s, *ranks))
    if fault is not None and not looks:
        raise fault
    return _changed(looks)


async def _query(
    server: str, instances: Iterable[str], window: PrometheusWindow, pages: "PageClient"
) -> list[_Series]:
    try:
        root = root_of(server)
    except ConfigError as error:
        raise ConfigError(f"--prometheus {error}") from None
    names, engines = _any_of(METRICS, "(_bucket|_sum)?"), _any_of(instances)
    form = {
        "query": f'{{__name__=~"{names}",instance=~"{engines}"}}',
        "start": f"{window.begin_s:.3f}",
        "end": f"{window.end_s:.3f}",
        "step": f"{window.step_s:g}",
    }
    try:
        answer = await pages.ask(
            "POST", f"{root}/api/v1/query_range", form=form, max_bytes=_MAX_ANSWER_BYTES
        )
    except UnansweredError as error:
        raise ConfigError(f"--prometheus: {server}: {error}") from None
    try:
        reply = msgspec.json.decode(answer.body, type=_Answer)
    except (ValueError, RecursionError):
        reason = f"status {answer.status}, and no answer of Prometheus"
        raise ConfigError(f"--prometheus: {server}: {reason}") from None
    if reply.data is None:
        raise ConfigError(f"--prometheus: {server}: {reply.error or reply.status}")
    return reply.data.result


def _any_of(words: Iterable[str], end: str = "") -> str:
    """Return a pattern of these words, as a string of PromQL holds it."""
    pattern = "|".join(re.escape(word) for word in words)
    return f"({pattern}){end}".replace("\\", "\\\\").replace('"', '\\"')


def _check(instances: dict[str, str], series: list[_Series]) -> None:
    known = {one.metric["instance"] for one in series}
    missing = [instance for instance in instances.values() if instance not in known]
    if missing:
        raise ConfigError(
            f"--prometheus: it has no metrics of vLLM or SGLang of the instance {missing[0]} then "
            f"({', '.join(sorted(known)[:_MOST_NAMED]) or 'none of any engine'})"
        )


def _instance(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not http://host:port")
    return parts.netloc


def _ranks(
    urls: Sequence[str], instances: dict[str, str], samples: dict[str, list[PageSample]]
) -> dict[str, RankPage]:
    ranks: dict[str, RankPage] = {}
    for url in urls:
        try:
            page = pages_of(samples[instances[url]])
        except PageError as error:
            raise ConfigError(f"--prometheus: {instances[url]}: {error}") from None
        for rank, one in page.items():
            ranks[url if len(page) == 1 else f"{url}@{rank}"] = one
    return ranks


def _changed(looks: list[Look]) -> list[Look]:
    """Leave out looks that repeat the one before: the server has scraped nothing since."""
    kept = looks[:1]
    for look in looks[1:]:
        if (look.decode, look.prefill) != (kept[-1].decode, kept[-1].prefill):
            kept.append(look)
    names = set(kept[0].decode) | set(kept[0].prefill) if kept else set()
    # An engine that restarted meanwhile may report other ranks.
    return [look for look in kept if look.decode.keys() | look.prefill.keys() == names]
