"""Metrics of aliases of models: who answered, whether in time, and what that was worth.

The labels have the names of a topology file alone.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord

_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class AliasWorth:
    """What answers to an alias are worth.

    Attributes:
        tpot_ms: Target of the time per output token; None if there is none.
        ttft_ms: Target of the time to the first token; None if there is none.
        scores: The worth of an answer in time, by task and group; empty if it was not told.
    """

    tpot_ms: float | None
    ttft_ms: float | None
    scores: Mapping[tuple[str, str], float]

    def is_kept(self, record: "RequestRecord") -> bool:
        """Return whether a request was answered within the targets."""
        first_ns = record.first_token_ns
        if record.outcome is not Outcome.OK or first_ns is None:
            return False
        gaps = record.output_tokens / record.choices - 1
        tpot_ms = (record.ended_ns - first_ns) / _NS_PER_MS / gaps if gaps > 0 else 0.0
        ttft_ms = (first_ns - record.arrived_ns) / _NS_PER_MS
        in_time = self.ttft_ms is None or ttft_ms <= self.ttft_ms
        return in_time and (self.tpot_ms is None or tpot_ms <= self.tpot_ms)


class AliasMetrics(Collector):
    """Counts the requests that named an alias when they have ended.

    Attributes:
        worth: What answers are worth, by alias.
    """

    def __init__(self) -> None:
        self.worth: Mapping[str, AliasWorth] = {}
        self._requests: Counter[tuple[str, str, str, str]] = Counter()
        self._scores: Counter[tuple[str, str]] = Counter()
        self._fall_backs: Counter[tuple[str, str, str]] = Counter()

    def ended(self, record: "RequestRecord") -> None:
        """Count a request whose outcome is set."""
        alias, worth = record.alias, self.worth[record.alias]
        kept = worth.is_kept(record)
        in_time = "yes" if kept else "no"
        self._requests[alias, record.task, record.group, in_time] += 1
        if worth.scores:
            score = worth.scores.get((record.task, record.group), 0.0) if kept else 0.0
            self._scores[alias, record.task] += score  # type: ignore[assignment]
        for group, reason in record.fall_backs:
            self._fall_backs[alias, group, reason] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield everything; nothing where no request named an alias."""
        if not self._requests:
            return
        requests = _counter(
            "requests", "Requests that named an alias, by who answered, and whether in time."
        )
        for (alias, task, group, kept), count in self._requests.items():
            _add(requests, count, alias=alias, task=task, group=group, in_time=kept)
        scores = _counter("scores", "Worth of the answers to an alias, 0 if not in time.")
        for (alias, task), score in self._scores.items():
            _add(scores, score, alias=alias, task=task)
        fall_backs = _counter("fall_backs", "Times a request went on from a group, and why.")
        for (alias, group, reason), count in self._fall_backs.items():
            _add(fall_backs, count, alias=alias, group=group, reason=reason)
        yield from (requests, scores, fall_backs)


def _counter(name: str, documentation: str) -> Metric:
    return Metric(f"balanceroute_alias_{name}", documentation, "counter")


def _add(family: Metric, value: float, **labels: str) -> None:
    family.add_sample(f"{family.name}_total", labels, value)
