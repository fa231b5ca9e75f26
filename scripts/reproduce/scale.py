"""Many decode groups behind a picker, in virtual time: who picks how well, and what the loss of one costs."""

import argparse
import heapq
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

import numpy as np

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.capacity import LoadFollower, sample_of
from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.subset import idle_tokens
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.engines import EventLoop, PrefillModel
from balanceroute.proxy.lab.sim.recorder import Recorder
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest
from experiment import MOONCAKE, UNLIMITED, S, requests_of, right, table_head, table_row

BATCH = 16
# What a rank of BR-0 serves of the trace when it is saturated (docs/appendix/balance.md, "Scale").
RANK_REQUESTS_PER_S = 0.63
BLOCK = 40  # Requests that stay together when the trace is drawn from.
WINDOW_S = 5.0  # Whose median time to the first token is compared with that before the loss.
BACK = 1.25  # Up to this many times of that it is back.
DRAWN = 10  # Cells that `page-and-own` looks at.


@dataclass(frozen=True, slots=True)
class Site:
    """The cells, what comes to them, and when."""

    cells: int = 16
    ranks: int = 32  # Of a cell.
    short: bool = False  # Whether every eighth cell has lost a quarter of its ranks.
    load: float = 0.75  # Of what all ranks can serve.
    gateways: int = 4  # Pickers side by side, each with its own counts.
    scrape_s: float = 1.0  # Between two looks at the pages of the cells.
    noticed_s: float = 3.0  # After which nothing is sent to a lost cell.
    retry_s: float = 1.0  # After which a client sends again what failed.
    # The window that is measured, and when a cell is lost and all ends.
    warm_s: float = 50.0
    lost_s: float = 110.0
    end_s: float = 170.0

    def ranks_of(self, cell: int) -> int:
        return self.ranks * 3 // 4 if self.short and cell % 8 == 7 else self.ranks

    @property
    def rate(self) -> float:
        """Requests a second."""
        ranks = sum(map(self.ranks_of, range(self.cells)))
        return self.load * RANK_REQUESTS_PER_S * ranks


@dataclass(frozen=True, slots=True)
class Page:
    """What a picker knows of a cell from its `/metrics`, as old as the last scrape."""

    waiting: int = 0  # vllm:num_requests_waiting.
    running: int = 0  # vllm:num_requests_running.
    ranks: int = 1
    wanted: int = 1  # balanceroute_wanted_ranks.


class Gateway:
    """What one picker knows.

    Attributes:
        own: Requests of its own that are at each cell.
        sent: Those that it sent there since the last scrape.
        pages: Of each cell.
        turn: Counts the picks.
    """

    def __init__(self, site: Site, number: int) -> None:
        self.own = [0] * site.cells
        self.sent = [0] * site.cells
        self.pages = [Page()] * site.cells
        self.turn = number * site.cells // site.gateways
        self.gateways = site.gateways

    def shown(self, cell: int) -> float:
        """Return the requests for each rank of a cell, by its page alone."""
        page = self.pages[cell]
        return (page.waiting + page.running) / page.ranks

    def counted(self, cell: int) -> float:
        """Return the same, with what this picker sent since; the rest will have sent as much."""
        return self.shown(cell) + self.gateways * self.sent[cell] / self.pages[cell].ranks


Picker = Callable[[Gateway, Sequence[int], random.Random], int]
"""Returns one of the cells that are there."""


def _least(cells: Sequence[int], key: Callable[[int], float], rng: random.Random) -> int:
    return min(cells, key=lambda cell: (key(cell), rng.random()))


def _in_turn(gateway: Gateway, cells: Sequence[int], _: random.Random) -> int:
    gateway.turn += 1
    return cells[gateway.turn % len(cells)]


def _by_wanted(gateway: Gateway, cells: Sequence[int], rng: random.Random) -> int:
    # Four fifths of what is wanted are at work: the rest of a cell's ranks is free.
    pages = map(gateway.pages.__getitem__, cells)
    free = [max(0.02 * page.ranks, page.ranks - 0.8 * page.wanted) for page in pages]
    return rng.choices(cells, free)[0]


PICKERS: Mapping[str, Picker] = {
    "random": lambda _, cells, rng: rng.choice(cells),
    "round-robin": _in_turn,
    "power-of-two": lambda gateway, cells, rng: _least(
        rng.sample(cells, min(2, len(cells))), gateway.own.__getitem__, rng
    ),
    "least-load": lambda gateway, cells, rng: _least(cells, gateway.own.__getitem__, rng),
    "page": lambda gateway, cells, rng: _least(cells, gateway.shown, rng),
    "page-and-own": lambda gateway, cells, rng: _least(
        rng.sample(cells, min(DRAWN, len(cells))), gateway.counted, rng
    ),
    "wanted": _by_wanted,
}


class Account(Recorder):
    """Reports first tokens and ends to the world, and sums up the steps of the measured window."""

    def __init__(self, world: "World", cell: int) -> None:
        super().__init__(UNLIMITED)
        self._world, self._cell = world, cell
        self.idle = self.capacity = self.tokens = 0

    def step(
        self,
        loads: Sequence[int],
        running: int,
        duration_ns: int,
        now_ns: int,
        emissions: Mapping[RequestId, int],
    ) -> None:
        super().step(loads, running, duration_ns, now_ns, emissions)
        if self._world.measures(now_ns):
            self.idle += idle_tokens(loads)
            self.capacity += len(loads) * max(loads)
            self.tokens += running

    def first_token(self, request: RequestId, now_ns: int) -> None:
        super().first_token(request, now_ns)
        self._world.first_ns.setdefault(request, now_ns)

    def finish(self, request: RequestId, output_tokens: int, now_ns: int) -> None:
        super().finish(request, output_tokens, now_ns)
        self._world.left(request, self._cell)


class Cell:
    """One decode group with its prefillers and its scheduler."""

    def __init__(self, world: "World", number: int, requests: Sequence[TraceRequest]) -> None:
        ranks = world.site.ranks_of(number)
        deployment = SimulatedDeployment(
            ranks=ranks,
            batch_limit=BATCH,
            prefill=PrefillModel(max(1, world.site.ranks // 4), 20_000_000, 20_000.0),
            transfer_base_ns=2_000_000,
            transfer_ns_per_token=1_000.0,
        )
        inputs = PolicyInputs(ranks, BATCH, PolicySettings(), random.Random(number), NoPrediction())
        self.simulation = Simulation(
            deployment, Workload(requests, []), make_policy("br-0", inputs), NoPrediction()
        )
        self.account = Account(world, number)
        self.simulation.recorder = self.account
        self.arrived = 0
        self._ranks, self._follower = ranks, LoadFollower()

    def page(self, now_ns: int) -> Page:
        """Return what the proxy's page shows."""
        scheduler = self.simulation.scheduler
        servers = scheduler.config.prefillers
        account = self.account
        self._follower.look(
            sample_of(
                scheduler,
                time_s=now_ns / S,
                arrived=self.arrived,
                prefillers=[PrefillerId(one) for one in range(servers)],
                ranks=[RankId(one) for one in range(self._ranks)],
                kv_tokens=None,
                idle=account.idle / account.capacity if account.capacity else 0.0,
            )
        )
        waiting = scheduler.prefill_queue.waiting + len(scheduler.pool.entries)
        running = len(scheduler.requests) - waiting
        return Page(waiting, running, self._ranks, self._follower.ranks or 1)


@dataclass(frozen=True, slots=True)
class Found:
    """What one picker did."""

    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    idle: float  # Share of rank time lost at the barriers.
    spread: float  # Requests sent to the cell with the most for each rank, over the mean.
    cut: float  # Share of the requests in flight that were lost with the cell.
    refused: float  # Share of those sent until it was noticed that went there.
    after_s: float  # Median time to the first token of requests in the first window after the loss.
    back_s: float  # After the loss, the end of the last window whose median was not back.


# Of each figure of `Found`: heading, unit, digits.
COLUMNS = (
    ("tokens/s", 1.0, 0),
    ("TTFT p50 s", 1.0, 2),
    ("TTFT p99 s", 1.0, 2),
    ("idle %", 100.0, 1),
    ("fullest / mean", 1.0, 2),
    ("cut %", 100.0, 1),
    ("refused %", 100.0, 1),
    ("p50 after loss s", 1.0, 2),
    ("back after s", 1.0, 0),
)


class World:
    """One run: all cells, the gateways, and the clients.

    Attributes:
        first_ns: When each request had its first token.
    """

    def __init__(self, site: Site, name: str, requests: Sequence[TraceRequest], seed: int) -> None:
        self.site = site
        self.first_ns: dict[RequestId, int] = {}
        self._requests = requests
        self._pick = PICKERS[name]
        self._rng = random.Random(f"{seed}/{name}")
        self._loop = EventLoop()
        self._cells = [Cell(self, number, requests) for number in range(site.cells)]
        self._gateways = [Gateway(site, number) for number in range(site.gateways)]
        self._alive = list(range(site.cells))  # Those that gateways take for alive.
        self._lost: int | None = None
        self._at: list[dict[RequestId, int]] = [{} for _ in self._cells]  # And whose each is.
        self._due: list[tuple[int, int]] = []  # When each cell goes on, and outdated times.
        self._sent = [0] * site.cells  # In the measured window.
        self._cut = 0.0
        self._tried = self._refused = 0  # From the loss until it was noticed.

    def measures(self, now_ns: int) -> bool:
        return self.site.warm_s * S <= now_ns < self.site.lost_s * S

    def left(self, request: RequestId, cell: int) -> None:
        """Note that a request is no longer at a cell."""
        self._gateways[self._at[cell].pop(request)].own[cell] -= 1

    def run(self) -> Found:
        """Play it, and return what came of it."""
        for number, request in enumerate(self._requests):
            self._loop.call_at(request.arrival_ns, partial(self._send, RequestId(number)))
        self._loop.call_at(0, self._scrape)
        self._loop.call_at(round(self.site.lost_s * S), self._lose)
        end_ns = round(self.site.end_s * S)
        while (now_ns := self._loop.next_ns) is not None and now_ns < end_ns:
            self._play(now_ns)
            self._loop.advance(lambda: None)
        return self._found()

    def _play(self, until_ns: int) -> None:
        """Have the cells do what comes before a time."""
        while self._due and self._due[0][0] < until_ns:
            time_ns, number = heapq.heappop(self._due)
            simulation = self._cells[number].simulation
            if number != self._lost and simulation.next_ns == time_ns:
                simulation.advance()
                if simulation.next_ns is not None:
                    heapq.heappush(self._due, (simulation.next_ns, number))

    def _send(self, request: RequestId) -> None:
        now_ns = self._loop.now_ns
        gateway = self._rng.randrange(self.site.gateways)
        view = self._gateways[gateway]
        cell = self._pick(view, self._alive, self._rng)
        view.sent[cell] += 1
        self._sent[cell] += self.measures(now_ns)
        if self._lost in self._alive:
            self._tried += 1
            self._refused += cell == self._lost
        if cell == self._lost:
            self._again(request)
            return
        view.own[cell] += 1
        self._at[cell][request] = gateway
        self._cells[cell].arrived += 1
        self._cells[cell].simulation.offer(request, now_ns)
        heapq.heappush(self._due, (now_ns, cell))

    def _again(self, request: RequestId) -> None:
        retry_ns = round(self.site.retry_s * S)
        self._loop.call_at(self._loop.now_ns + retry_ns, partial(self._send, request))

    def _scrape(self) -> None:
        now_ns = self._loop.now_ns
        for number, cell in enumerate(self._cells):
            if number != self._lost:
                page = cell.page(now_ns)
                for gateway in self._gateways:
                    gateway.pages[number], gateway.sent[number] = page, 0
        self._loop.call_at(now_ns + round(self.site.scrape_s * S), self._scrape)

    def _lose(self) -> None:
        self._lost = lost = 0
        cut = list(self._at[lost])
        self._cut = len(cut) / sum(map(len, self._at))
        for request in cut:
            self.left(request, lost)
            self._again(request)
        notice_ns = self._loop.now_ns + round(self.site.noticed_s * S)
        self._loop.call_at(notice_ns, lambda: self._alive.remove(lost))

    def _found(self) -> Found:
        arrived = np.array([one.arrival_ns for one in self._requests]) / S
        # Of one that has none yet, what it has waited.
        first = np.full(len(arrived), self.site.end_s)
        first[list(self.first_ns)] = np.array(list(self.first_ns.values())) / S
        took = first - arrived
        site, accounts = self.site, [cell.account for cell in self._cells]
        measured = took[(arrived >= site.warm_s) & (arrived < site.lost_s)]
        p50, p99 = np.percentile(measured, [50, 99])
        medians, limit = self._medians_s(arrived, took), BACK * float(p50)
        ratios = [sent / site.ranks_of(cell) for cell, sent in enumerate(self._sent)]
        ranks = sum(map(site.ranks_of, range(site.cells)))
        late = [place for place, one in enumerate(medians) if one > limit]
        return Found(
            tokens_per_s=sum(one.tokens for one in accounts) / (site.lost_s - site.warm_s),
            ttft_p50_s=float(p50),
            ttft_p99_s=float(p99),
            idle=sum(one.idle for one in accounts) / sum(one.capacity for one in accounts),
            spread=max(ratios) * ranks / sum(self._sent),
            cut=self._cut,
            refused=self._refused / self._tried,
            after_s=medians[0],
            back_s=WINDOW_S * (late[-1] + 1 if late else 0),
        )

    def _medians_s(self, arrived: "np.ndarray", took: "np.ndarray") -> list[float]:
        """Return the median of each window after the loss that ends long enough before the end."""
        starts = np.arange(self.site.lost_s, self.site.end_s - 2 * WINDOW_S, WINDOW_S)
        windows = (took[(arrived >= one) & (arrived < one + WINDOW_S)] for one in starts)
        return [float(np.median(one)) for one in windows]


def arrivals(site: Site, seed: int) -> list[TraceRequest]:
    """Return requests at random times, of the trace by blocks in a row."""
    rng, trace, drawn = random.Random(seed), requests_of(MOONCAKE), list[TraceRequest]()
    now_s = 0.0
    while True:
        start = rng.randrange(len(trace) - BLOCK)
        for request in trace[start : start + BLOCK]:
            now_s += rng.expovariate(site.rate)
            if now_s >= site.end_s:
                return drawn
            drawn.append(replace(request, arrival_ns=round(now_s * S), hash_ids=()))


def table(found: Mapping[str, Found]) -> str:
    """Return a row for each picker."""
    lines = [table_head("picker", *right([heading for heading, _, _ in COLUMNS]))]
    for name, one in found.items():
        figures = zip(astuple(one), COLUMNS, strict=True)
        cells = (f"{unit * figure:,.{digits}f}" for figure, (_, unit, digits) in figures)
        lines.append(table_row(f"`{name}`", *cells))
    return "\n".join(lines)


def scale(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Many decode groups behind pickers of several kinds, in virtual time, as docs/scale.md has them.

    Each group has a scheduler of its own, BR-0, and prefillers. Requests come at random times, drawn from
    the Mooncake trace in blocks, to gateways that pick a group for each. After the measured minute one group
    is lost. Prints a table for equal groups, and one where every eighth has lost a quarter of its ranks.
    The usual size takes minutes; --cells 64 is the full one.
    """
    usual = Site()
    parser.add_argument("--cells", type=int, default=usual.cells, help="decode groups")
    parser.add_argument("--ranks", type=int, default=usual.ranks, help="of each group")
    parser.add_argument("--load", type=float, default=usual.load, help="share of what ranks can do")
    parser.add_argument("--scrape-s", type=float, default=usual.scrape_s, help="between scrapes")
    parser.add_argument("--pickers", nargs="+", choices=PICKERS, default=list(PICKERS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    if given.cells < 2 or given.ranks < 4 or not (0 < given.load <= 2 and given.scrape_s > 0):
        parser.error("needs 2 cells or more, 4 ranks or more, a load up to 2 and time to scrape")
    site = replace(
        usual, cells=given.cells, ranks=given.ranks, load=given.load, scrape_s=given.scrape_s
    )
    for title, one in (("Equal", site), ("Unequal", replace(site, short=True))):
        requests, found = arrivals(one, given.seed), dict[str, Found]()
        for name in given.pickers:
            print(f"{title}: {name} ..", file=sys.stderr, flush=True)
            found[name] = World(one, name, requests, given.seed).run()
        print(f"{title} cells: {one.cells} of {one.ranks} ranks, load {one.load:g}\n")
        print(f"{table(found)}\n", flush=True)
    return 0
