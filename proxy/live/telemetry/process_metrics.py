"""CPU time, memory and open files of several processes."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class ProcessesCollector(Collector):
    """Exports what the client library exports of its own process, of each by name.

    Args:
        processes: Returns the numbers of the processes, by name.
    """

    def __init__(self, processes: Callable[[], Mapping[str, int]]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each figure, with a sample for each process."""
        families: dict[str, Metric] = {}
        for name, pid in self._processes().items():
            for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.add_sample(sample.name, {"process": name}, sample.value)
        yield from families.values()
