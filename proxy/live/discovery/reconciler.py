"""Registers the engines that are found, and drains those that are found no more.

Rules:
- An engine is added as an administrator adds it, once it is ready and tells its ranks.
- One that is missing for `hold_s`, or is about to end, gets nothing new. It is removed when its last
  request has ended and the last KV cache that it holds was pulled. If it comes back, it is taken back.
- A source that cannot be read tells nothing, and what it told last holds: a registry that is down says
  nothing of the engines, and health checks see those that died.
- Engines of the settings and those that administrators add are not touched. What an administrator
  drains or removes stays so until it has been missing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.errors import ConflictError
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.faults import FetchError
from balanceroute.proxy.live.engines.instances import Role, Target

if TYPE_CHECKING:
    from balanceroute.proxy.live.discovery.found import Found, Source, View

_log = logging.getLogger(__name__)
# Between two looks at what is missing or may be removed, and two tries to add an engine.
_STEP_S = 0.5
_RETRY_S = 1.0


class Engines(Protocol):
    """Who adds and removes engines; see `Roster`."""

    def targets(self) -> list[Target]:
        """Return the instances that are not removed."""

    def sessions_on(self, target: Target) -> Collection[object]:
        """Return the requests in flight on an instance."""

    async def add(
        self,
        role: Role,
        url: str,
        *,
        ranks: int | None,
        bootstrap: str | None,
        kv_events: str | None = None,
        kv_replay: str | None = None,
    ) -> None:
        """Add an instance, or take a draining one back. Raises ConfigError, ConflictError."""

    def drain(self, role: Role, url: str) -> None:
        """Send nothing new to an instance."""

    def remove(self, role: Role, url: str, *, force: bool) -> None:
        """Forget an instance."""


class Reconciler:
    """Keeps the engines what the sources say. `run` it.

    Args:
        engines: Adds and removes them.
        sources: Where they are found.
        ask: Returns the number of a decode server's ranks. Raises FetchError.
        hold_s: How long an engine may be missing.
        clock: The loop's time.
        owned: Those that were found before a restart.
        leaving: Of these, those that were being drained.

    Attributes:
        owned: The engines that are registered because they were found.
        leaving: Of these, those that are drained because they are found no more.
    """

    def __init__(
        self,
        engines: Engines,
        sources: "Sequence[Source]",
        *,
        ask: Callable[[EngineUrl], Awaitable[int]],
        hold_s: float,
        clock: Callable[[], float],
        owned: Collection[Target] = (),
        leaving: Collection[Target] = (),
    ) -> None:
        self._engines, self._sources = engines, sources
        self._ask, self._hold_s, self._clock = ask, hold_s, clock
        self.owned, self.leaving = set(owned), set(leaving)
        self._views: list[View | None] = [None] * len(sources)
        self._missing_since_s: dict[Target, float] = {}
        self._adding: set[Target] = set()
        self._tried_s: dict[Target, float] = {}
        # Removed by an administrator, and found still.
        self._dismissed: set[Target] = set()
        self._told = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for place, source in enumerate(self._sources):
                tasks.create_task(source.run(partial(self._tell, place)))
            while True:
                self._told.clear()
                for found in self.step():
                    self._adding.add(found.target)
                    tasks.create_task(self._add(found))
                try:
                    async with asyncio.timeout(_STEP_S):
                        await self._told.wait()
                except TimeoutError:
                    continue

    def step(self) -> "list[Found]":
        """Drain and remove what is gone; return what is to be added now."""
        view = self._view()
        present = set(self._engines.targets())
        ordered_away = self.owned - present - self._adding
        self.owned -= ordered_away
        self.leaving &= self.owned
        self._dismissed = (self._dismissed | ordered_away) & view.keys()
        self._tried_s = {one: at_s for one, at_s in self._tried_s.items() if one in view}
        for target in sorted(self.owned - self._adding, key=_order):
            self._settle(target, view.get(target))
        return [
            found
            for target, found in view.items()
            if found.ready and not found.leaving and self._is_wanted(target, present)
        ]

    def _is_wanted(self, target: Target, present: set[Target]) -> bool:
        if target in self._adding or target in self._dismissed:
            return False
        if target in present and target not in self.leaving:
            return False
        return self._clock() - self._tried_s.get(target, -_RETRY_S) >= _RETRY_S

    def _settle(self, target: Target, found: "Found | None") -> None:
        """Drain an engine that is gone, and remove it when nothing is left on it."""
        if found is not None and not found.leaving:
            self._missing_since_s.pop(target, None)
        elif target not in self.leaving:
            if found is None and not self._is_missing(target):
                return
            self.leaving.add(target)
            self._engines.drain(target.role, target.url)
        elif not self._engines.sessions_on(target):
            self.owned.discard(target)
            self.leaving.discard(target)
            self._missing_since_s.pop(target, None)
            self._engines.remove(target.role, target.url, force=False)

    def _is_missing(self, target: Target) -> bool:
        if None in self._views:  # It may be where nothing was read yet.
            return False
        now_s = self._clock()
        return now_s - self._missing_since_s.setdefault(target, now_s) >= self._hold_s

    def _view(self) -> "dict[Target, Found]":
        """Return what all sources told last; the first that has an engine is believed."""
        all_of: dict[Target, Found] = {}
        for view in self._views:
            for target, found in (view or {}).items():
                all_of.setdefault(target, found)
        return all_of

    def _tell(self, place: int, view: "View") -> None:
        self._views[place] = view
        self._told.set()

    async def _add(self, found: "Found") -> None:
        target, ranks = found.target, found.ranks
        was_owned = target in self.owned
        try:
            if target.role is Role.DECODE and ranks is None and not was_owned:
                ranks = await self._ask(EngineUrl.parse(target.url))
            self.owned.add(target)
            self.leaving.discard(target)
            await self._engines.add(
                target.role,
                target.url,
                ranks=ranks,
                bootstrap=found.bootstrap,
                kv_events=found.kv_events,
                kv_replay=found.kv_replay,
            )
        except ConflictError:
            if not was_owned:
                self.owned.discard(target)  # It was added by order meanwhile.
        except (ConfigError, FetchError) as error:
            self.owned.discard(target)
            level = logging.DEBUG if target in self._tried_s else logging.WARNING
            fields = {"role": target.role.value, "url": target.url, "reason": str(error)}
            _log.log(level, "a found engine cannot be added yet", extra={"fields": fields})
            self._tried_s[target] = self._clock()
        else:
            self._tried_s.pop(target, None)
        finally:
            self._adding.discard(target)


def _order(target: Target) -> tuple[str, str]:
    return target.role.value, target.url
