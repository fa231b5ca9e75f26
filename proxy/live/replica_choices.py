"""Choices of decode ranks for a router of another make that calls this one inside its own process.

The caller passes the names of the ranks, the requests as they ask, begin and end, and the ranks' counters of
output tokens; `decide` answers. The scheduler and its policies are those of `serve`. There is no prefiller
here: each request is in the pool from when it asks.

    choices = ReplicaChoices(ReplicaSettings(), time.monotonic)
    choices.replicas({"a": 8, "b": 8})                 # slots by name
    number = choices.ask(900); choices.decide()        # [(number, "a")]
    choices.began(number); choices.ended(number)       # or `refused`, `cancelled`
"""

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from msgspec import Struct

from balanceroute.predictors.state import MAX_OUTPUT_TOKENS
from balanceroute.predictors.survival import Survival
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    Expire,
    Observer,
    RankClosed,
    RankId,
    RankOpened,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    Tick,
    Ticket,
    TokensEmitted,
)
from balanceroute.proxy.core.policies import Policy, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.core.setting import choice, integer, number, settings_of, words
from balanceroute.proxy.live.scheduling.scraped_loads import RankPace

_log = logging.getLogger(__name__)
MOST_TOKENS = 1 << 24
"""Of a prompt; more than any context has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """How replicas are chosen."""

    policy: str = choice("br-h", "routing policy", words(["fifo", "br-0", "br-h"]))
    batch: int | None = integer(
        None,
        "slots of a replica, if those are fewer than its own",
        1,
        10**6,
        shown_default="its max_ongoing_requests",
        word="auto",
    )
    most_waiting: int = integer(
        1024, "requests that wait for a choice; the others wait where the router has them", 1, 10**5
    )
    wait_s: float | None = number(
        None, "time after which a request that waits is refused", 0.001, 1e6, word="none"
    )
    answer_limit_s: float = number(
        3600.0, "time after which an answer of which nobody tells is over", 1, 1e6
    )
    token_characters: float = number(
        4.0, "characters of a token, where a prompt comes as text", 0.1, 1000
    )

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Return settings by their names, as JSON has them.

        Raises:
            ConfigError: There is no such setting, or a value is out of its range.
        """
        known = {one.name: one for one in settings_of(cls)}
        checked: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"there is no setting {name!r}; there are {', '.join(known)}")
            try:
                checked[name] = known[name].check(value)
            except ConfigError as error:
                raise ConfigError(f"{name} {error}") from None
        return cls(**checked)


def _failed(what: str, error: Exception) -> None:
    _log.error("the %s failed; the oldest request goes first", what, exc_info=error)


class _Progress(Struct):
    """How far a request is that a rank has begun."""

    rank: RankId
    begin: float  # Rounds of its rank when it began; negative if they are unknown.
    begin_s: float
    reported: int = 0  # Tokens of which the scheduler knows.


class ReplicaChoices:
    """One decode group, whose ranks are the replicas of a deployment.

    Args:
        clock: Seconds that never go back.
        observer: Gets each decision; None for none.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        clock: Callable[[], float],
        observer: Observer | None = None,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._predictor = Survival()
        self._ids: dict[str, RankId] = {}
        self._names: list[str] = [""]  # By rank.
        self._slots = [settings.batch or 1]
        self._paces: dict[RankId, RankPace] = {}
        self._progress: dict[RequestId, _Progress] = {}
        self._count = 0
        self.scheduler = Scheduler(
            self._config(), self._policy(), on_failure=_failed, observer=observer
        )
        # There is no replica yet, and no scheduler without a rank.
        self.feed(RankClosed(RankId(0)), self._now_ns())

    def _now_ns(self) -> int:
        return round(self._clock() * 1e9)

    def _config(self) -> SchedulerConfig:
        wait_s, slots = self._settings.wait_s, self._slots
        return SchedulerConfig(
            ranks=len(slots),
            batch_limit=max(slots),
            rank_batch_limits=tuple(slots),
            ttl_ns=None if wait_s is None else round(wait_s * 1e9),
        )

    def _policy(self) -> Policy:
        slots = [self._slots[rank] for rank in self._ids.values()] or self._slots
        inputs = PolicyInputs(
            ranks=len(self._slots),
            batch_limit=max(slots),
            settings=PolicySettings(),
            rng=random.Random(0),
            predictor=self._predictor,
            serving=len(self._ids),
        )
        return make_policy(self._settings.policy, inputs)

    def feed(self, event: Event, now_ns: int) -> list[Action]:
        """Have the scheduler know of an event; learn from what ends."""
        if isinstance(event, RequestFinished):
            self._learn(event.request)
        return self.scheduler.handle(event, now_ns=now_ns)

    def _learn(self, request: RequestId) -> None:
        """Note how long an answer was that has ended, if that is known."""
        progress = self._progress.pop(request, None)
        pace = None if progress is None else self._paces.get(progress.rank)
        # How far a request came that ran between two readings is unknown.
        if progress and pace and progress.begin >= 0.0 and pace.read_s > progress.begin_s:
            made = self.scheduler.emitted(request)
            self._predictor.observe(request, min(max(1, made), MAX_OUTPUT_TOKENS))

    # What the caller calls. For a request that is over, or unknown, a call does nothing.

    def replicas(self, slots: Mapping[str, int]) -> None:
        """Note which replicas there are, and the requests that each takes at a time."""
        now_ns = self._now_ns()
        batch = self._settings.batch
        given = {name: max(1, min(batch or most, most)) for name, most in slots.items()}
        before = {name: self._slots[rank] for name, rank in self._ids.items()}
        for name in [name for name in self._ids if name not in given]:
            rank = self._ids.pop(name)
            self._paces.pop(rank, None)
            self.feed(RankClosed(rank), now_ns)
        opened = [name for name in given if name not in self._ids]
        for name in opened:
            rank = self._ids[name] = self._free_rank()
            self._names[rank] = name
        for name, most in given.items():
            self._slots[self._ids[name]] = most
        if given != before:
            self.scheduler.reconfigure(self._config(), self._policy())
        for name in opened:
            self.feed(RankOpened(self._ids[name]), now_ns)

    def _free_rank(self) -> RankId:
        """Return the number of a rank that is gone with all that it had, or a new one."""
        bound, used = self.scheduler.ledger.bound, set(self._ids.values())
        for index in range(len(self._names)):
            rank = RankId(index)
            # Of the latter the scheduler does not know yet.
            if rank not in used and index < len(bound) and not bound[index]:
                return rank
        self._names.append("")
        self._slots.append(1)
        return RankId(len(self._names) - 1)

    def ask(self, prompt_tokens: int, max_tokens: int | None = None) -> RequestId:
        """Take a request, which waits for a replica from now on."""
        request = RequestId(self._count)
        self._count += 1
        ticket = Ticket(
            min(max(1, prompt_tokens), MOST_TOKENS),
            prefill=False,
            max_tokens=None if max_tokens is None else min(max(1, max_tokens), MOST_TOKENS),
        )
        self.feed(RequestArrived(request, ticket), self._now_ns())
        return request

    def refused(self, request: RequestId) -> None:
        """Note that its replica did not take it: it waits for another one, if there is one."""
        if self._lives(request) and request not in self._progress:
            self.feed(DecodeLost(request), self._now_ns())

    def began(self, request: RequestId) -> None:
        """Note that its replica works on it."""
        if not self._lives(request) or request in self._progress:
            return
        rank = self.scheduler.requests[request].rank
        assert rank is not None, "a request begins only once it has a rank"
        pace, now_s = self._paces.get(rank), self._clock()
        begin = -1.0 if pace is None else pace.rounds_at(now_s)
        self._progress[request] = _Progress(rank, begin, now_s)
        self.feed(DecodeStarted(request, token_seen=False), self._now_ns())

    def ended(self, request: RequestId) -> None:
        """Note that its replica has it no more, for whatever reason."""
        if self._lives(request):
            self.feed(RequestFinished(request), self._now_ns())

    def cancelled(self, request: RequestId) -> None:
        """Note that its caller no longer waits for it, or for its answer."""
        if self._lives(request):
            self._progress.pop(request, None)
            self.feed(RequestCancelled(request), self._now_ns())

    def output(self, name: str, tokens: float) -> None:
        """Note how many tokens a replica has made in all, since it started."""
        rank = self._ids.get(name)
        if rank is not None:
            running = float(self.scheduler.ledger.bound[rank])
            self._paces.setdefault(rank, RankPace()).read(tokens, running, self._clock())

    def _lives(self, request: RequestId) -> bool:
        return request in self.scheduler.requests

    # What it answers.

    def decide(self) -> list[tuple[RequestId, str | None]]:
        """Return the requests that are chosen for now, each with its replica; None if it is refused."""
        now_ns = self._now_ns()
        self._advance(now_ns)
        found: list[tuple[RequestId, str | None]] = []
        for action in self.feed(Tick(), now_ns):
            if isinstance(action, Admit):
                found.append((action.request, self._names[action.rank]))
            elif isinstance(action, Expire):
                found.append((action.request, None))
        return found

    def _advance(self, now_ns: int) -> None:
        """Report to the scheduler how far the requests are by now, by their ranks' rounds."""
        now_s = self._clock()
        for request, progress in self._progress.items():
            pace = self._paces.get(progress.rank)
            if pace is None:
                continue
            tokens = int(pace.rounds_at(now_s) - max(0.0, progress.begin))
            most = self.scheduler.requests[request].ticket.max_tokens
            more = min(tokens, most or tokens) - progress.reported
            if more > 0:
                progress.reported += more
                self.feed(TokensEmitted(request, more), now_ns)
