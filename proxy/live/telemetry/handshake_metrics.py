"""Metrics of HTTP/3's handshakes, where it is on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Handshakes:
    """What became of handshakes. Counters are since start.

    Attributes:
        open: Those that are not over.
        retries: Newcomers that were told to show that they receive at their address.
        ended_badly: Newcomers that got no connection, by reason: `crowd` were not taken, `late` took too
            long, `failed` ended otherwise.
    """

    open: int
    retries: int
    ended_badly: dict[str, int]


class HandshakeMetrics(Collector):
    """Exports them.

    Args:
        count: Returns them.
    """

    def __init__(self, count: Callable[[], Handshakes]) -> None:
        self._count = count

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each figure."""
        handshakes = self._count()
        yield GaugeMetricFamily(
            "balanceroute_http3_open_handshakes",
            "Handshakes of HTTP/3 that are not over.",
            handshakes.open,
        )
        yield CounterMetricFamily(
            "balanceroute_http3_retries",
            "Newcomers over HTTP/3 that had to show their address (Retry).",
            handshakes.retries,
        )
        ended_badly = CounterMetricFamily(
            "balanceroute_http3_failed_handshakes",
            "Newcomers over HTTP/3 that got no connection, for the reason given.",
            labels=["reason"],
        )
        for reason, count in handshakes.ended_badly.items():
            ended_badly.add_metric([reason], count)
        yield ended_badly
