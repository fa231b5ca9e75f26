"""Where metrics are made and kept until Prometheus asks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# The Prometheus text format, written fast enough for the event loop.
#
# While a page is written no stream moves: the client library's writer takes 7 ms for 320 ranks,
# this one 2. It leaves out the `_created` samples: the text format does not need them, and they
# would make the pages of two equal runs differ.

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""The `content-type` of a page."""

_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
# The families of the library that the text format knows under another name.
_TEXT_TYPES = {"unknown": "untyped", "info": "gauge", "stateset": "gauge"}
_TEXT_SUFFIXES = {"counter": "_total", "info": "_info"}


def render(registry: CollectorRegistry) -> bytes:
    """Return everything a registry holds, in the text format 0.0.4.

    See https://prometheus.io/docs/instrumenting/exposition_formats/.
    """
    # All families stay alive until the end: the cache below knows label sets by their identity.
    families = list(registry.collect())
    label_texts: dict[int, str] = {}
    pieces: list[str] = []
    for family in families:
        name = family.name + _TEXT_SUFFIXES.get(family.type, "")
        pieces.append(
            f"# HELP {name} {family.documentation.translate(_HELP_ESCAPES)}\n"
            f"# TYPE {name} {_TEXT_TYPES.get(family.type, family.type)}\n"
        )
        created = f"{family.name}_created"
        for sample in family.samples:
            if sample.name == created:
                continue
            labels = sample.labels
            text = ""
            if labels:
                # The samples of one rank share one label set, which is then escaped once.
                text = label_texts.get(id(labels), "")
                if not text:
                    text = label_texts[id(labels)] = _labels_text(labels)
            pieces.append(f"{sample.name}{text} {_number(sample.value)}\n")
    return "".join(pieces).encode()


def _labels_text(labels: dict[str, str]) -> str:
    pairs = ",".join(
        f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in labels.items()
    )
    return f"{{{pairs}}}"


def _number(value: float) -> str:
    if type(value) is int or math.isfinite(value):
        return repr(value)
    if math.isnan(value):
        return "NaN"
    return "+Inf" if value > 0 else "-Inf"


OTHER = "other"
"""The label value of all that has none of its own."""

MAX_REASONS = 32
MAX_ENGINES = 1024
"""Of each role, as label values."""
MAX_TENANTS = 256

NS_PER_S = 1e9
# Values that a histogram counts together.
_TOGETHER = 128
REQUEST_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0),
    *(5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0),
)
TOKEN_GAP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
WORK_BOUNDS_S = (
    *(1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 4.0, 10.0)
TOKENS_BOUNDS = tuple(float(4**power) for power in range(11))


class CappedLabel:
    """Lets the first `limit` distinct values through; any further one is `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def of(self, value: str, *, learn: bool = True) -> str:
        """Return the label of a value; one that is new counts only if it is to be learned."""
        if value in self._known:
            return value
        if not learn or not value or len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value


class Histogram:
    """Counts per bucket of the values observed.

    The client library's histogram takes a lock per value; this one belongs to the event loop's
    thread alone. It counts many values together, which costs a fraction for each.

    Attributes:
        bounds: Upper ends of the buckets, inclusive and ascending; a last bucket has none.
        beside: Returns the counts made elsewhere since the last call, by bucket, and their sum; None for
            none.
    """

    __slots__ = ("_counts", "_ends", "_new", "_refused", "_total", "beside", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self._ends = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0
        # Values left out because they were negative or not finite: they would spoil the sum for ever.
        self._refused = 0
        self._new: list[float] = []
        self.beside: Callable[[], tuple[list[int], float]] | None = None

    def observe(self, value: float) -> None:
        new = self._new
        new.append(value)
        if len(new) >= _TOGETHER:
            self.counted()

    def counted(self) -> tuple[list[int], float, int]:
        """Return the values per bucket, not cumulated, their sum, and how many were refused."""
        if self._new:
            values = np.array(self._new, np.float64)
            taken = values[(values >= 0.0) & (values < np.inf)]
            buckets = np.searchsorted(self._ends, taken)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self._total += float(taken.sum())
            self._refused += len(values) - len(taken)
            self._new.clear()
        if self.beside is not None:
            self.add(*self.beside(), 0)
        return self._counts.tolist(), self._total, self._refused

    def add(self, counts: Sequence[int], total: float, refused: int) -> None:
        self._counts += counts
        self._total += total
        self._refused += refused

    def take(self) -> tuple[list[int], float, int]:
        taken = self.counted()
        self._counts[:], self._total, self._refused = 0, 0.0, 0
        return taken

    def samples(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulated buckets, each with its upper end as text, and the sum."""
        counts, total, _ = self.counted()
        bounds = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(counts), strict=True)), total


class Totals:
    """The counters of one name, by the values of labels."""

    def __init__(self, name: str, documentation: str, *labels: str) -> None:
        self._name, self._documentation = f"balanceroute_{name}", documentation
        self._labels = labels
        self.by_values: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *values: str) -> None:
        self.by_values[values] = self.by_values.get(values, 0) + amount

    def family(self) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, total in self.by_values.items():
            family.add_metric(values, total)
        return family


class Histograms:
    """The histograms of one name, by the values of labels."""

    def __init__(
        self, name: str, documentation: str, bounds: tuple[float, ...], *labels: str
    ) -> None:
        self._name, self._documentation = f"balanceroute_{name}", documentation
        self._bounds, self._labels = bounds, labels
        self.by_values: dict[tuple[str, ...], Histogram] = {}

    def of(self, *values: str) -> Histogram:
        histogram = self.by_values.get(values)
        if histogram is None:
            histogram = self.by_values[values] = Histogram(self._bounds)
        return histogram

    def total(self) -> Histogram:
        total = Histogram(self._bounds)
        for histogram in self.by_values.values():
            total.add(*histogram.counted())
        return total

    def family(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, histogram in sorted(self.by_values.items()):
            family.add_metric(values, *histogram.samples())
        return family


class _HistogramCollector(Collector):
    """Exports the histograms that the driver feeds."""

    def __init__(self) -> None:
        self.families: list[Histograms] = []

    def collect(self) -> Iterator[Metric]:
        count = 0
        for family in self.families:
            yield family.family()
            count += sum(histogram.counted()[2] for histogram in family.by_values.values())
        yield CounterMetricFamily(
            "balanceroute_refused_observations",
            "Values no histogram took because they were negative or not finite.",
            count,
        )


class Registry:
    """All metrics of one proxy."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.register = self._registry.register  # Exports what a collector yields too.
        self._histograms = _HistogramCollector()
        self._registry.register(self._histograms)

    def counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"balanceroute_{name}", documentation, labels, registry=self._registry)

    def histogram(self, name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
        return self.histograms(name, documentation, bounds).of()

    def histograms(
        self, name: str, documentation: str, bounds: tuple[float, ...], *labels: str
    ) -> Histograms:
        family = Histograms(name, documentation, bounds, *labels)
        self._histograms.families.append(family)
        return family

    def collect_process(self) -> None:
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        return render(self._registry)


def counts_by(name: str, documentation: str, label: str, counts: Mapping[str, int]) -> Metric:
    labels = [{label: value} for value in counts]
    return family("counter", name, documentation, labels, list(counts.values()))


def family(
    kind: str,
    name: str,
    documentation: str,
    labels: Sequence[dict[str, str]],
    values: Sequence[float | None],
) -> Metric:
    """Return one family; None has no sample."""
    found = Metric(f"balanceroute_{name}", documentation, kind)
    sample_name = f"{found.name}_total" if kind == "counter" else found.name
    found.samples = [
        Sample(sample_name, label, value)
        for label, value in zip(labels, values, strict=True)
        if value is not None
    ]
    return found
