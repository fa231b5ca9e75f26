"""A driver for directed cases of the scheduler."""

import random

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    Event,
    PrefillDone,
    RankId,
    RequestArrived,
    RequestId,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.prefill import FewestTokens, MakePrefillChoice
from balanceroute.proxy.core.queueing import Fcfs, MakeQueueOrder
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig

RANK0 = RankId(0)


class Driver:
    """Feeds one scheduler, by default of one rank with one slot, and keeps the time."""

    def __init__(
        self,
        policy: str = "fifo",
        *,
        queue_order: MakeQueueOrder = Fcfs,
        prefill_choice: MakePrefillChoice = FewestTokens,
        **limits: int | None,
    ) -> None:
        config = SchedulerConfig(**{"ranks": 1, "batch_limit": 1, **limits})  # type: ignore[arg-type]
        inputs = PolicyInputs(
            ranks=config.ranks,
            batch_limit=config.batch_limit,
            settings=PolicySettings(),
            rng=random.Random(0),
            predictor=NoPrediction(),
        )
        self.scheduler = Scheduler(
            config,
            make_policy(policy, inputs),
            queue_order=queue_order,
            prefill_choice=prefill_choice,
        )
        self.now_ns = 0

    def __call__(self, *events: Event) -> list[Action]:
        """Feed the events; return the actions of the last one."""
        actions: list[Action] = []
        for event in events:
            actions = self.scheduler.handle(event, now_ns=self.now_ns)
            self.scheduler.check()
        return actions

    def at(self, now_ns: int, *events: Event) -> list[Action]:
        self.now_ns = now_ns
        return self(*events)

    def to_pool(self, *requests: RequestId, prompt_tokens: int = 10) -> None:
        for request in requests:
            self(
                RequestArrived(request, Ticket(prompt_tokens)), PrefillDone(request, prompt_tokens)
            )

    def to_decode(self, request: RequestId, prompt_tokens: int = 10) -> None:
        self.to_pool(request, prompt_tokens=prompt_tokens)
        assert Admit(request, RANK0) in self(Tick())

    def held(self) -> dict[str, list[int]]:
        return {
            "tokens": self.scheduler.prefillers.held_tokens.copy(),
            "prefills": self.scheduler.prefillers.prefills.copy(),
            "loads": self.scheduler.ledger.loads.tolist(),
            "bound": self.scheduler.ledger.bound.tolist(),
        }
