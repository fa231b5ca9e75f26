"""What a page of engine metrics says: how full its KV cache is, and how many engines it speaks for.

The page comes from outside and is read with suspicion: only the lines of the few metrics that are
wanted are looked at, and a value that cannot be true refuses the page as a whole.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from balanceroute.proxy.core.errors import BalanceRouteError

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""A longer page is refused. One of vLLM 0.32 has 65 kB for each engine."""

# vLLM renamed the metric; both are a fraction of 1, whatever "perc" promises.
_KV_CACHE_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
_WAITING, _RUNNING = b"vllm:num_requests_waiting", b"vllm:num_requests_running"
_LATE_PULLS = b"vllm:nixl_num_notifications_after_expiry_total"
_MAX_LINE_BYTES = 4096
_MAX_SAMPLES = 4096  # Of one metric.
_MAX_ENGINE_BYTES = 64
_MAX_COUNT = 1e15
# Possessive quantifiers: there is one way to read a line, and no other is tried.
_LABEL = re.compile(
    rb"[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+" rb'"((?:[^"\\]|\\.)*+)"[ \t]*+'
)
_VALUE = re.compile(rb"[ \t]*+([0-9.eE+-]++)(?:[ \t]++-?[0-9]++)?[ \t\r]*+")
_VLLM_WITHOUT_LABEL = "0"


class MetricsPageError(BalanceRouteError):
    """A page of metrics that cannot be true."""


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """What a page says.

    Attributes:
        kv_cache_usage: 0 to 1; that of the fullest engine.
        late_pulls: KV caches that were pulled after their lease had ended, since the engine started;
            None if the page does not say.
        engines: The values of the label `engine`, one for each data-parallel rank; "0" stands for a
            page without that label.
        waiting: Requests that wait, the mean over its engines; 0 if the page does not say.
        running: Requests that run, likewise.
    """

    kv_cache_usage: float
    late_pulls: int | None
    engines: frozenset[str]
    waiting: float = 0.0
    running: float = 0.0


def parse_engine_gauges(page: bytes) -> EngineGauges:
    """Read a page in the Prometheus text format, in time linear in its length.

    See https://prometheus.io/docs/instrumenting/exposition_formats/.

    Raises:
        MetricsPageError: It is too long, does not give the use of the KV cache, or holds a value
            that cannot be true.
    """
    if len(page) > MAX_PAGE_BYTES:
        raise MetricsPageError(f"more than {MAX_PAGE_BYTES} bytes")
    page = b"\n" + page
    usages = [sample for name in _KV_CACHE_USAGE for sample in _samples(page, name, largest=1.0)]
    if not usages:
        raise MetricsPageError(f"{_KV_CACHE_USAGE[0].decode()} is missing")
    return EngineGauges(
        kv_cache_usage=max(value for _, value in usages),
        late_pulls=_late_pulls(page),
        engines=frozenset(engine for engine, _ in usages),
        waiting=_mean(page, _WAITING),
        running=_mean(page, _RUNNING),
    )


def _late_pulls(page: bytes) -> int | None:
    values = [value for _, value in _samples(page, _LATE_PULLS, largest=_MAX_COUNT)]
    return int(sum(values)) if values else None


def _mean(page: bytes, name: bytes) -> float:
    values = [value for _, value in _samples(page, name, largest=_MAX_COUNT)]
    return sum(values) / len(values) if values else 0.0


def _samples(page: bytes, name: bytes, *, largest: float) -> Iterator[tuple[str, float]]:
    """Yield the engine and the value of every sample of a metric. Lines begin after a newline."""
    found = 0
    start = page.find(b"\n" + name)
    while start >= 0:
        rest = start + 1 + len(name)
        # One byte too many tells a line that is too long.
        end = page.find(b"\n", rest, rest + _MAX_LINE_BYTES + 1)
        line = page[rest:end] if end >= 0 else page[rest : rest + _MAX_LINE_BYTES + 1]
        # Another metric may begin with this one's name.
        if line[:1] in {b"{", b" ", b"\t"}:
            found += 1
            if found > _MAX_SAMPLES:
                raise MetricsPageError(f"{name.decode()} has over {_MAX_SAMPLES} samples")
            try:
                yield _sample(line, largest)
            except ValueError as error:
                raise MetricsPageError(f"{name.decode()}: {error}") from error
        start = page.find(b"\n" + name, rest)


def _sample(line: bytes, largest: float) -> tuple[str, float]:
    """Read what follows a metric's name on its line.

    Raises:
        ValueError: It is not a sample, or one that cannot be true.
    """
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError(f"a line of over {_MAX_LINE_BYTES} bytes")
    engine, at = _engine(line) if line.startswith(b"{") else (_VLLM_WITHOUT_LABEL, 0)
    number = _VALUE.fullmatch(line, at)
    # NaN and infinity are spelled with other letters, and so no number here.
    if number is None:
        raise ValueError("not a finite number")
    value = float(number[1])
    if not 0.0 <= value <= largest:
        raise ValueError(f"{value:g} is not in 0..{largest:g}")
    return engine, value


def _engine(line: bytes) -> tuple[str, int]:
    """Return the label `engine` and where the label set ends.

    Raises:
        ValueError: The label set is malformed.
    """
    engine = _VLLM_WITHOUT_LABEL
    at = 1
    while not line.startswith(b"}", at):
        label = _LABEL.match(line, at)
        if label is None:
            raise ValueError("malformed labels")
        at = label.end()
        if line.startswith(b",", at):
            at += 1
        elif not line.startswith(b"}", at):
            raise ValueError("malformed labels")
        if label[1] == b"engine":
            if len(label[2]) > _MAX_ENGINE_BYTES:
                raise ValueError("the label engine is too long")
            engine = label[2].decode()
    return engine, at + 1
