"""Which prefillers and ranks fit, by what their engines tell: no request is given to a pair that does not.

An engine that comes (back) up takes nothing until it was asked once, which takes three small pages. It
is asked again once a minute, and at once if another engine answers at its address. A page that does not
come tells nothing, and what is not known is no reason to refuse.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import msgspec

from balanceroute.proxy.core.events import PrefillerPaired, RankId
from balanceroute.proxy.live.engines.engine_facts import EngineFacts, facts_of, misfits
from balanceroute.proxy.live.engines.engine_gauges import MetricsPageError, cache_configs
from balanceroute.proxy.live.engines.faults import FetchError
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Status,
    Target,
)
from balanceroute.proxy.live.engines.model_list import ServedModel
from balanceroute.proxy.live.engines.served_models import ModelsPageError, parse_models

_log = logging.getLogger(__name__)
_One = TypeVar("_One", Prefiller, Rank)
_NOTHING = EngineFacts()
_TICK_S = 0.1
_REFRESH_S = 60.0
_TIMEOUT_S = 2.0
"""Of one page; they are fetched at the same time."""


class VersionPage(msgspec.Struct):
    """The answer of /version."""

    version: str


@dataclass(slots=True, eq=False)
class _Asked:
    """When an engine was asked last, and how many engines had been seen at its address by then."""

    at_s: float
    engines: int
    asking: bool = True


class Pairing:
    """Asks the engines, and keeps their pairs up to date.

    Args:
        instances: Each has `asked` and `unfit` set here.
        connector: The name of the KV connector.
        fetch: GETs a URL and returns the body of a 200; raises FetchError if there is none.
        active: Whether it does anything; else all count as fitting.

    Attributes:
        active: As given.
        facts: What each engine told last.
    """

    def __init__(
        self,
        instances: Instances,
        connector: str,
        fetch: Callable[[str], Awaitable[bytes]],
        *,
        active: bool = True,
    ) -> None:
        self.active = active
        self.facts: dict[Target, EngineFacts] = {}
        self._instances = instances
        self._fetch = fetch
        self._clock = asyncio.get_running_loop().time
        self._paired: Callable[[PrefillerPaired], None]
        self._changed: Callable[[], None]
        self._asked: dict[Target, _Asked] = {}
        self._ranks: dict[int, frozenset[RankId]] = {}  # By prefiller, as was told last.
        # By reason, the prefillers and the ranks that it concerns, and what of it was logged.
        self._refusals: dict[str, tuple[list[str], list[str]]] = {}
        self._logged = self._refusals

        @lru_cache(maxsize=4096)
        def refusal(prefill: EngineFacts, decode: EngineFacts) -> str:
            found = (one for one in misfits(connector, prefill, decode) if one.refused)
            return str(next(found, ""))

        self._refusal = refusal

    def attach(
        self, paired: Callable[[PrefillerPaired], None], changed: Callable[[], None]
    ) -> None:
        """Set who is told: of each prefiller whose ranks are others, before it opens, and then again."""
        self._paired, self._changed = paired, changed

    async def ask(self) -> None:
        """Ask all engines that have to be asked now, and wait for what they tell."""
        if not self.active:
            return
        await asyncio.gather(*map(self._ask, self._due()))

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as questions:
            while True:
                for target in self._due():
                    questions.create_task(self._ask(target))
                self._log()
                await asyncio.sleep(_TICK_S)

    def doubt(self, target: Target) -> None:
        """Ask an engine anew before it takes anything: it may be another one by now."""
        if not self.active:
            return
        self._asked.pop(target, None)
        for one in self._instances.of(target):
            one.asked = False

    def told(self, target: Target) -> dict[str, str]:
        """Return an engine's version, if it tells one, and why it fits no other, if so."""
        facts = self.facts.get(target, _NOTHING)
        unfit = next((one.unfit for one in self._instances.of(target) if one.unfit), "")
        named = {"version": facts.version, "unfit": unfit}
        return {name: value for name, value in named.items() if value}

    def update(self) -> None:
        """Judge all pairs again, after an engine came, went, or told something else."""
        if not self.active:
            return
        prefillers = _present(self._instances.prefillers)
        ranks = _present(self._instances.ranks)
        present = {one.target for one in prefillers} | {one.target for one in ranks}
        self.facts = {target: told for target, told in self.facts.items() if target in present}
        reasons: dict[str, tuple[list[str], list[str]]] = {}
        fed: set[RankId] = set()
        why_not: dict[RankId, str] = {}
        for prefiller in prefillers:
            able, reason = set(), ""
            for rank in ranks:
                refusal = self._refusal(self._told(prefiller), self._told(rank))
                if not refusal:
                    able.add(rank.id)
                    continue
                reason = reason or refusal
                why_not.setdefault(rank.id, refusal)
                sides = reasons.setdefault(refusal, ([], []))
                for names, name in zip(sides, (prefiller.name, rank.name), strict=True):
                    if name not in names:
                        names.append(name)
            self._tell(prefiller, None if len(able) == len(ranks) else frozenset(able))
            up = {rank.id for rank in ranks if rank.status is Status.UP}
            prefiller.unfit = reason if up and not up & able else ""
            if prefiller.status is Status.UP:
                fed |= able
        some_up = any(prefiller.status is Status.UP for prefiller in prefillers)
        for rank in ranks:
            rank.unfit = why_not.get(rank.id, "") if some_up and rank.id not in fed else ""
        self._refusals = reasons

    def _told(self, one: Prefiller | Rank) -> EngineFacts:
        return self.facts.get(one.target, _NOTHING)

    def _tell(self, prefiller: Prefiller, ranks: frozenset[RankId] | None) -> None:
        if self._ranks.get(prefiller.id) == ranks:
            return
        if ranks is None:
            del self._ranks[prefiller.id]
        else:
            self._ranks[prefiller.id] = ranks
        prefiller.ranks = ranks
        self._paired(PrefillerPaired(prefiller.id, ranks))

    def _log(self) -> None:
        for reason, (prefill, decode) in self._refusals.items():
            if self._logged.get(reason) != (prefill, decode):
                fields = {
                    "decode": ", ".join(decode),
                    "prefill": ", ".join(prefill),
                    "reason": reason,
                }
                _log.warning("engines that do not fit are not paired", extra={"fields": fields})
        if self._logged and not self._refusals:
            _log.info("all prefillers and decode engines fit again")
        self._logged = self._refusals

    def _due(self) -> list[Target]:
        now_s = self._clock()
        due = []
        present: dict[Target, Prefiller | Rank] = {}
        present |= {one.target: one for one in _present(self._instances.prefillers)}
        present |= {one.target: one for one in _present(self._instances.ranks)}
        for target in self._asked.keys() - present.keys():
            del self._asked[target]
        for target, one in present.items():
            if one.status is not Status.UP:
                continue
            engines = len(one.engines) if isinstance(one, Prefiller) else 0
            last = self._asked.get(target)
            if last is not None and last.asking:
                continue
            if last is not None and engines > max(1, last.engines):
                self.doubt(target)  # Another engine answers there.
                self._changed()
            elif last is not None and now_s - last.at_s < _REFRESH_S:
                continue
            self._asked[target] = _Asked(now_s, engines)
            due.append(target)
        return due

    async def _ask(self, target: Target) -> None:
        asked = self._asked[target]
        version, models, metrics = await asyncio.gather(
            *(self._page(target, path) for path in ("/version", "/v1/models", "/metrics"))
        )
        if self._asked.get(target) is not asked:
            return  # It is in doubt again, or gone.
        asked.asking = False
        self.facts[target] = facts_of(_version(version), _models(models), _caches(metrics))
        for one in self._instances.of(target):
            one.asked = True
        self.update()
        self._changed()

    async def _page(self, target: Target, path: str) -> bytes:
        """Return a page; nothing if it does not come."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._fetch(target.url + path)
        except (FetchError, TimeoutError) as error:
            fields = {"url": target.url, "page": path, "reason": str(error)}
            _log.debug("an engine does not tell what it is", extra={"fields": fields})
            return b""


def _present(instances: Sequence[_One]) -> list[_One]:
    return [one for one in instances if one.status is not Status.REMOVED]


def _version(page: bytes) -> str:
    try:
        return msgspec.json.decode(page, type=VersionPage).version
    except (ValueError, RecursionError):
        return ""


def _models(page: bytes) -> tuple[ServedModel, ...]:
    try:
        return parse_models(page)
    except ModelsPageError:
        return ()


def _caches(page: bytes) -> list[dict[str, str]]:
    try:
        return cache_configs(page)
    except MetricsPageError:
        return []
