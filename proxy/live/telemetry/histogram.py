"""A histogram that is cheap enough to be fed once per streamed chunk."""

import math
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts per bucket of the values observed.

    The client library's histogram takes a lock per value; this one belongs to the event loop's
    thread alone and costs a third of it.

    Attributes:
        bounds: Upper ends of the buckets, inclusive and ascending; a last bucket has none.
        counts: Values per bucket, not cumulated.
        total: Sum of the values.
        refused: Values left out because they were negative or not finite: they would spoil the sum
            for ever.
    """

    __slots__ = ("bounds", "counts", "refused", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.refused = 0

    def observe(self, value: float) -> None:
        """Count one value."""
        if 0.0 <= value < math.inf:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value
        else:
            self.refused += 1

    def samples(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulated buckets, each with its upper end as text, and the sum."""
        buckets: list[tuple[str, float]] = []
        cumulated = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            cumulated += count
            buckets.append(("+Inf" if bound == math.inf else repr(float(bound)), cumulated))
        return buckets, self.total

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """Return this histogram as a family without labels."""
        buckets, total = self.samples()
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=total)
