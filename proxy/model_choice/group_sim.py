"""One group in virtual time: how long a request takes there.

The ranks of a group are taken as evenly loaded, as BR-0 and BR-H keep them: a step takes
a + b x (KV tokens of the group) / ranks, and every running request emits one token in it. So the
state between two events is one line, and a group costs a heap, whatever it runs.
"""

import heapq
import math
import sys
from collections import deque
from dataclasses import dataclass

from balanceroute.proxy.model_choice.scenario import GroupModel


@dataclass(frozen=True, slots=True)
class Request:
    """What a group has to do, and since when."""

    number: int
    arrived_ms: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """How long a request took.

    Attributes:
        number: The request's.
        ttft_ms: From its arrival to its first token.
        tpot_ms: Mean time of the output tokens after the first; 0 if there are none.
    """

    number: int
    ttft_ms: float
    tpot_ms: float


class GroupSim:
    """A group's running and waiting requests."""

    def __init__(self, model: GroupModel) -> None:
        self._model = model
        self._now_ms = 0.0
        self._steps = 0.0
        self._tokens = 0.0
        # By the step in which each ends: (step, number, request, its first token's time).
        self._running: list[tuple[float, int, Request, float]] = []
        # By the end of the prefill: (time, number, request).
        self._prefilling: list[tuple[float, int, Request]] = []
        self._prefilled: deque[Request] = deque()
        self._server_free_ms = [0.0] * model.prefill_servers

    def add(self, request: Request) -> None:
        """Take a request that arrives now."""
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

    def advance(self, to_ms: float) -> list[Answer]:
        """Let time pass; return the answers that ended."""
        answers: list[Answer] = []
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

    def _finish(self, now_ms: float) -> Answer:
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
        return Answer(number, first_ms - request.arrived_ms, tpot_ms)

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
