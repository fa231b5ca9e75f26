"""An emulated decode group as a deployment of Ray Serve: its replicas end each step together, in one actor.

It needs Ray, whose processes import this module: they are to have the project's `.src` in PYTHONPATH.
"""

import asyncio
import os
import pickle
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.request_router import PendingRequest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import Action, Event
from balanceroute.proxy.lab.emulate.barrier import Barrier
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.ray_router import BalanceRouter
from balanceroute.proxy.live.replica_choices import ReplicaChoices, ReplicaSettings

RANKS, BATCH = 4, 6
JOURNAL = "BALANCEROUTE_TEST_JOURNAL"
"""Names the file of what the router's core was told and answered."""

_SETTINGS = EmulationSettings(
    ranks=RANKS, batch_limit=BATCH, step_base_ns=8_000_000, step_ns_per_token=800.0
)


class JournalChoices(ReplicaChoices):
    """Writes down what the scheduler is told, and what it answers."""

    def replicas(self, slots: Mapping[str, int]) -> None:
        """Note a new fleet as it is once the scheduler knows of it."""
        super().replicas(slots)
        self.write(len(self._ids), dict(enumerate(self._names)))

    def _config(self) -> SchedulerConfig:
        config = super()._config()
        self.write(config, len(self._ids))
        return config

    def feed(self, event: Event, now_ns: int) -> list[Action]:
        """Note an event with its actions, and the length that was learned with it."""
        history = self._predictor._history
        before = len(history)
        actions = super().feed(event, now_ns)
        self.write(event, (now_ns, actions, history[-1] if len(history) > before else None))
        return actions

    def write(self, what: object, told: object) -> None:
        """Note something."""
        with Path(os.environ[JOURNAL]).open("ab") as file:
            pickle.dump((what, told), file)


class JournalRouter(BalanceRouter):
    """The router, with that."""

    def _new_choices(self, settings: ReplicaSettings) -> ReplicaChoices:
        return JournalChoices(settings, self._clock)

    def _asking(self, pending: PendingRequest) -> Any:
        found = super()._asking(pending)
        assert isinstance(self._choices, JournalChoices)
        self._choices.write(pending.args[0]["name"], found.number)
        return found


class _Sequence:
    """One answer in the batch of a rank."""

    def __init__(self, prompt_tokens: int, output_tokens: int, made: Counter[int], rank: int):
        self.kv_tokens, self.tokens_left = prompt_tokens, output_tokens
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._made, self._rank = made, rank

    def advance(self, *, more: bool) -> bool:
        del more
        self.kv_tokens += 1
        self.tokens_left -= 1
        self._made[self._rank] += 1
        if self.tokens_left == 0 and not self.over.done():
            self.over.set_result(None)
        return self.tokens_left == 0

    def dropped(self) -> None:
        raise AssertionError("memory is not limited here")


class Group:
    """The barrier, which every replica calls."""

    def __init__(self) -> None:
        self._barrier: Barrier | None = None
        self._replicas: list[str] = []
        self._made: Counter[int] = Counter()
        self._held: Counter[int] = Counter()
        self._most = 0
        self._ran: dict[str, str] = {}

    async def join(self, replica: str) -> int:
        """Return the rank of a replica."""
        self._replicas.append(replica)
        return len(self._replicas) - 1

    async def decode(self, rank: int, name: str, prompt_tokens: int, output_tokens: int) -> None:
        """Run a request to its end."""
        if self._barrier is None:
            self._barrier = Barrier(_SETTINGS, ranks=RANKS, rank_kv_tokens=None)
        sequence = _Sequence(prompt_tokens, output_tokens, self._made, rank)
        self._ran[name] = self._replicas[rank]
        self._held[rank] += 1
        self._most = max(self._most, self._held[rank])
        try:
            self._barrier.submit(sequence, rank)
            await sequence.over
        finally:
            self._barrier.withdraw(sequence)
            self._held[rank] -= 1

    async def made(self, rank: int) -> int:
        """Return the tokens that a rank has made in all."""
        return self._made[rank]

    async def figures(self) -> dict[str, Any]:
        """Return what happened so far."""
        counters = {} if self._barrier is None else asdict(self._barrier.counters)
        counters.pop("picture", None)
        held = sum(self._held.values())
        return {**counters, "most": self._most, "ran": self._ran, "held": held}


class Decode:
    """A replica: one rank."""

    def __init__(self, group: str) -> None:
        self._group = ray.get_actor(group)
        replica = serve.get_replica_context().replica_id.unique_id
        self._rank = ray.get(self._group.join.remote(replica))

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """Stream an answer, whose end is the request's."""
        yield "begun "
        sizes = len(request["prompt"]), request["max_tokens"]
        await self._group.decode.remote(self._rank, request["name"], *sizes)
        yield f"{request['name']}: {request['max_tokens']}"

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what the router reads."""
        return {"output_tokens": await self._group.made.remote(self._rank)}


class Ingress:
    """Takes requests over HTTP; the router is in its process."""

    def __init__(self, decode: Any) -> None:
        self._decode = decode

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass on what a rank answers."""
        body = await request.json()
        answer = self._decode.options(stream=True).generate.remote(body)
        return StreamingResponse(answer, media_type="text/plain")
