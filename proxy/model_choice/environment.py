"""An alias in virtual time: requests arrive, are sent to a group, and are worth something when they end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from balanceroute.proxy.model_choice.arrival_rate import ArrivalRate
from balanceroute.proxy.model_choice.base import Outlook
from balanceroute.proxy.model_choice.group_sim import GroupSim, Request
from balanceroute.proxy.model_choice.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is to be sent.

    Attributes:
        number: From 0, in order.
        task: Its task's place in the scenario.
        rate_per_s: Requests a second, of late.
        outlooks: What it would meet in each group.
    """

    number: int
    task: int
    rate_per_s: float
    outlooks: tuple[Outlook, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """What the answer to a request was worth: its score, or 0 if it missed the targets."""

    number: int
    score: float


class Environment:
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
        self._next: tuple[int, Request] | None = None
        self._sent: dict[int, tuple[int, int]] = {}

    def reset(self, gaps_ms: Iterator[float]) -> Arrival:
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

    def step(self, group: int) -> tuple[Arrival | None, list[Settled]]:
        """Send the present request; return the next one, and what ended until it came.

        After the last request all that are under way end.
        """
        if self._next is None:
            raise ValueError("no request is to be sent")
        task, request = self._next
        self._sent[request.number] = (task, group)
        self._groups[group].add(request)
        return self._arrive()

    def _arrive(self) -> tuple[Arrival | None, list[Settled]]:
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
        self._next = (task, Request(self._count, self._now_ms, prompt, output))
        self._count += 1
        outlooks = tuple(
            Outlook(self._scenario.targets.share_used(*group.outlook(prompt)))
            for group in self._groups
        )
        rate = self._rate.observe(self._now_ms)
        return Arrival(self._count - 1, task, rate, outlooks), settled

    def _worth(self, number: int, tpot_ms: float, ttft_ms: float) -> float:
        task, group = self._sent.pop(number)
        kept = self._scenario.targets.share_used(tpot_ms, ttft_ms) <= 1
        return self._scenario.scores[task][group] if kept else 0.0
