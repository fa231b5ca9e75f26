"""Scores of scraped metrics beside counts of one's own requests: which of them chooses engines better, and when."""

import argparse
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count, product, repeat

import numpy as np
from numpy.typing import NDArray
from tests.support.arguments import positive

from balanceroute.proxy.core import events, prefill
from balanceroute.proxy.lab.sim.engines import EventLoop
from experiment import AZURE_CONV, requests_of, right, table_head, table_row
from reproduce.overload import MS

# Between scrapes; and from an answer's end until its client's next request has come, at most.
SCRAPE_NS, PAUSE_NS = 3_000 * MS, 100 * MS
# Prompts and answers like those of ShareGPT: median, deviation of the logarithm, most tokens.
PROMPT, ANSWER = (120, 1.0, 2_000), (160, 0.8, 1_000)
# Requests of each client, the first of which are not measured; and how many there are at least.
ROUNDS, WARM_UP, LEAST = 10, 0.3, 1_200
WEIGHTS = ((0.1, 0.9), (0.2, 0.8), (0.5, 0.5))
CLIENTS = (10, 20, 30, 40, 50, 100, 200, 300, 400, 500)
# What an engine is by `Engine`, and how many clients send to it alone.
ONE_GPU, FOUR_GPUS = (20, 450, 60, 256, 100_000), (12, 400, 30, 250, 600_000)
POOLS = {
    "1 + 4 GPUs": ((ONE_GPU, 0), (FOUR_GPUS, 0)),
    "5 x 1 GPU": (*((ONE_GPU, 50),) * 2, *((ONE_GPU, 0),) * 3),
}


def like_sharegpt(draw: random.Random) -> Sequence[int]:
    """Return the tokens of a prompt and of its answer."""
    return [
        min(most, max(1, round(median * draw.lognormvariate(0.0, deviation))))
        for median, deviation, most in (PROMPT, ANSWER)
    ]


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of one choice before one pool."""

    pool: str
    rule: str
    clients: int
    claimed: str = ""  # In words.
    sign: int = 0  # Of the gain; 0 if any will do.
    figure: int = 0  # The one that it is about: mean TTFT, p99 TTFT, mean TPOT.
    lengths: Callable[[random.Random], Sequence[int]] = like_sharegpt
    weights: tuple[float, ...] = WEIGHTS[0]


MIXED, EQUAL = POOLS
CLAIMS = (
    *(Claim(MIXED, "s1-enhanced", clients, "shorter", 1) for clients in (10, 20)),
    Claim(MIXED, "s1-enhanced", 30, "about the same"),
    *(Claim(MIXED, "s1-enhanced", clients, "longer", -1) for clients in (40, 50)),
    *(Claim(MIXED, "s1-enhanced", clients, "no gain", -1) for clients in (100, 200, 300)),
    Claim(MIXED, "s2-enhanced", 400, "much shorter", 1),
    Claim(MIXED, "s2-enhanced", 500, "p99 much shorter", 1, 1),
    *(Claim(EQUAL, "s1-enhanced", clients, "shorter", 1) for clients in (40, 60)),
    Claim(EQUAL, "s1-enhanced", 100, "about the same"),
    *(Claim(EQUAL, "s1-enhanced", clients, "longer", -1) for clients in (160, 200)),
)


@dataclass(slots=True)
class Asked:
    """One request. `client` is False for those of background clients, which do not count."""

    client: bool
    engine: int
    sent_ns: int
    prompt: int
    answer: int
    first_ns: int = 0  # When its first token came.


@dataclass(slots=True)
class Engine:
    """What waits and runs on an engine that computes prompts and answers in one batch."""

    base_ms: int  # Time of any step; each sequence takes 250 us more.
    beyond_us: int  # Further time of each sequence above 30.
    prompt_us: int  # Time of a prompt token; a step computes 2,048 at most.
    batch: int  # Sequences that run at a time.
    kv_tokens: int  # Those that fit. None is preempted: all that run fit at their ends.
    steps: int = 0  # Steps made.
    stepping: bool = False
    waiting: deque[Asked] = field(default_factory=deque)
    # The step in which each ends, a tie-breaker, and the request.
    running: list[tuple[int, int, Asked]] = field(default_factory=list)


class World:
    """The pool of a claim, the clients before it, and a rule between them; a `PrefillView` of the pool."""

    def __init__(self, claim: Claim, rule: str, seed: int) -> None:
        self._claim, self._pool = claim, POOLS[claim.pool]
        self._engines = [Engine(*machine) for machine, _ in self._pool]
        self._members = [events.PrefillerId(number) for number in range(len(self._pool))]
        self.prefills, self.direct, self.held_tokens = ([0] * len(self._pool) for _ in range(3))
        scores = prefill.ScoreSettings(claim.weights)
        inputs = prefill.PrefillInputs(random.Random(seed), scores=scores)
        self._choice = prefill.PREFILL_CHOICES[rule](inputs)
        self._draw, self._loop, self._order = random.Random(f"lengths/{seed}"), EventLoop(), count()
        self._left, self._served = max(LEAST, ROUNDS * claim.clients), list[tuple[float, float]]()

    def run(self) -> tuple[float, float, float]:
        """Return mean TTFT, p99 TTFT and mean TPOT of the requests that count, in ms."""
        places = [one for one, (_, clients) in enumerate(self._pool) for _ in range(clients)]
        for place in (*repeat(None, self._claim.clients), *places):
            self._send_within(SCRAPE_NS, place)
        self._scrape()
        self._loop.run(self._settle)
        ttft, tpot = np.array(self._served[round(WARM_UP * len(self._served)) :]).T / MS
        return float(ttft.mean()), float(np.percentile(ttft, 99)), float(np.nanmean(tpot))

    def _send_within(self, most_ns: int, place: int | None) -> None:
        """Send one request to an engine soon; None to choose one then."""
        at_ns = self._loop.now_ns + round(self._draw.uniform(0, most_ns))
        self._loop.call_at(at_ns, partial(self._send, place))

    def _send(self, place: int | None) -> None:
        if self._left == 0:
            return
        client, now_ns = place is None, self._loop.now_ns
        if place is None:
            self._left -= 1
            number = events.RequestId(self._left)
            request = prefill.PrefillRequest(number, events.Ticket(1), 1, now_ns)
            place = self._choice.choose(request, self._members, self)
            self.prefills[place] += 1
        one = Asked(client, place, now_ns, *self._claim.lengths(self._draw))
        self._engines[place].waiting.append(one)

    def _scrape(self) -> None:
        if self._choice.observer is not None:
            for member, engine in zip(self._members, self._engines, strict=True):
                held = [one.prompt + one.answer - end for end, _, one in engine.running]
                usage = (sum(held) + len(held) * engine.steps) / engine.kv_tokens
                load = events.EngineLoad(len(engine.waiting), len(engine.running), usage)
                self._choice.observer(events.PrefillerScraped(member, load), [], self._loop.now_ns)
        if self._left:
            self._loop.call_at(self._loop.now_ns + SCRAPE_NS, self._scrape)

    def _settle(self) -> None:
        """Begin steps, and let in requests that fit."""
        for engine in self._engines:
            if engine.stepping or not (engine.waiting or engine.running):
                continue
            entering, tokens = list[Asked](), 0
            reserved = sum(one.prompt + one.answer for _, _, one in engine.running)
            while engine.waiting and len(engine.running) < engine.batch:
                one = engine.waiting[0]
                reserved += one.prompt + one.answer
                if reserved > engine.kv_tokens or tokens + one.prompt > 2_048:
                    break
                entering.append(engine.waiting.popleft())
                heappush(engine.running, (engine.steps + one.answer, next(self._order), one))
                tokens += one.prompt
            engine.stepping, batch = True, len(engine.running)
            times_us = 250 * batch, engine.beyond_us * max(0, batch - 30), engine.prompt_us * tokens
            end_ns = self._loop.now_ns + engine.base_ms * MS + 1_000 * sum(times_us)
            for one in entering:
                one.first_ns = end_ns
            self._loop.call_at(end_ns, partial(self._end_step, engine))

    def _end_step(self, engine: Engine) -> None:
        """Give each sequence a token; after the last one a request is served, and its client asks again."""
        engine.stepping = False
        engine.steps += 1
        while engine.running and engine.running[0][0] <= engine.steps:
            one = heappop(engine.running)[2]
            if one.client:
                self.prefills[one.engine] -= 1
                took_ns, more = self._loop.now_ns - one.first_ns, (one.answer - 1) or np.nan
                self._served.append((one.first_ns - one.sent_ns, took_ns / more))
            # Not at once: a request would always come just as a step of that engine begins.
            self._send_within(PAUSE_NS, None if one.client else one.engine)


def gains(claim: Claim, seeds: int) -> NDArray[np.float64]:
    """Return by how many percent each figure is below that of `least-conn`, by seed."""
    rules = ("least-conn", claim.rule)
    runs = [[World(claim, rule, seed).run() for seed in range(seeds)] for rule in rules]
    old, new = np.array(runs).swapaxes(1, 2)
    return np.asarray(100 * (old - new) / old)


def gain_of(values: NDArray[np.float64]) -> str:
    """Return the mean of the seeds and their range."""
    return f"{values.mean():+.0f} % ({values.min():+.0f} to {values.max():+.0f})"


def holds(claim: Claim, found: NDArray[np.float64]) -> bool:
    """Return whether the mean gain has the claimed sign."""
    return bool(claim.sign * found[claim.figure].mean() >= 0)


def scores(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """When scores of scraped metrics beat counting one's own requests, and when not, in virtual time.

    The choices are the proxy's own, used as TBLB uses them: scores are of the last scrape alone, and what
    was sent since does not count. Around them are engines that compute prompts and answers in one batch,
    and clients that each send a request when their last one is answered. Two pools, after its authors'
    tests (https://github.com/f5devcentral/llm-inference-lb, docs/Test-Summary-and-Thoughts.md): one engine
    with 1 GPU, where requests begin to wait at about 160, and one with 4 GPUs, where they do at 250; and five
    with 1 GPU, of which two have 50 clients each that the choice does not see.

    Prints Markdown: by how much times are shorter than with `least-conn`, the mean of the seeds and their
    range, and whether the sign is that which they tell; exits with 1 if one is not.
    """
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each row")
    seeds, failed = parser.parse_args(words).seeds, False
    names = ("pool", "clients:", "choice", "told of TTFT", "mean TTFT:", "p99 TTFT:", "mean TPOT:")
    print(table_head(*names, "as told"))
    for claim in CLAIMS:
        found = gains(claim, seeds)
        failed |= not holds(claim, found)
        verdict = "" if claim.sign == 0 else "yes" if holds(claim, found) else "NO"
        first = (claim.pool, claim.clients, f"`{claim.rule}`", claim.claimed)
        print(table_row(*first, *map(gain_of, found), verdict), flush=True)
    return int(failed)


def score_weights(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What the weights of `s1-enhanced` do, on the lengths of the Azure conversation trace.

    The pools and their clients are those of `scores`; lengths beyond 2,000 and 1,000 tokens are cut. At .5
    and .5 the rule is that of `s2-enhanced`. Prints Markdown: by how much the mean time to first token is
    shorter than with `least-conn`, in percent, the mean of the seeds and their range.
    """
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each cell")
    parser.add_argument("--clients", type=positive, nargs="+", default=CLIENTS)
    given = parser.parse_args(words)
    asked = [(one.prompt_tokens, one.output_tokens) for one in requests_of(AZURE_CONV)]
    sizes = [(min(prompt, PROMPT[2]), min(answer, ANSWER[2])) for prompt, answer in asked]
    print(table_head("pool", "clients:", *right([f"{a:g}, {b:g}" for a, b in WEIGHTS])))
    for pool, clients in product(POOLS, given.clients):
        make = partial(Claim, pool, "s1-enhanced", clients, lengths=lambda draw: draw.choice(sizes))
        cells = [gain_of(gains(make(weights=one), given.seeds)[0]) for one in WEIGHTS]
        print(table_row(pool, clients, *cells), flush=True)
