"""A request router of Ray Serve whose replicas are the decode ranks of one group. Extra `ray`.

    serve.deployment(request_router_config=RequestRouterConfig(
        request_router_class="balanceroute.proxy.live.ray_router.BalanceRouter",
        request_router_kwargs={"policy": "br-h"},
        request_routing_stats_period_s=0.5,
    ))

A replica is one rank: of Ray's own servers `DPPDDecodeServer` and `DPServer` have one replica for each
data-parallel rank. A request waits in `choose_replicas` until the policy has a slot for it, and holds
the slot until Ray calls `on_request_completed`, which for a stream is its end. In Ray the decode server
asks for the prefill, so this wait comes before it, and the slot is held through it.

How far requests are follows from `output_tokens`, a counter of all that a replica has made, if its
`record_routing_stats` has that; else each counts as long as its prompt. Each process that holds a
handle of the deployment has a router of its own, and none knows what another one sends: have one.

Source: `ray.serve.request_router` of Ray 2.60, https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.replica_choices import MOST_TOKENS, ReplicaChoices, ReplicaSettings

try:
    from ray.serve.exceptions import BackPressureError
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError(
        "the router of Ray Serve: needs the extra ray: pip install '.[ray]'"
    ) from error

OUTPUT_TOKENS = "output_tokens"
"""The member of a replica's routing stats that counts what it has made."""

_TICK_S = 0.25
# Ray sends a request within a moment of its choice, unless its caller only asked where it would go.
_SENT_S = 30.0
_MOST_MADE = 1e18
_log = logging.getLogger(__name__)


class _Asking:
    """One request, from when Ray asks for its replica until that is done with it."""

    __slots__ = ("choice", "future", "key", "number", "since_s")

    def __init__(self, number: RequestId, pending: PendingRequest) -> None:
        self.number = number
        self.future: asyncio.Future[Any] = pending.future
        self.choice: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.key = ("", pending.metadata.internal_request_id)  # With its replica, once it has one.
        self.since_s = 0.0  # When that was chosen.


class BalanceRouter(RequestRouter):
    """Chooses replicas as `serve` chooses decode ranks; `request_router_kwargs` are `ReplicaSettings`."""

    def initialize_state(self, **settings: Any) -> None:
        """Take the settings.

        Raises:
            ConfigError: There is no such setting, or a value is out of its range.
        """
        self._settings = ReplicaSettings.of(settings)
        self._clock: Callable[[], float] = time.monotonic
        self._choices = self._new_choices(self._settings)
        self._by_future: dict[asyncio.Future[Any], _Asking] = {}
        self._by_number: dict[RequestId, _Asking] = {}
        # By replica and the id that Ray passes at the end, which calls of one request share.
        self._chosen: dict[tuple[str, str], deque[_Asking]] = {}
        self._stats: dict[str, object] = {}  # As read last.
        self._timer: asyncio.TimerHandle | None = None

    def _new_choices(self, settings: ReplicaSettings) -> ReplicaChoices:
        return ReplicaChoices(settings, self._clock)

    @property
    def max_num_routing_tasks(self) -> int:
        """Requests that are decided on together; Ray's default is two for each replica."""
        most: int = self._settings.most_waiting
        return most

    # What Ray asks.

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Wait until a replica has a slot for a request, and return that one alone."""
        if pending_request is None:
            return [candidate_replicas]
        future = pending_request.future
        # Ray asks again at once, unless it may wait in between.
        pending_request.routing_context.should_backoff = True
        try:
            asking = self._asking(pending_request)
            self._decide()
            name = await asking.choice
        except asyncio.CancelledError:
            self._drop(future)
            raise
        except Exception as error:
            # Ray drops a request whose choice raises here, and its caller would wait for ever.
            _log.exception("the choice of a replica failed")
            if not future.done():
                future.set_exception(error)
        else:
            if name is not None:
                return [[one for one in self._replicas.values() if _name(one) == name]]
            limit = self._settings.most_waiting
            if not future.done():
                future.set_exception(BackPressureError(self.num_pending_requests, limit))
        self._drop(future)
        # Only if there is a candidate Ray looks whether it has an answer already.
        return [candidate_replicas]

    def _asking(self, pending: PendingRequest) -> _Asking:
        """Return the entry of a request, which waits from now on."""
        found = self._by_future.get(pending.future)
        if found is None:
            prompt_tokens, max_tokens = sizes(
                [*pending.args, *pending.kwargs.values()], self._settings.token_characters
            )
            found = _Asking(self._choices.ask(prompt_tokens, max_tokens), pending)
            self._by_future[found.future] = self._by_number[found.number] = found
            found.future.add_done_callback(self._settled)
            self._arm()
        elif found.choice.done():
            # It has no room there: other routers send to it, too.
            self._unchoose(found)
            found.choice = asyncio.get_running_loop().create_future()
            self._choices.refused(found.number)
        return found

    # What Ray calls.

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._follow()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._follow()

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note that a replica has taken a request."""
        super().on_request_routed(pending_request, replica_id, result)
        asking = self._by_future.get(pending_request.future)
        if asking is not None:
            self._choices.began(asking.number)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Give back the slot of a request that ended, in whatever way."""
        super().on_request_completed(replica_id, internal_request_id)
        waiting = self._chosen.get((replica_id.unique_id, internal_request_id))
        if waiting:
            asking = waiting[0]
            self._forget(asking)
            self._choices.ended(asking.number)
            self._decide()

    def _follow(self) -> None:
        replicas = {_name(one): one.max_ongoing_requests for one in self._replicas.values()}
        self._choices.replicas(replicas)
        self._stats = {name: stats for name, stats in self._stats.items() if name in replicas}
        self._decide()

    def _settled(self, future: "asyncio.Future[Any]") -> None:
        """Note that Ray sends a request, or that its caller is gone."""
        if future.cancelled() or future.exception() is not None:
            self._drop(future)
            self._decide()

    # What follows.

    def _decide(self) -> None:
        for number, name in self._choices.decide():
            asking = self._by_number[number]
            if name is not None:
                asking.key = (name, asking.key[1])
                asking.since_s = self._clock()
                self._chosen.setdefault(asking.key, deque()).append(asking)
            if not asking.choice.done():
                asking.choice.set_result(name)

    def _drop(self, future: "asyncio.Future[Any]") -> None:
        asking = self._by_future.get(future)
        if asking is not None:
            self._forget(asking)
            self._choices.cancelled(asking.number)

    def _forget(self, asking: _Asking) -> None:
        self._unchoose(asking)
        self._by_future.pop(asking.future, None)
        self._by_number.pop(asking.number, None)

    def _unchoose(self, asking: _Asking) -> None:
        same = self._chosen.get(asking.key)
        if same is not None and asking in same:
            same.remove(asking)
            if not same:
                del self._chosen[asking.key]

    def _arm(self) -> None:
        if self._timer is None and self._by_number:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """Read what replicas have made, give up requests whose end does not come, and decide."""
        self._timer = None
        for replica in self._replicas.values():
            stats = replica.routing_stats
            if stats and stats is not self._stats.get(_name(replica)):
                self._stats[_name(replica)] = stats
                made = stats.get(OUTPUT_TOKENS)
                if isinstance(made, int | float) and 0 <= made <= _MOST_MADE:
                    self._choices.output(_name(replica), made)
        now_s = self._clock()
        for asking in [one for same in self._chosen.values() for one in same]:
            limit_s = self._settings.answer_limit_s if asking.future.done() else _SENT_S
            if now_s > asking.since_s + limit_s:
                _log.warning("request %s: nobody tells of its end", asking.key[1])
                self._drop(asking.future)
        self._decide()
        self._arm()


def _name(replica: RunningReplica) -> str:
    name: str = replica.replica_id.unique_id
    return name


def sizes(given: Iterable[object], token_characters: float) -> tuple[int, int | None]:
    """Return the prompt tokens of a request, estimated where it comes as text, and its `max_tokens`.

    Args:
        given: Its arguments: objects or mappings as OpenAI's API has them.
        token_characters: Characters of a token.
    """
    for one in given:
        members = _members(one)
        prompt = members.get("prompt_token_ids") or members.get("prompt")
        prompt = members.get("messages") if prompt is None else prompt
        if prompt is None:
            continue
        tokens = _tokens(prompt, token_characters)
        most = members.get("max_completion_tokens") or members.get("max_tokens")
        return (
            min(max(1, math.ceil(tokens)), MOST_TOKENS),
            most if isinstance(most, int) and most > 0 else None,
        )
    return 1, None


def _tokens(prompt: object, token_characters: float) -> float:
    if isinstance(prompt, str):
        return len(prompt) / token_characters
    if isinstance(prompt, int):
        return 1.0
    # Not an iterator, which can be read once only: the replica reads it, too.
    if isinstance(prompt, list | tuple):
        return sum(_tokens(one, token_characters) for one in prompt)
    members = _members(prompt)  # Of a message, or of a part of one.
    inner = members.get("content", members.get("text"))
    return 0.0 if inner is None else _tokens(inner, token_characters)


def _members(given: object) -> Mapping[str, Any]:
    members: Mapping[str, Any] = (
        given if isinstance(given, Mapping) else getattr(given, "__dict__", {})
    )
    return members
