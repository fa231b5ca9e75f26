"""An alias in virtual time: requests arrive, are sent to a group, and are worth something when they end."""

import heapq
import math
import sys
import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.model_choice import ArrivalRate, GroupOutlook, Targets

# The groups of an alias, as training and judgement model them, and the worth of answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupModel:
    """A deployment of one model: data-parallel decode ranks behind a barrier, evenly loaded."""

    name: str  # The model's.
    ranks: int  # Its decode ranks.
    slots: int  # Requests that a rank decodes at once.
    step_base_ms: float  # The time of a decode step without load.
    step_us_per_token: float  # The time that each KV token of a rank adds.
    prefill_servers: int = 0  # Its prefillers; 0 if a prefill takes no time.
    prefill_base_ms: float = 0.0  # The time of a prefill without tokens.
    prefill_us_per_token: float = 0.0  # The time that each prompt token adds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """An alias: its groups, and the worth of their answers.

    Raises:
        ConfigError: The scores have another shape, or are no shares.
    """

    groups: tuple[GroupModel, ...]  # From the smallest model to the largest.
    tasks: tuple[str, ...]  # The kinds of requests.
    # The worth of an answer in time, by task and by group: of shape (tasks, groups).
    scores: tuple[tuple[float, ...], ...]
    targets: Targets  # The limits of an answer in time.

    def __post_init__(self) -> None:
        if not self.groups or not self.tasks:
            raise ConfigError("an alias needs a group and a task")
        shape = [len(row) for row in self.scores]
        if shape != [len(self.groups)] * len(self.tasks):
            raise ConfigError(
                f"the scores must be {len(self.tasks)} rows (tasks) of {len(self.groups)} (groups)"
            )
        if not all(0 <= score <= 1 for row in self.scores for score in row):
            raise ConfigError("a score must be from 0 to 1")


def paper_scenario() -> Scenario:
    """Return three models of different size with the worth of answers of the paper's table 1.

    The step times are this project's: at the lengths of the Azure conversation trace the large
    model keeps 40 ms a token up to some 11 requests/s, the middle one up to some 38, the small one
    beyond 48, as in the paper's figure 4.
    """
    return Scenario(
        groups=(
            GroupModel(name="small", ranks=4, slots=512, step_base_ms=8, step_us_per_token=0.05),
            GroupModel(name="medium", ranks=4, slots=512, step_base_ms=20, step_us_per_token=0.2),
            GroupModel(name="large", ranks=4, slots=512, step_base_ms=34, step_us_per_token=0.2),
        ),
        tasks=("HellaSwag", "COPA", "PIQA", "OpenBookQA"),
        scores=((0.45, 0.78, 1.0), (0.80, 0.95, 1.0), (0.82, 0.96, 1.0), (0.70, 0.94, 1.0)),
        targets=Targets(tpot_ms=40),
    )


# One group in virtual time: how long a request takes there.
#
# The ranks of a group are taken as evenly loaded, as BR-0 and BR-H keep them: a step takes a + b
# x (KV tokens of the group) / ranks, and every running request emits one token in it. So the
# state between two events is one line, and a group costs a heap, whatever it runs.


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """The work of a group, and since when."""

    number: int
    arrived_ms: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """How long a request took."""

    number: int  # The request's.
    ttft_ms: float  # From its arrival to its first token.
    tpot_ms: float  # Mean time of the output tokens after the first; 0 if there are none.


class GroupSim:
    """A group's running and waiting requests."""

    def __init__(self, model: GroupModel) -> None:
        self._model = model
        self._now_ms = 0.0
        self._steps = 0.0
        self._tokens = 0.0
        # By the step in which each ends: (step, number, request, its first token's time).
        self._running: list[tuple[float, int, SimulatedRequest, float]] = []
        # By the end of the prefill: (time, number, request).
        self._prefilling: list[tuple[float, int, SimulatedRequest]] = []
        self._prefilled: deque[SimulatedRequest] = deque()
        self._server_free_ms = [0.0] * model.prefill_servers

    def add(self, request: SimulatedRequest) -> None:
        ready_ms = self._now_ms
        if self._server_free_ms:
            begin_ms = max(self._now_ms, self._server_free_ms[0])
            ready_ms = begin_ms + self._prefill_ms(request.prompt_tokens)
            heapq.heapreplace(self._server_free_ms, ready_ms)
        heapq.heappush(self._prefilling, (ready_ms, request.number, request))
        self.advance(self._now_ms)

    def outlook(self, prompt_tokens: int) -> tuple[float, float]:
        """Return the time per output token and to the first one, in ms, of a request sent now."""
        model = self._model
        waiting = len(self._prefilled) + len(self._prefilling)
        tokens = self._tokens + prompt_tokens
        tokens += sum(one.prompt_tokens for one in self._prefilled)
        tokens += sum(request.prompt_tokens for _, _, request in self._prefilling)
        tpot_ms = self._step_ms(tokens)
        ttft_ms = tpot_ms
        if self._server_free_ms:
            ttft_ms += max(0.0, self._server_free_ms[0] - self._now_ms)
            ttft_ms += self._prefill_ms(prompt_tokens)
        free = model.ranks * model.slots - len(self._running)
        if waiting >= free and self._running:
            # The slot that it gets is the one that comes free when those before it have theirs.
            ends = sorted(end for end, *_ in self._running)
            place = min(waiting - max(free, 0), len(ends) - 1)
            ttft_ms += (ends[place] - self._steps) * self._step_ms(self._tokens)
        return tpot_ms, ttft_ms

    def advance(self, to_ms: float) -> list[SimulatedAnswer]:
        """Let time pass; return the answers that ended."""
        answers: list[SimulatedAnswer] = []
        while True:
            ready_ms = self._prefilling[0][0] if self._prefilling else math.inf
            end_ms = self._now_ms + self._elapsed_ms() if self._running else math.inf
            if min(ready_ms, end_ms) > min(to_ms, sys.float_info.max):
                break
            if ready_ms <= end_ms:
                self._pass(ready_ms)
                self._prefilled.append(heapq.heappop(self._prefilling)[2])
            else:
                answers.append(self._finish(end_ms))
            self._start()
        self._pass(to_ms)
        return answers

    def _start(self) -> None:
        slots = self._model.ranks * self._model.slots
        while self._prefilled and len(self._running) < slots:
            request = self._prefilled.popleft()
            self._tokens += request.prompt_tokens
            first_ms = self._now_ms + self._step_ms(self._tokens)
            end = self._steps + request.output_tokens
            heapq.heappush(self._running, (end, request.number, request, first_ms))

    def _finish(self, now_ms: float) -> SimulatedAnswer:
        end, number, request, first_ms = heapq.heappop(self._running)
        # The whole of them, this one too, have emitted a token in each step since.
        self._tokens += (end - self._steps) * (len(self._running) + 1)
        self._tokens -= request.prompt_tokens + request.output_tokens
        self._steps, self._now_ms = end, now_ms
        if not self._running:
            self._tokens = 0.0  # Else rounding adds up.
        later = request.output_tokens - 1
        # The first step may have become longer since it was estimated.
        tpot_ms = max(0.0, now_ms - first_ms) / later if later else 0.0
        return SimulatedAnswer(number, first_ms - request.arrived_ms, tpot_ms)

    def _pass(self, to_ms: float) -> None:
        """Let time pass in which nothing starts or ends."""
        if self._running and to_ms > self._now_ms:
            # a x + (s / 2) x^2 = t, for x: how many steps t holds as each is s longer than the last.
            slope = self._slope_ms() * len(self._running)
            base, time_ms = self._step_ms(self._tokens), to_ms - self._now_ms
            steps = 2 * time_ms / (base + math.sqrt(base * base + 2 * slope * time_ms))
            self._steps += steps
            self._tokens += steps * len(self._running)
        self._now_ms = max(to_ms, self._now_ms)

    def _elapsed_ms(self) -> float:
        """Return how long it takes until the next answer ends."""
        steps = self._running[0][0] - self._steps
        growth = self._slope_ms() * len(self._running)
        return steps * (self._step_ms(self._tokens) + growth * steps / 2)

    def _slope_ms(self) -> float:
        return self._model.step_us_per_token / self._model.ranks * 1e-3

    def _step_ms(self, tokens: float) -> float:
        return self._model.step_base_ms + self._slope_ms() * tokens

    def _prefill_ms(self, prompt_tokens: int) -> float:
        model = self._model
        return model.prefill_base_ms + model.prefill_us_per_token * prompt_tokens * 1e-3


@dataclass(frozen=True, slots=True)
class SimulatedArrival:
    number: int  # From 0, in order.
    task: int  # Its task's place in the scenario.
    rate_per_s: float  # Requests a second, of late.
    outlooks: tuple[GroupOutlook, ...]  # Of each group.


@dataclass(frozen=True, slots=True)
class Settled:
    """The worth of a request's answer: its score, or 0 if it missed the targets."""

    number: int
    score: float


class TrainingEnvironment:
    """Draws requests and follows them through the groups.

    `step` is to be called with the group of the arrival that `reset` or the last `step` returned.
    """

    def __init__(
        self, scenario: Scenario, lengths: Sequence[tuple[int, int]], random: np.random.Generator
    ) -> None:
        """Take (prompt, output) tokens of requests to draw from."""
        self._scenario = scenario
        self._lengths = lengths
        self._random = random
        self._groups: list[GroupSim] = []
        self._rate = ArrivalRate()
        self._gaps_ms: Iterator[float] = iter(())
        self._now_ms = 0.0
        self._count = 0
        self._next: tuple[int, SimulatedRequest] | None = None
        self._sent: dict[int, tuple[int, int]] = {}

    def reset(self, gaps_ms: Iterator[float]) -> SimulatedArrival:
        """Begin anew with empty groups; the requests come in these gaps, of which there is one."""
        self._groups = [GroupSim(model) for model in self._scenario.groups]
        self._rate = ArrivalRate()
        self._gaps_ms = gaps_ms
        self._now_ms = 0.0
        self._count = 0
        self._sent = {}
        arrival, _ = self._arrive()
        if arrival is None:
            raise ValueError("no request comes")
        return arrival

    def step(self, group: int) -> tuple[SimulatedArrival | None, list[Settled]]:
        """Send the present request; return the next one, and the requests that ended before it came.

        After the last request all that are under way end.
        """
        if self._next is None:
            raise ValueError("no request is to be sent")
        task, request = self._next
        self._sent[request.number] = (task, group)
        self._groups[group].add(request)
        return self._arrive()

    def _arrive(self) -> tuple[SimulatedArrival | None, list[Settled]]:
        gap_ms = next(self._gaps_ms, None)
        self._now_ms += float("inf") if gap_ms is None else gap_ms
        settled = [
            Settled(answer.number, self._worth(answer.number, answer.tpot_ms, answer.ttft_ms))
            for group in self._groups
            for answer in group.advance(self._now_ms)
        ]
        if gap_ms is None:
            self._next = None
            return None, settled
        prompt, output = self._lengths[int(self._random.integers(len(self._lengths)))]
        task = int(self._random.integers(len(self._scenario.tasks)))
        self._next = (task, SimulatedRequest(self._count, self._now_ms, prompt, output))
        self._count += 1
        outlooks = tuple(
            GroupOutlook(self._scenario.targets.share_used(*group.outlook(prompt)))
            for group in self._groups
        )
        rate = self._rate.observe(self._now_ms)
        return SimulatedArrival(self._count - 1, task, rate, outlooks), settled

    def _worth(self, number: int, tpot_ms: float, ttft_ms: float) -> float:
        task, group = self._sent.pop(number)
        kept = self._scenario.targets.share_used(tpot_ms, ttft_ms) <= 1
        return self._scenario.scores[task][group] if kept else 0.0


# A scenario as a TOML file.
#
# tpot_ms = 40 tasks = ["chat", "code"] [[group]] # From the smallest model to the largest. name =
# "small" ranks = 4 slots = 64 step_base_ms = 8 step_us_per_token = 0.05 scores = [0.7, 0.5] # The
# worth of its answers in time, by task.

_Count = Annotated[int, Meta(ge=1)]
_Time = Annotated[float, Meta(ge=0)]
_Positive = Annotated[float, Meta(gt=0)]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    ranks: _Count
    slots: _Count
    step_base_ms: _Positive
    step_us_per_token: _Time
    prefill_servers: Annotated[int, Meta(ge=0)] = 0
    prefill_base_ms: _Time = 0.0
    prefill_us_per_token: _Time = 0.0
    scores: list[float]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tasks: list[str]
    group: list[_Group]
    tpot_ms: _Positive | None = None
    ttft_ms: _Positive | None = None


def read_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ConfigError: The file cannot be read, or says nothing sensible.
    """
    try:
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        groups = [
            {
                name: value
                for name, value in msgspec.structs.asdict(group).items()
                if name != "scores"
            }
            for group in file.group
        ]
        return Scenario(
            groups=tuple(GroupModel(**group) for group in groups),
            tasks=tuple(file.tasks),
            # In the file by group, as each is written down; here by task.
            scores=tuple(zip(*(group.scores for group in file.group), strict=True)),
            targets=Targets(file.tpot_ms, file.ttft_ms),
        )
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


# Arrivals that a choice of a model is trained and judged on.
#
# Source: Jha and Chuppala, "Quality-of-Service Aware LLM Serving", sections 5.1.1 to 5.1.3.

LEAST_RATE, LARGEST_RATE = 0.25, 48.0  # Requests a second.
_PHASE_REQUESTS = (20, 400)


def stable(rate_per_s: float, requests: int, random: np.random.Generator) -> Iterator[float]:
    """Yield the gaps of a Poisson process, in ms."""
    for gap in random.exponential(1e3 / rate_per_s, requests):
        yield float(gap)


def bursty(requests: int, random: np.random.Generator) -> Iterator[float]:
    """Yield the gaps of a process whose rate changes after some requests, both drawn, in ms."""
    left = requests
    while left:
        phase = min(left, int(random.integers(*_PHASE_REQUESTS)))
        yield from stable(float(random.uniform(LEAST_RATE, LARGEST_RATE)), phase, random)
        left -= phase
