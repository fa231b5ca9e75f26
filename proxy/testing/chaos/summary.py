"""The sum of many runs, as a table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from balanceroute.proxy.testing.chaos.trial import Report


@dataclass(slots=True)
class Summary:
    """The sum of many runs."""

    seeds: int = 0
    requests: int = 0
    virtual_s: float = 0.0
    weathers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    violations: dict[int, list[str]] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Count one run."""
        self.seeds += 1
        self.requests += report.requests
        self.virtual_s += report.virtual_s
        self.weathers[report.weather] += 1
        self.faults += report.faults
        self.outcomes += report.outcomes
        self.endings += report.endings
        self.cancelled += report.cancelled
        self.counters += report.counters
        if report.violations:
            self.violations[report.seed] = report.violations

    def lines(self) -> Iterable[str]:
        """Yield the table's lines."""
        yield f"seeds           {self.seeds}  ({_listed(self.weathers)})"
        yield f"requests        {self.requests}"
        yield f"virtual time    {self.virtual_s:.0f} s"
        yield f"faults          {sum(self.faults.values())}, of {len(self.faults)} kinds:"
        for kind, count in sorted(self.faults.items()):
            yield f"  {count:6}  {kind}"
        yield "outcomes, by the proxy's log:"
        for outcome, count in self.outcomes.most_common():
            yield f"  {count:6}  {outcome}"
        yield "endings, as the clients saw them:"
        for ending, count in self.endings.most_common():
            yield f"  {count:6}  {ending}"
        yield f"left by clients {_listed(self.cancelled)}"
        yield f"sums            {_listed(self.counters)}"
        yield f"violations      {sum(map(len, self.violations.values()))}"
        for seed, found in sorted(self.violations.items()):
            for violation in found:
                yield f"  seed {seed}: {violation}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
