"""Who computes prompts: choices of a prefiller, and ranks that compute short ones."""

import argparse
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.support.arguments import positive

from balanceroute.proxy.core.events import (
    EngineLoad,
    PrefillDone,
    PrefillerId,
    PrefillerScraped,
    RequestId,
    Ticket,
)
from balanceroute.proxy.core.prefill import (
    PREFILL_CHOICES,
    PrefillChoice,
    PrefillInputs,
    PrefillRequest,
    ScoreSettings,
)
from balanceroute.proxy.lab.sim.engines import EventLoop, PrefillModel, PrefixCache
from balanceroute.traces import TraceRequest, write_native
from experiment import (
    AZURE_CONV,
    measured,
    requests_of,
    right,
    simulated,
    table_head,
    table_row,
    tabulated,
)
from reproduce.overload import MS, Answered, Engine, Machine
from reproduce.turns import (
    BLOCK_TOKENS,
    CONVERSATIONS,
    PREFILL_BASE_MS,
    PREFILL_TOKEN_US,
    TURN_CACHE_TOKENS,
    TURN_CASES,
    conversations,
    turns_rate,
)

PREFILLERS, BASE_MS, TOKEN_US = 4, 20.0, 50.0
COMMAND = (
    f"--policy br-0 --ranks 8 --batch 64 --step-base-ms 10 --step-us-per-token 0.02 "
    f"--prefill-servers {PREFILLERS} --prefill-base-ms {BASE_MS} --prefill-us-per-token {TOKEN_US} "
    "--probe-limit none --transfer-base-ms 2 --transfer-us-per-token 1 --segments 4"
)
RULES = {
    "none": "",
    "all short": "--local-prefill-tokens 1000 --local-prefill-always",
    "where it pays": "--local-prefill-tokens 1000",
}
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
REQUESTS = 12_000
COLUMNS = (
    ("latency s, mean", measured("latency_s_mean", 2)),
    ("TTFT p50 s", measured("ttft_s_p50", 2)),
    ("TTFT p95 s", measured("ttft_s_p95", 2)),
    ("TPOT p50 ms", measured("tpot_ms_p50", 1)),
    ("TPOT p95 ms", measured("tpot_ms_p95", 1)),
    ("output tokens/s", measured("output_tokens_per_s", 0)),
)


def mixed(short: float, load: float) -> list[TraceRequest]:
    """Return requests of which a share has short prompts."""
    rng = random.Random(f"{short} short")
    prompts = [
        rng.randint(50, 1_000) if rng.random() < short else rng.randint(3_000, 13_000)
        for _ in range(REQUESTS)
    ]
    work_ms = sum(BASE_MS + TOKEN_US * prompt / 1e3 for prompt in prompts)
    gap_ns = 1e6 * work_ms / REQUESTS / PREFILLERS / load
    now_ns, requests = 0.0, []
    for prompt in prompts:
        now_ns += rng.expovariate(1.0 / gap_ns)
        output = 1 + min(2_000, int(rng.expovariate(1 / 200)))
        requests.append(TraceRequest(int(now_ns), prompt, output))
    return requests


def local_prefill(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Print what it brings that ranks compute short prompts, by the share of short prompts, as Markdown.

    Prompts are short (50 to 1,000 tokens) or long (3,000 to 13,000), all equally likely, outputs 200 tokens on
    average, arrivals random. Their rate makes the work of all prompts U of what the prefillers can do.
    Each row is a `balanceroute simulate` command on a trace in OUT_DIR: no rank computes a prompt, ranks
    compute all short ones, or those that delay all requests less so.
    """
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--load", type=float, default=0.9, metavar="U")
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for share in SHARES:
        trace = arguments.out / f"short_{share:g}.jsonl"
        write_native(trace, mixed(share, arguments.load))
        for rule, options in RULES.items():
            path = arguments.out / f"short_{share:g}_{rule.replace(' ', '_')}.json"
            (row,) = simulated(f"--trace {trace} {COMMAND} {options}".strip(), path)["results"]
            rows.append(((f"{share:.0%}", rule), row))
    table = tabulated(("short:", "ranks compute"), COLUMNS, rows)
    (arguments.out / "table.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)
    return 0


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


def prefill_tail(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Print what the slowest requests of conversations wait for, under each choice of a prefiller.

    The load, the prefillers and their caches are those of `turns` in `reproduce simulations`, with the
    prefillers alone: no transfer and no decode rank, some 15 ms of the time to first token. Beside three
    of the proxy's choices:

    - `ends first`: where the prefill ends first, with the work and the caches as they are;
    - `best of N`: the delay R of the request there, to a power, times 1 + a s / m for what its s delays others
      at a mean of m, as `prefix-aware` has it, likewise with the work and the caches as they are; of N such
      rules that of the lowest p99, chosen for each row by hindsight;
    - `one queue`: one cache of everything for all prefillers, of which a free one takes the next request;
    - `alone`: likewise, and a prefiller for each request.
    """
    parser.parse_args(words)
    requests = conversations(CONVERSATIONS)
    print(table_head(*right(_HEADINGS[:2]), _HEADINGS[2], *right(_HEADINGS[3:])))
    for prefillers, load in TURN_CASES:
        base_ns, token_ns = round(1e6 * PREFILL_BASE_MS), 1e3 * PREFILL_TOKEN_US
        model = PrefillModel(prefillers, base_ns, token_ns, TURN_CACHE_TOKENS, BLOCK_TOKENS)
        for name, served in rows(requests, turns_rate(prefillers, load), model):
            print(table_row(prefillers, load, f"`{name}`", *cells(served)), flush=True)
    return 0


SCRAPE_NS = 3_000 * MS
# From an answer's end until its client's next request has come, at most.
PAUSE_NS = 100 * MS
# Prompts and answers like those of ShareGPT: median, deviation of the logarithm, most tokens.
PROMPT, ANSWER = (120, 1.0, 2_000), (160, 0.8, 1_000)
Lengths = Callable[[random.Random], tuple[int, int]]
USUAL = ScoreSettings()
# Requests of each client, the first of which are not measured; and how many there are at least.
ROUNDS, WARM_UP, LEAST = 10, 0.3, 1_200


# What an engine is, and how many clients send to it alone.
Member = tuple[Machine, int]
ONE_GPU = Machine(20 * MS, 250_000, 450_000, 30, 60_000, 2_048, 256, 100_000)
FOUR_GPUS = Machine(12 * MS, 250_000, 400_000, 30, 30_000, 2_048, 250, 600_000)
POOLS: dict[str, Sequence[Member]] = {
    "1 + 4 GPUs": ((ONE_GPU, 0), (FOUR_GPUS, 0)),
    "5 x 1 GPU": (*((ONE_GPU, 50),) * 2, *((ONE_GPU, 0),) * 3),
}


def like_sharegpt(draw: random.Random) -> tuple[int, int]:
    """Return the tokens of a prompt and of its answer."""
    prompt, answer = (
        min(most, max(1, round(median * draw.lognormvariate(0.0, deviation))))
        for median, deviation, most in (PROMPT, ANSWER)
    )
    return prompt, answer


@dataclass(slots=True, kw_only=True)
class Asked(Answered):
    """One request. `client` is False for those that others send, which do not count."""

    client: bool
    engine: int
    sent_ns: int


class World:
    """A pool, the clients before it, and the choice between them; a `PrefillView` of the pool.

    Args:
        lengths: Draws the tokens of a prompt and of its answer.
        scores: The weights.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rule: str,
        clients: int,
        seed: int,
        *,
        lengths: Lengths,
        scores: ScoreSettings,
    ) -> None:
        self._draw = lengths
        self.loop = EventLoop()
        self.engines = [Engine[Asked](machine) for machine, _ in members]
        self.served: list[Asked] = []
        self.prefills = [0] * len(members)
        self.direct = self.held_tokens = [0] * len(members)
        inputs = PrefillInputs(random.Random(seed), scores=scores)
        self._choice = PREFILL_CHOICES[rule](inputs)
        self._lengths = random.Random(f"lengths/{seed}")
        self._members = [PrefillerId(number) for number in range(len(members))]
        self._background = [clients for _, clients in members]
        self._clients = clients
        self._left = max(LEAST, ROUNDS * clients)
        self._order = count()

    def run(self) -> list[Asked]:
        """Return the requests that count, in the order of their ends."""
        sends: list[int | None] = [None] * self._clients
        for number, clients in enumerate(self._background):
            sends += [number] * clients
        for place in sends:
            at_ns = round(self._lengths.uniform(0, SCRAPE_NS))
            self.loop.call_at(at_ns, partial(self._send, place))
        self._scrape()
        self.loop.run(self._settle)
        return self.served[round(WARM_UP * len(self.served)) :]

    def _send(self, place: int | None) -> None:
        """Send one request to an engine; None to choose one."""
        if self._left == 0:
            return
        client = place is None
        if place is None:
            self._left -= 1
            request = PrefillRequest(RequestId(self._left), Ticket(1), 1, self.loop.now_ns)
            place = self._choice.choose(request, self._members, self)
            self.prefills[place] += 1
        prompt, answer = self._draw(self._lengths)
        one = Asked(
            client=client, engine=place, sent_ns=self.loop.now_ns, prompt=prompt, answer=answer
        )
        self.engines[place].waiting.append(one)

    def _scrape(self) -> None:
        if self._choice.observer is not None:
            for member, engine in zip(self._members, self.engines, strict=True):
                usage = engine.kv_tokens / engine.machine.kv_tokens
                load = EngineLoad(len(engine.waiting), len(engine.running), usage)
                event = PrefillerScraped(member, load)
                self._choice.observer(event, [], self.loop.now_ns)
        if self._left:
            self.loop.call_at(self.loop.now_ns + SCRAPE_NS, self._scrape)

    def _settle(self) -> None:
        for engine in self.engines:
            if not engine.stepping and (engine.waiting or engine.running):
                end_ns = self.loop.now_ns + engine.begin_step(self._order)
                self.loop.call_at(end_ns, partial(self._end_step, engine))

    def _end_step(self, engine: Engine[Asked]) -> None:
        for one in engine.end_step(self.loop.now_ns)[1]:
            if one.client:
                self.prefills[one.engine] -= 1
                self.served.append(one)
            # Not at once: a request would always come just as a step of that engine begins.
            at_ns = self.loop.now_ns + round(self._lengths.uniform(0, PAUSE_NS))
            self.loop.call_at(at_ns, partial(self._send, None if one.client else one.engine))


@dataclass(frozen=True, slots=True)
class Times:
    """Times of the requests of one run, in ms."""

    ttft: float
    ttft_p99: float
    tpot: float


def times_of(
    pool: str,
    rule: str,
    clients: int,
    seed: int,
    *,
    lengths: Lengths = like_sharegpt,
    scores: ScoreSettings = USUAL,
) -> Times:
    """Return the times of one run."""
    served = World(POOLS[pool], rule, clients, seed, lengths=lengths, scores=scores).run()
    times = [(one, one.first_ns or 0, one.ended_ns or 0) for one in served]
    ttft = [(first_ns - one.sent_ns) / MS for one, first_ns, _ in times]
    tpot = [
        (ended_ns - first_ns) / MS / (one.answer - 1)
        for one, first_ns, ended_ns in times
        if one.answer > 1
    ]
    return Times(float(np.mean(ttft)), float(np.percentile(ttft, 99)), float(np.mean(tpot)))


@dataclass(frozen=True, slots=True)
class Claim:
    """What is told of one choice before one pool."""

    pool: str
    rule: str
    clients: int
    told: str  # In words.
    figure: str = "ttft"  # The figure that it is about, of `Times`.
    sign: int = 0  # Of its gain; 0 if any will do.


MIXED, EQUAL = POOLS
CLAIMS = (
    Claim(MIXED, "s1-enhanced", 10, "shorter", sign=1),
    Claim(MIXED, "s1-enhanced", 20, "shorter", sign=1),
    Claim(MIXED, "s1-enhanced", 30, "about the same"),
    Claim(MIXED, "s1-enhanced", 40, "longer", sign=-1),
    Claim(MIXED, "s1-enhanced", 50, "longer", sign=-1),
    Claim(MIXED, "s1-enhanced", 100, "no gain", sign=-1),
    Claim(MIXED, "s1-enhanced", 200, "no gain", sign=-1),
    Claim(MIXED, "s1-enhanced", 300, "no gain", sign=-1),
    Claim(MIXED, "s2-enhanced", 400, "much shorter", sign=1),
    Claim(MIXED, "s2-enhanced", 500, "p99 much shorter", "ttft_p99", 1),
    Claim(EQUAL, "s1-enhanced", 40, "shorter", sign=1),
    Claim(EQUAL, "s1-enhanced", 60, "shorter", sign=1),
    Claim(EQUAL, "s1-enhanced", 100, "about the same"),
    Claim(EQUAL, "s1-enhanced", 160, "longer", sign=-1),
    Claim(EQUAL, "s1-enhanced", 200, "longer", sign=-1),
)
FIGURES = ("ttft", "ttft_p99", "tpot")


def gains(
    claim: Claim, seeds: int, lengths: Lengths = like_sharegpt, scores: ScoreSettings = USUAL
) -> dict[str, list[float]]:
    """Return by how many percent each figure is below that of `least-conn`, by seed."""
    found: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for seed in range(seeds):
        before, after = (
            times_of(claim.pool, rule, claim.clients, seed, lengths=lengths, scores=scores)
            for rule in ("least-conn", claim.rule)
        )
        for name in FIGURES:
            old, new = getattr(before, name), getattr(after, name)
            found[name].append(100 * (old - new) / old)
    return found


def gain_of(values: Sequence[float]) -> str:
    """Return the mean of the seeds and their range."""
    return f"{np.mean(values):+.0f} % ({min(values):+.0f} to {max(values):+.0f})"


def holds(claim: Claim, found: dict[str, list[float]]) -> bool:
    """Return whether the mean gain has the sign that is told."""
    return claim.sign * float(np.mean(found[claim.figure])) >= 0


def scores(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """When scores of scraped metrics beat counting one's own requests, and when not, in virtual time.

    The choices are the proxy's own, used as TBLB uses them: scores are of the last scrape alone, and what
    was sent since does not count. Around them are engines that compute prompts and answers in one batch,
    and clients that each send a request when their last one is answered. Two pools, after the source's
    tests: one engine with 1 GPU, where requests begin to wait at about 160, and one with 4 GPUs, where they
    do at 250; and five with 1 GPU, of which two have 50 clients each that the choice does not see.

    Prints Markdown: by how much times are shorter than with `least-conn`, the mean of the seeds and their
    range, and whether the sign is that which the source tells; exits with 1 if one is not. The same seeds
    give the same table.

    Source: https://github.com/f5devcentral/llm-inference-lb, docs/Test-Summary-and-Thoughts.md.
    """
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each row")
    seeds = parser.parse_args(words).seeds
    names = ("pool", "clients:", "choice", "told of TTFT", "mean TTFT:", "p99 TTFT:", "mean TPOT:")
    print(table_head(*names, "as told"))
    failed = 0
    for claim in CLAIMS:
        found = gains(claim, seeds)
        cells = [gain_of(found[one]) for one in FIGURES]
        verdict = "" if claim.sign == 0 else "yes" if holds(claim, found) else "NO"
        failed += verdict == "NO"
        first = (claim.pool, claim.clients, f"`{claim.rule}`", claim.told)
        print(table_row(*first, *cells, verdict), flush=True)
    return 1 if failed else 0


WEIGHTS = ((0.1, 0.9), (0.2, 0.8), (0.5, 0.5))
CLIENTS = (10, 20, 30, 40, 50, 100, 200, 300, 400, 500)


def score_weights(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What the weights of `s1-enhanced` do, on the lengths of the Azure conversation trace.

    The pools and their clients are those of `scores`; lengths beyond 2,000 and 1,000 tokens are cut. At .5
    and .5 the rule is that of `s2-enhanced`. Prints Markdown: by how much the mean time to first token is
    shorter than with `least-conn`, in percent, the mean of the seeds and their range.
    """
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each cell")
    parser.add_argument("--clients", type=positive, nargs="+", default=CLIENTS)
    arguments = parser.parse_args(words)
    trace = requests_of(AZURE_CONV)

    def lengths(draw: random.Random) -> tuple[int, int]:
        one = draw.choice(trace)
        return min(one.prompt_tokens, PROMPT[2]), min(one.output_tokens, ANSWER[2])

    print(table_head("pool", "clients:", *(f"{a:g}, {b:g}:" for a, b in WEIGHTS)))
    for pool, clients in product(POOLS, arguments.clients):
        claim = Claim(pool, "s1-enhanced", clients, "")
        found = [gains(claim, arguments.seeds, lengths, ScoreSettings(one)) for one in WEIGHTS]
        print(table_row(pool, clients, *(gain_of(one["ttft"]) for one in found)), flush=True)
