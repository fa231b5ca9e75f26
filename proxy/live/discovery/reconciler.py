"""Registers the engines that are found, and drains those that are found no more.

Rules:
- An engine is added as an administrator adds it, once its source says that it is ready, its /health
  answers and it reports its ranks. One that does not answer is asked again and again.
- A reading is one change, however many engines it adds or takes away: those that answered are added
  together when all of the reading were asked. A slow one delays them by some seconds at most.
- Engines are asked a few at a time. Of more than `limit` engines some are left out: not those that are
  registered.
- One that is missing for `hold_s`, or is about to end, gets nothing new. It is removed when its last
  request has ended and the last KV cache that it holds was pulled. If it comes back, it is taken back.
- While a source cannot be read, its last view holds: a registry that is down says nothing of the engines,
  and health checks see those that died.
- Engines of the settings and those that administrators add are not touched. What an administrator
  drains or removes stays so until it has been missing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.roster import Addition, Roster
from balanceroute.proxy.live.engines.engine_url import FetchError
from balanceroute.proxy.live.engines.instances import Target

_log = logging.getLogger(__name__)
# Between two looks at engines that are missing or may be removed, and at least between any two.
_STEP_S, _PAUSE_S = 0.5, 0.05
# Until an engine that did not answer is asked again, or longer: so many are asked again in a second.
_RETRY_S, _RETRIES_IN_S = 1.0, 100
# Engines that are asked at a time, not counting those that are slow to answer.
_AT_ONCE = 16
_SLOW_S = 0.1
# How long an engine that has answered waits for other ones of its reading.
_PATIENCE_S = 5.0


class Reconciler:
    """Keeps the engines what the sources say. `run` it.

    Args:
        ask: Returns the number of an engine's ranks, None for a prefiller, when it has answered.
            Raises FetchError.

    Attributes:
        owned: The engines that are registered because they were found.
        leaving: Of these, those that are drained because they are found no more.
    """

    def __init__(
        self,
        engines: "Roster",
        sources: "Sequence[DiscoverySource]",
        *,
        ask: "Callable[[Found], Awaitable[int | None]]",
        hold_s: float,
        limit: int,
        clock: Callable[[], float],
        owned: Collection[Target] = (),
        leaving: Collection[Target] = (),
    ) -> None:
        self._engines, self._sources = engines, sources
        self._ask, self._hold_s, self._limit, self._clock = ask, hold_s, limit, clock
        self.owned, self.leaving = set(owned), set(leaving)
        self._views: list[View | None] = [None] * len(sources)
        self._missing_since_s: dict[Target, float] = {}
        # Those that are asked or to be asked, and of these those for which answered ones wait.
        self._asking: set[Target] = set()
        self._early: set[Target] = set()
        self._free = asyncio.Semaphore(_AT_ONCE)
        # Those that have answered, with their ranks, and since when the first of them waits.
        self._answered: dict[Target, tuple[Found, int | None]] = {}
        self._answered_s = 0.0
        self._tried_s: dict[Target, float] = {}
        # Removed by an administrator, and found still.
        self._dismissed: set[Target] = set()
        self._left_out = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for place, source in enumerate(self._sources):
                tasks.create_task(source.run(partial(self._report, place)))
            while True:
                self._changed.clear()
                for found in self.step():
                    self._asking.add(found.target)
                    self._early.add(found.target)
                    tasks.create_task(self._look_for(found))
                await asyncio.sleep(_PAUSE_S)
                try:
                    async with asyncio.timeout(_STEP_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def step(self) -> "list[Found]":
        """Drain, remove, take back and add the engines that are due; return those to ask now."""
        view = self._view()
        present = set(self._engines.targets())
        ordered_away = self.owned - present
        self.owned -= ordered_away
        self.leaving &= self.owned
        self._dismissed = (self._dismissed | ordered_away) & view.keys()
        self._tried_s = {one: at_s for one, at_s in self._tried_s.items() if one in view}
        with self._engines.one_change():
            self._part(view)
            back = {one: (view[one], None) for one in self.leaving if _is_usable(view.get(one))}
            self._add(back)
            self._add_answered(view)
        return [
            found
            for target, found in view.items()
            if _is_usable(found) and self._is_wanted(target, present)
        ]

    def _part(self, view: "Mapping[Target, Found]") -> None:
        """Drain the engines that are gone, and remove those on which nothing is left."""
        gone = []
        for target in sorted(self.owned, key=_order):
            found = view.get(target)
            if found is not None and not found.leaving:
                self._missing_since_s.pop(target, None)
            elif target in self.leaving:
                gone.append(target)
            elif found is not None or self._is_missing(target):
                self.leaving.add(target)
                self._engines.drain(target.role, target.url)
        if not gone:
            return
        for target in self._engines.remove_idle(gone):
            self.owned.discard(target)
            self.leaving.discard(target)
            self._missing_since_s.pop(target, None)

    def _is_wanted(self, target: Target, present: set[Target]) -> bool:
        if target in self._asking or target in self._answered or target in self._dismissed:
            return False
        wait_s = max(_RETRY_S, len(self._tried_s) / _RETRIES_IN_S)
        is_due = self._clock() - self._tried_s.get(target, -wait_s) >= wait_s
        return is_due and target not in present and target not in self.owned

    def _is_missing(self, target: Target) -> bool:
        if None in self._views:  # It may be where nothing was read yet.
            return False
        now_s = self._clock()
        return now_s - self._missing_since_s.setdefault(target, now_s) >= self._hold_s

    def _view(self) -> "dict[Target, Found]":
        """Return the last engines of all sources, within the limit; the first source that has an engine counts."""
        all_of: dict[Target, Found] = {}
        for view in self._views:
            for target, found in (view or {}).items():
                all_of.setdefault(target, found)
        left_out = max(0, len(all_of) - self._limit)
        if left_out:
            kept = {target: found for target, found in all_of.items() if target in self.owned}
            more = (one for one in all_of.items() if one[0] not in kept)
            all_of = kept | dict(islice(more, max(0, self._limit - len(kept))))
        if bool(left_out) != bool(self._left_out):
            fields = {"discover_limit": self._limit, "left_out": left_out}
            message = "more engines are found than --discover-limit allows: some are left out"
            _log.warning(
                message if left_out else "no engine that is found is left out any more",
                extra={"fields": fields},
            )
        self._left_out = left_out
        return all_of

    def _report(self, place: int, view: "View") -> None:
        if view is not self._views[place]:  # Else nothing has changed.
            self._views[place] = view
            self._changed.set()

    async def _look_for(self, found: "Found") -> None:
        """Ask an engine, in its turn, and have it added if it answers."""
        target = found.target
        question: asyncio.Task[int | None] | None = None
        try:
            async with self._free:
                question = asyncio.create_task(_answer(self._ask, found))
                await asyncio.wait([question], timeout=_SLOW_S)
            if not question.done():
                self._waits_no_more(target)
                await asyncio.wait([question])
            self._take(found, question)
        finally:
            self._asking.discard(target)
            self._waits_no_more(target)
            if question is not None:
                question.cancel()

    def _waits_no_more(self, target: Target) -> None:
        """Add those that have answered if they waited for this one alone."""
        if target in self._early:
            self._early.discard(target)
            if not self._early:
                self._changed.set()

    def _take(self, found: "Found", question: "asyncio.Task[int | None]") -> None:
        # Not raised here: the error would refer to this frame, and that to the question, which has it.
        error = question.exception()
        if isinstance(error, ConfigError | FetchError):
            self._failed(found.target, error)
            return
        ranks = question.result()
        if not self._answered:
            self._answered_s = self._clock()
        self._answered[found.target] = found, ranks

    def _failed(self, target: Target, error: Exception) -> None:
        level = logging.DEBUG if target in self._tried_s else logging.WARNING
        fields = {"role": target.role.value, "url": target.url, "reason": str(error)}
        _log.log(level, "a found engine cannot be added yet", extra={"fields": fields})
        self._tried_s[target] = self._clock()

    def _add_answered(self, view: "Mapping[Target, Found]") -> None:
        """Add the engines that have answered, unless other ones of their reading will soon."""
        if not self._answered:
            return
        if self._early and self._clock() - self._answered_s < _PATIENCE_S:
            return
        answered, self._answered = self._answered, {}
        self._add({one: found for one, found in answered.items() if _is_usable(view.get(one))})

    def _add(self, answered: "Mapping[Target, tuple[Found, int | None]]") -> None:
        if not answered:
            return
        new = answered.keys() - self.owned
        # Before they are added: with that they are kept as found.
        self.owned |= answered.keys()
        self.leaving -= answered.keys()
        additions = [_addition(found, ranks) for found, ranks in answered.values()]
        for target, error in zip(answered, self._engines.add_all(additions), strict=True):
            if error is None:
                self._tried_s.pop(target, None)
                continue
            if target in new or isinstance(error, ConfigError):
                self.owned.discard(target)  # If not, it was taken back by order meanwhile.
            if isinstance(error, ConfigError):
                self._failed(target, error)


async def _answer(ask: "Callable[[Found], Awaitable[int | None]]", found: "Found") -> int | None:
    return await ask(found)


def _is_usable(found: "Found | None") -> bool:
    return found is not None and found.ready and not found.leaving


def _addition(found: "Found", ranks: int | None) -> Addition:
    return Addition(
        found.target.role,
        found.target.url,
        ranks,
        bootstrap=found.bootstrap,
        kv_events=found.kv_events,
        kv_replay=found.kv_replay,
        found=True,
    )


def _order(target: Target) -> tuple[str, str]:
    return target.role.value, target.url


@dataclass(frozen=True, slots=True)
class Found:
    """An engine, as its source reports it."""

    target: Target
    ranks: int | None = None  # The ranks of a decode server; None to ask it.
    # The address of a prefiller's bootstrap server; None for the usual one.
    bootstrap: str | None = None
    # Where a prefiller publishes its KV cache events; None if its source does not say.
    kv_events: str | None = None
    kv_replay: str | None = None  # Where it sends them again; likewise.
    ready: bool = True  # Whether it serves already. One that is registered stays so either way.
    leaving: bool = False  # Whether it is about to end.


View = Mapping[Target, Found]
"""All engines of a source."""


class DiscoverySource(Protocol):
    """Where engines are found."""

    async def run(self, report: Callable[[View], None]) -> None:
        """Report all engines whenever they may have changed; nothing while the source cannot be read.

        The same object means that nothing has changed; a reported view is not changed afterwards.
        """
