"""Metrics of several groups behind one proxy: what became of the requests of each.

The label `group` has the names of the groups, which clients do not make.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.live.telemetry.registry import (
    NS_PER_S,
    REQUEST_BOUNDS_S,
    TOKEN_GAP_BOUNDS_S,
    Histograms,
    Totals,
)

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord


class GroupMetrics(Collector):
    """Counts the requests that a group had when they have ended."""

    def __init__(self) -> None:
        self._requests = Totals(
            "balanceroute_group_requests",
            "Requests ended or refused, by the group that had them last.",
            *("group", "outcome"),
        )
        self._output_tokens = Totals(
            "balanceroute_group_output_tokens", "Tokens that reached clients, by group.", "group"
        )
        self._ttft = Histograms(
            "balanceroute_group_time_to_first_token_seconds",
            "Arrival to the first token, by the group that answered.",
            REQUEST_BOUNDS_S,
            "group",
        )
        self._tpot = Histograms(
            "balanceroute_group_time_per_output_token_seconds",
            "Mean gap after the first token, requests that ended well, by the group that answered.",
            TOKEN_GAP_BOUNDS_S,
            "group",
        )

    def ended(self, record: "RequestRecord") -> None:
        """Count a request whose outcome is set."""
        assert record.outcome is not None
        group = record.group
        self._requests.add(1, group, record.outcome.value)
        self._output_tokens.add(record.output_tokens, group)
        if record.first_token_ns is None:
            return
        self._ttft.of(group).observe((record.first_token_ns - record.arrived_ns) / NS_PER_S)
        gaps = record.output_tokens / record.choices - 1
        if record.outcome is Outcome.OK and gaps > 0:
            self._tpot.of(group).observe(
                (record.ended_ns - record.first_token_ns) / NS_PER_S / gaps
            )

    def collect(self) -> Iterator[Metric]:
        """Yield everything; nothing where no group had a request."""
        if self._requests.by_values:
            for one in (self._requests, self._output_tokens, self._ttft, self._tpot):
                yield one.family()
