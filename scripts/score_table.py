"""When scores of scraped metrics beat counting one's own requests, and when not, in virtual time.

    python scripts/score_table.py [--seeds N]

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

import argparse
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count

import numpy as np

from balanceroute.proxy.core.events import (
    EngineLoad,
    PrefillerId,
    PrefillerScraped,
    RequestId,
    Ticket,
)
from balanceroute.proxy.core.prefill import PREFILL_CHOICES, PrefillInputs, PrefillRequest
from balanceroute.proxy.lab.sim.engines import EventLoop
from balanceroute.proxy.testing.arguments import positive

MS = 1_000_000
SCRAPE_NS = 3_000 * MS
# From an answer's end until its client's next request has come, at most.
PAUSE_NS = 100 * MS
# Prompts and answers like those of ShareGPT: median, deviation of the logarithm, most tokens.
PROMPT, ANSWER = (120, 1.0, 2_000), (160, 0.8, 1_000)
# Prompts that are computed in one step.
PROMPT_TOKENS = 2_048
# Requests of each client, the first of which are not measured; and how many there are at least.
ROUNDS, WARM_UP, LEAST = 10, 0.3, 1_200


@dataclass(frozen=True, slots=True)
class Machine:
    """How long an engine's steps take, and what it holds.

    Attributes:
        base_ns: Time of any step.
        sequence_ns: Time of a sequence in it.
        beyond_ns: Further time of each sequence above `knee`.
        knee: See `beyond_ns`.
        prompt_ns: Time of a prompt token.
        batch: Sequences that run at a time.
        kv_tokens: KV tokens that fit.
        background: Clients that send to this engine alone.
    """

    base_ns: int
    sequence_ns: int
    beyond_ns: int
    knee: int
    prompt_ns: int
    batch: int
    kv_tokens: int
    background: int = 0


ONE_GPU = Machine(20 * MS, 250_000, 450_000, 30, 60_000, 256, 100_000)
FOUR_GPUS = Machine(12 * MS, 250_000, 400_000, 30, 30_000, 250, 600_000)
BUSY = replace(ONE_GPU, background=50)
POOLS = {
    "1 + 4 GPUs": (ONE_GPU, FOUR_GPUS),
    "5 x 1 GPU": (BUSY, BUSY, ONE_GPU, ONE_GPU, ONE_GPU),
}


@dataclass(slots=True)
class Served:
    """One request. `client` is False for those that others send, which do not count."""

    client: bool
    engine: int
    sent_ns: int
    prompt: int
    answer: int
    first_ns: int = 0
    ended_ns: int = 0


@dataclass(slots=True)
class Engine:
    """What waits and runs on one engine.

    Attributes:
        running: The step in which each ends, a tie-breaker, and the request.
        entering: Those of them whose prompts are computed in this step.
        kv_tokens: In use.
        reserved: What the running ones will use at their ends; none is preempted.
        steps: Steps made.
    """

    machine: Machine
    waiting: deque[Served] = field(default_factory=deque)
    running: list[tuple[int, int, Served]] = field(default_factory=list)
    entering: list[Served] = field(default_factory=list)
    kv_tokens: int = 0
    reserved: int = 0
    steps: int = 0
    stepping: bool = False

    @property
    def load(self) -> EngineLoad:
        """What a scrape tells."""
        usage = self.kv_tokens / self.machine.kv_tokens
        return EngineLoad(len(self.waiting), len(self.running), usage)

    def begin_step(self, order: "count[int]") -> int:
        """Let in who fits and return how long the step takes, in ns."""
        machine, tokens = self.machine, 0
        while self.waiting and len(self.running) < machine.batch:
            one = self.waiting[0]
            need = one.prompt + one.answer
            if self.reserved + need > machine.kv_tokens or tokens + one.prompt > PROMPT_TOKENS:
                break
            self.entering.append(self.waiting.popleft())
            heappush(self.running, (self.steps + one.answer, next(order), one))
            self.reserved += need
            tokens += one.prompt
        self.kv_tokens += tokens
        batch = len(self.running)
        beyond_ns = machine.beyond_ns * max(0, batch - machine.knee)
        return (
            machine.base_ns + machine.sequence_ns * batch + beyond_ns + machine.prompt_ns * tokens
        )

    def end_step(self, now_ns: int) -> list[Served]:
        """Give each sequence a token; return those that had their last one."""
        self.stepping = False
        self.steps += 1
        self.kv_tokens += len(self.running)
        for one in self.entering:
            one.first_ns = now_ns
        self.entering.clear()
        ended = []
        while self.running and self.running[0][0] <= self.steps:
            one = heappop(self.running)[2]
            one.ended_ns = now_ns
            self.kv_tokens -= one.prompt + one.answer
            self.reserved -= one.prompt + one.answer
            ended.append(one)
        return ended


class World:
    """A pool, the clients before it, and the choice between them; a `PrefillView` of the pool."""

    def __init__(self, machines: Sequence[Machine], rule: str, clients: int, seed: int) -> None:
        self.loop = EventLoop()
        self.engines = [Engine(machine) for machine in machines]
        self.served: list[Served] = []
        self.prefills = [0] * len(machines)
        self.direct = self.held_tokens = [0] * len(machines)
        self._choice = PREFILL_CHOICES[rule](PrefillInputs(random.Random(seed)))
        self._lengths = random.Random(f"lengths/{seed}")
        self._members = [PrefillerId(number) for number in range(len(machines))]
        self._clients = clients
        self._left = max(LEAST, ROUNDS * clients)
        self._order = count()

    def run(self) -> list[Served]:
        """Return the requests that count, in the order of their ends."""
        sends: list[int | None] = [None] * self._clients
        for number, engine in enumerate(self.engines):
            sends += [number] * engine.machine.background
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
        prompt, answer = (
            min(most, max(1, round(median * self._lengths.lognormvariate(0.0, deviation))))
            for median, deviation, most in (PROMPT, ANSWER)
        )
        one = Served(client, place, self.loop.now_ns, prompt, answer)
        self.engines[place].waiting.append(one)

    def _scrape(self) -> None:
        if self._choice.observer is not None:
            for member, engine in zip(self._members, self.engines, strict=True):
                event = PrefillerScraped(member, engine.load)
                self._choice.observer(event, [], self.loop.now_ns)
        if self._left:
            self.loop.call_at(self.loop.now_ns + SCRAPE_NS, self._scrape)

    def _settle(self) -> None:
        for engine in self.engines:
            if not engine.stepping and (engine.waiting or engine.running):
                engine.stepping = True
                end_ns = self.loop.now_ns + engine.begin_step(self._order)
                self.loop.call_at(end_ns, partial(self._end_step, engine))

    def _end_step(self, engine: Engine) -> None:
        for one in engine.end_step(self.loop.now_ns):
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


def measure(pool: str, rule: str, clients: int, seed: int) -> Times:
    """Return the times of one run."""
    served = World(POOLS[pool], rule, clients, seed).run()
    ttft = [(one.first_ns - one.sent_ns) / MS for one in served]
    tpot = [
        (one.ended_ns - one.first_ns) / MS / (one.answer - 1) for one in served if one.answer > 1
    ]
    return Times(float(np.mean(ttft)), float(np.percentile(ttft, 99)), float(np.mean(tpot)))


@dataclass(frozen=True, slots=True)
class Claim:
    """What is told of one choice before one pool.

    Attributes:
        told: In words.
        figure: The figure that it is about, of `Times`.
        sign: Of its gain; 0 if any will do.
    """

    pool: str
    rule: str
    clients: int
    told: str
    figure: str = "ttft"
    sign: int = 0


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


def gains(claim: Claim, seeds: int) -> dict[str, list[float]]:
    """Return by how many percent each figure is below that of `least-conn`, by seed."""
    found: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for seed in range(seeds):
        before, after = (
            measure(claim.pool, rule, claim.clients, seed) for rule in ("least-conn", claim.rule)
        )
        for figure in FIGURES:
            old, new = getattr(before, figure), getattr(after, figure)
            found[figure].append(100 * (old - new) / old)
    return found


def holds(claim: Claim, found: dict[str, list[float]]) -> bool:
    """Return whether the mean gain has the sign that is told."""
    return claim.sign * float(np.mean(found[claim.figure])) >= 0


def main() -> int:
    """Print the table; return 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each row (default 3)")
    seeds = parser.parse_args().seeds
    print("| pool | clients | choice | told of TTFT | mean TTFT | p99 TTFT | mean TPOT | as told |")
    print("| --- | ---: | --- | --- | ---: | ---: | ---: | --- |")
    failed = 0
    for claim in CLAIMS:
        found = gains(claim, seeds)
        cells = [
            f"{np.mean(found[one]):+.0f} % ({min(found[one]):+.0f} to {max(found[one]):+.0f})"
            for one in FIGURES
        ]
        verdict = "" if claim.sign == 0 else "yes" if holds(claim, found) else "NO"
        failed += verdict == "NO"
        first = f"{claim.pool} | {claim.clients} | `{claim.rule}` | {claim.told}"
        print(f"| {first} | {' | '.join(cells)} | {verdict} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
