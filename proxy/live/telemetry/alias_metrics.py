"""Metrics of aliases of models: who answered, whether in time, and what that was worth.

The labels have the names of a topology file alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.live.telemetry.registry import Totals

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
        self._requests = Totals(
            "balanceroute_alias_requests",
            "Requests that named an alias, by who answered, and whether in time.",
            *("alias", "task", "group", "in_time"),
        )
        self._scores = Totals(
            "balanceroute_alias_scores",
            "Worth of the answers to an alias, 0 if not in time.",
            *("alias", "task"),
        )
        self._fall_backs = Totals(
            "balanceroute_alias_fall_backs",
            "Times a request went on from a group, and why.",
            *("alias", "group", "reason"),
        )

    def ended(self, record: "RequestRecord") -> None:
        """Count a request whose outcome is set."""
        alias, worth = record.alias, self.worth[record.alias]
        kept = worth.is_kept(record)
        self._requests.add(1, alias, record.task, record.group, "yes" if kept else "no")
        if worth.scores:
            score = worth.scores.get((record.task, record.group), 0.0) if kept else 0.0
            self._scores.add(score, alias, record.task)
        for group, reason in record.fall_backs:
            self._fall_backs.add(1, alias, group, reason)

    def collect(self) -> Iterator[Metric]:
        """Yield everything; nothing where no request named an alias."""
        if self._requests.by_values:
            for one in (self._requests, self._scores, self._fall_backs):
                yield one.family()
