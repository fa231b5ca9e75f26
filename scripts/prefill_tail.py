"""Print what the slowest requests of conversations wait for, under each choice of a prefiller.

    python scripts/prefill_tail.py

The load, the prefillers and their caches are those of `turns` in `reproduce_results.py`, with the
prefillers alone: no transfer and no decode rank, some 15 ms of the time to first token. Beside three
of the proxy's choices:

- `ends first`: where the prefill ends first, with the work and the caches as they are;
- `best of N`: the delay R of the request there, to a power, times 1 + a s / m for what its s delays others
  at a mean of m, as `prefix-aware` has it, likewise with the work and the caches as they are; of N such
  rules that of the lowest p99, chosen for each row by hindsight;
- `one queue`: one cache of everything for all prefillers, of which a free one takes the next request;
- `alone`: likewise, and a prefiller for each request.
"""

import heapq
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from balanceroute.proxy.core.events import PrefillDone, PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill import (
    PREFILL_CHOICES,
    PrefillChoice,
    PrefillInputs,
    PrefillRequest,
)
from balanceroute.proxy.lab.sim.engines import PrefillModel, PrefixCache
from balanceroute.traces import TraceRequest

sys.path.insert(0, str(Path(__file__).parent / "table_runs"))

from conversations import (
    BLOCK_TOKENS,
    CONVERSATIONS,
    PREFILL_BASE_MS,
    PREFILL_TOKEN_US,
    TURN_CACHE_TOKENS,
    TURN_CASES,
    conversations,
    turns_rate,
)

_RULES = ("cache-aware", "lmetric", "prefix-aware")
# Of the requests, in order of arrival: the fleet is empty before.
_WARM_UP = 0.1
_TAIL = 0.01
_WEIGHTS, _POWERS = (0.5, 1.0, 2.0, 4.0, 9.0), (1, 2)
_BEST = f"best of {len(_WEIGHTS) * len(_POWERS)}"
_HEADINGS = (
    *("prefillers", "load", "choice", "p50 s", "p99 s", "slowest 1 %: wait s", "own s"),
    *("first turns %", "elsewhere sooner %", "by s"),
)


class Served(NamedTuple):
    """One request's prefill, in seconds; `late_s` is by how much it would have ended sooner elsewhere."""

    wait_s: float
    own_s: float
    late_s: float
    first: bool

    @property
    def total_s(self) -> float:
        """From the arrival to the end."""
        return self.wait_s + self.own_s


@dataclass
class Fleet:
    """Prefillers that compute in the order in which they were asked, as a choice sees them."""

    model: PrefillModel
    direct: Sequence[int] = ()
    held_tokens: list[int] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)
    free_ns: list[int] = field(default_factory=list)
    caches: list[PrefixCache] = field(default_factory=list)

    def __post_init__(self) -> None:
        servers, blocks = self.model.servers, None
        if self.model.cache_tokens is not None:
            blocks = self.model.cache_tokens // self.model.block_tokens
        self.direct = [0] * servers
        self.held_tokens, self.prefills, self.free_ns = ([0] * servers for _ in range(3))
        self.caches = [PrefixCache(blocks, self.model.block_tokens) for _ in range(servers)]

    def ends_ns(self, prefiller: int, request: TraceRequest, now_ns: int) -> int:
        """Return when a prefiller would have computed a prompt."""
        return max(now_ns, self.free_ns[prefiller]) + self.service_ns(prefiller, request)

    def service_ns(self, prefiller: int, request: TraceRequest) -> int:
        """Return how long a prefiller would compute a prompt."""
        full, most = self.full(request), (request.prompt_tokens - 1) // self.model.block_tokens
        cached = self.model.block_tokens * min(self.caches[prefiller].leading(full), most)
        return self.model.service_ns(request.prompt_tokens - cached)

    def full(self, request: TraceRequest) -> tuple[int, ...]:
        """Return the full blocks of a prompt."""
        return request.hash_ids[: request.prompt_tokens // self.model.block_tokens]


class Exact:
    """The prefiller with the least R ** power x (1 + weight x s / m); of equal ones that idle longest.

    All of it is known: R, s and the mean m.
    """

    observer = None

    def __init__(
        self,
        fleet: Fleet,
        requests: Sequence[TraceRequest],
        weight: float = 0.0,
        power: float = 1,
        mean_ns: float = 1.0,
    ) -> None:
        self._fleet, self._requests = fleet, requests
        self._weight, self._power, self._mean_ns = weight, power, mean_ns

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: object
    ) -> PrefillerId:
        """See `PrefillChoice`."""
        del view
        fleet, traced = self._fleet, self._requests[request.request]

        def cost(one: PrefillerId) -> tuple[float, int]:
            done_ns = fleet.ends_ns(one, traced, request.now_ns) - request.now_ns
            others = self._weight * fleet.service_ns(one, traced) / self._mean_ns
            return done_ns**self._power * (1.0 + others), fleet.free_ns[one]

        return min(candidates, key=cost)


def play(
    requests: Sequence[TraceRequest], rate: float, fleet: Fleet, choice: PrefillChoice
) -> list[Served]:
    """Return what became of each request."""
    model, served = fleet.model, list[Served]()
    under_way: list[tuple[int, RequestId, PrefillerId, int]] = []
    everybody = [PrefillerId(one) for one in range(model.servers)]
    seen: set[int] = set()
    for number, request in enumerate(requests):
        now_ns = round(request.arrival_ns / rate)
        while under_way and under_way[0][0] <= now_ns:
            end_ns, done, where, cached = heapq.heappop(under_way)
            fleet.prefills[where] -= 1
            fleet.held_tokens[where] -= requests[done].prompt_tokens
            if choice.observer is not None:
                event = PrefillDone(done, requests[done].prompt_tokens, None, cached)
                choice.observer(event, (), end_ns)
        tokens, full = request.prompt_tokens, fleet.full(request)
        ticket = Ticket(tokens, blocks=full, block_tokens=model.block_tokens)
        asked = PrefillRequest(RequestId(number), ticket, tokens, now_ns)
        where = choice.choose(asked, everybody, fleet)
        soonest_ns = min(fleet.ends_ns(one, request, now_ns) for one in everybody)
        cached = fleet.caches[where].use(full, tokens)
        begin_ns = max(now_ns, fleet.free_ns[where])
        end_ns = fleet.free_ns[where] = begin_ns + model.service_ns(tokens - cached)
        fleet.prefills[where] += 1
        fleet.held_tokens[where] += tokens
        heapq.heappush(under_way, (end_ns, RequestId(number), where, cached))
        # The system prompts have four blocks, and the first turn little more.
        first = not seen.intersection(full[4:])
        seen.update(full)
        waited_s, own_s = (begin_ns - now_ns) / 1e9, (end_ns - begin_ns) / 1e9
        served.append(Served(waited_s, own_s, (end_ns - soonest_ns) / 1e9, first))
    return served


def cells(served: Sequence[Served]) -> list[str]:
    """Return a row's figures."""
    steady = served[round(_WARM_UP * len(served)) :]
    times = np.percentile([one.total_s for one in steady], [50, 99])
    slowest = sorted(steady, key=lambda one: one.total_s)[-round(_TAIL * len(steady)) :]
    late = [one.late_s for one in slowest if one.late_s > 0.0]
    return [
        *(f"{time:.3f}" for time in times),
        f"{np.mean([one.wait_s for one in slowest]):.3f}",
        f"{np.mean([one.own_s for one in slowest]):.3f}",
        f"{100 * np.mean([one.first for one in slowest]):.0f}",
        f"{100 * len(late) / len(slowest):.0f}",
        f"{np.mean(late or [0.0]):.3f}",
    ]


def pooled(
    requests: Sequence[TraceRequest], rate: float, model: PrefillModel, servers: int
) -> list[Served]:
    """Return what becomes of each request if one cache of everything serves all prefillers."""
    fleet = Fleet(replace(model, servers=1, cache_tokens=None))
    free_ns, served = [0] * servers, list[Served]()
    for request in requests:
        now_ns = round(request.arrival_ns / rate)
        own_ns = fleet.service_ns(0, request)
        fleet.caches[0].use(fleet.full(request), request.prompt_tokens)
        begin_ns = max(now_ns, heapq.heappop(free_ns))
        heapq.heappush(free_ns, begin_ns + own_ns)
        served.append(Served((begin_ns - now_ns) / 1e9, own_ns / 1e9, 0.0, first=False))
    return served


def rows(
    requests: Sequence[TraceRequest], rate: float, model: PrefillModel
) -> Iterator[tuple[str, list[Served]]]:
    """Yield what becomes of the requests under each choice."""
    for name in _RULES:
        inputs = PrefillInputs(random.Random(0))
        yield name, play(requests, rate, Fleet(model), PREFILL_CHOICES[name](inputs))

    def exact(*settings: float) -> list[Served]:
        fleet = Fleet(model)
        return play(requests, rate, fleet, Exact(fleet, requests, *settings))

    alone = pooled(requests, rate, model, len(requests))
    mean_ns = 1e9 * float(np.mean([one.own_s for one in alone]))
    yield "ends first", exact()
    tried = [exact(weight, power, mean_ns) for weight in _WEIGHTS for power in _POWERS]
    yield _BEST, min(tried, key=lambda served: float(cells(served)[1]))
    yield "one queue", pooled(requests, rate, model, model.servers)
    yield "alone", alone


def main() -> int:
    """Play every case with every choice."""
    requests = conversations(CONVERSATIONS)
    print("| " + " | ".join(_HEADINGS) + " |")
    print("| ---: | ---: | --- |" + " ---: |" * (len(_HEADINGS) - 3))
    for prefillers, load in TURN_CASES:
        base_ns, token_ns = round(1e6 * PREFILL_BASE_MS), 1e3 * PREFILL_TOKEN_US
        model = PrefillModel(prefillers, base_ns, token_ns, TURN_CACHE_TOKENS, BLOCK_TOKENS)
        for name, served in rows(requests, turns_rate(prefillers, load), model):
            figures = " | ".join(cells(served))
            print(f"| {prefillers} | {load} | `{name}` | {figures} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
