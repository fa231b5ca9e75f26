"""Which prefillers and ranks fit, by their engines' pages: a pair that does not fit gets no request.

An engine that comes (back) up takes nothing until the proxy has asked it once, which takes three small pages.
The proxy asks again once a minute, and at once if another engine answers at its address. A missing page says
nothing, and an unknown value is no reason to refuse. If no answer comes, as of an engine that is busy, the
proxy asks twice more at once, and the last answer holds.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import msgspec

from balanceroute.proxy.core.events import PrefillerPaired, RankId
from balanceroute.proxy.live.engines.engine_facts import EngineFacts, doubts, facts_of, misfits
from balanceroute.proxy.live.engines.engine_gauges import (
    KvSigns,
    MetricsPageError,
    cache_configs,
    kv_signs,
)
from balanceroute.proxy.live.engines.engine_url import Fault, FetchError
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Status,
    Target,
)
from balanceroute.proxy.live.engines.model_list import ModelsPageError, ServedModel, parse_models

_log = logging.getLogger(__name__)
_One = TypeVar("_One", Prefiller, Rank)
_NOTHING = EngineFacts()
_TICK_S = 0.1
# Engines that are asked at a time.
_AT_ONCE = 16
# Kinds of prefillers, and of decode engines. A fleet that is updated has two or three.
_MOST_KINDS = 128
# Of engines, in a line of the log.
_MOST_NAMES = 32
_REFRESH_S = 60.0
_TIMEOUT_S = 2.0
"""Of one page; they are fetched at the same time."""
_TRIES = 3
# How pages fail that an engine does not have; else it did not answer.
_ANSWERED = frozenset({Fault.SERVER_ERROR, Fault.PROTOCOL})


class VersionPage(msgspec.Struct):
    """The answer of /version."""

    version: str


@dataclass(slots=True, eq=False)
class _Asked:
    """When an engine was asked last, and how many engines had been seen at its address by then."""

    at_s: float
    engines: int
    silent: int  # How often in a row it did not answer.
    asking: bool = True

    @property
    def again(self) -> bool:
        """Whether it is to be asked again at once."""
        return 0 < self.silent < _TRIES


class Pairing:
    """Asks the engines, and keeps their pairs up to date.

    Args:
        instances: Each has `asked` and `unfit` set here.
        fetch: GETs a URL and returns the body of a 200; raises FetchError if there is none.
        active: Whether it does anything; else all count as fitting.
        models: Those that the engines are to serve; empty for whatever they serve.
    """

    def __init__(
        self,
        instances: Instances,
        connector: str,
        fetch: Callable[[str], Awaitable[bytes]],
        *,
        active: bool = True,
        models: Sequence[str] = (),
    ) -> None:
        self.active = active
        self.facts: dict[Target, EngineFacts] = {}  # Each engine's last facts.
        self._connector, self._models = connector, models
        self._instances = instances
        self._fetch = fetch
        self._clock = asyncio.get_running_loop().time
        self._paired: Callable[[PrefillerPaired], None]
        self._changed: Callable[[], None]
        self._asked: dict[Target, _Asked] = {}
        self._asking = 0
        self._answered: dict[Target, _Asked] = {}  # Whose pairs are to be judged.
        # Of the prefillers with the same facts.
        self._ranks: dict[EngineFacts, frozenset[RankId] | None] = {}
        # By reason, the prefillers and the ranks that it concerns, and what of it was logged.
        self._refusals: dict[str, tuple[list[str], list[str]]] = {}
        self._logged = self._refusals

        @lru_cache(maxsize=2 * _MOST_KINDS**2)
        def refusal(prefill: EngineFacts, decode: EngineFacts) -> str:
            found = (one for one in misfits(connector, prefill, decode) if one.refused)
            return str(next(found, ""))

        self._refusal = refusal

    def attach(
        self, paired: Callable[[PrefillerPaired], None], changed: Callable[[], None]
    ) -> None:
        """Set the callbacks: `paired` for each prefiller with new ranks, before it opens and later on."""
        self._paired, self._changed = paired, changed

    async def ask(self, targets: Collection[Target]) -> None:
        """Ask those of some engines that are due now, and wait for their answers."""
        if not self.active:
            return
        due = [target for target in self._due() if target in targets]
        for begin in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*map(self._ask, due[begin : begin + _AT_ONCE]))
        self._settle()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as questions:
            while True:
                for target in self._due()[: max(0, _AT_ONCE - self._asking)]:
                    questions.create_task(self._ask(target))
                self._settle()
                self._log()
                await asyncio.sleep(_TICK_S)

    def doubt(self, target: Target) -> None:
        """Ask an engine anew before it takes anything: it may be another one by now."""
        if not self.active:
            return
        self._asked.pop(target, None)
        self.facts.pop(target, None)
        for one in self._instances.of(target):
            one.asked = False

    def state_of(self, target: Target) -> dict[str, object]:
        """Return an engine's version, if it is known, why it fits no other, and doubts, if any."""
        facts, parts = self.facts.get(target, _NOTHING), self._instances.of(target)
        unfit = next((one.unfit for one in parts if one.unfit), "")
        doubts = list(dict.fromkeys(doubt for one in parts for doubt in one.doubts))
        named = {"version": facts.version, "unfit": unfit, "doubts": doubts}
        return {name: value for name, value in named.items() if value}

    def update(self) -> None:
        """Judge all pairs again, after an engine came, went, or reported something else.

        Engines with the same facts fit the same, so this compares each two facts, not each two engines.
        """
        if not self.active:
            return
        prefillers = _present(self._instances.prefillers)
        ranks = _present(self._instances.ranks)
        present = {one.target for one in prefillers} | {one.target for one in ranks}
        self.facts = {target: kind for target, kind in self.facts.items() if target in present}
        feeders, takers = self._alike(prefillers), self._alike(ranks)
        up = {kind for kind, alike in takers.items() if _is_any_up(alike)}
        why_not: dict[EngineFacts, str] = {}
        fed: set[EngineFacts] = set()
        refusals: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
        for kind, alike in feeders.items():
            refused = {other: why for other in takers if (why := self._refusal(kind, other))}
            able = takers.keys() - refused.keys()
            for other, why in refused.items():
                why_not.setdefault(other, why)
                sides = refusals.setdefault(why, ({}, {}))
                sides[0].update(dict.fromkeys(one.name for one in alike))
                sides[1].update(dict.fromkeys(one.name for one in takers[other]))
            self._pair(kind, alike, [one.id for other in able for one in takers[other]], refused)
            reason = "" if up & able or not up else next(iter(refused.values()))
            for prefiller in alike:
                prefiller.unfit = reason
            if _is_any_up(alike):
                fed |= able
        some_up = any(map(_is_any_up, feeders.values()))
        for other, group in takers.items():
            reason = why_not.get(other, "") if some_up and other not in fed else ""
            for rank in group:
                rank.unfit = reason
        self._ranks = {kind: self._ranks[kind] for kind in feeders}
        self._refusals = {why: (list(one), list(two)) for why, (one, two) in refusals.items()}

    def _alike(self, instances: Sequence[_One]) -> dict[EngineFacts, list[_One]]:
        """Return the instances by their facts; beyond the most kinds an engine counts as unknown."""
        alike: dict[EngineFacts, list[_One]] = {}
        for one in instances:
            kind = self.facts.get(one.target, _NOTHING)
            if kind not in alike and len(alike) >= _MOST_KINDS:
                kind = _NOTHING
            alike.setdefault(kind, []).append(one)
        return alike

    def _pair(
        self,
        kind: EngineFacts,
        alike: Sequence[Prefiller],
        able: Sequence[RankId],
        refused: Mapping[EngineFacts, str],
    ) -> None:
        """Set the ranks of prefillers, and report them where they have changed."""
        ranks = frozenset(able) if refused else None
        if ranks == self._ranks.get(kind):
            ranks = self._ranks.get(kind)  # The same object, which is compared at once.
        self._ranks[kind] = ranks
        for prefiller in alike:
            if prefiller.ranks is not ranks and prefiller.ranks != ranks:
                self._paired(PrefillerPaired(prefiller.id, ranks))
            prefiller.ranks = ranks

    def _log(self) -> None:
        for reason, (prefill, decode) in list(self._refusals.items())[:_MOST_NAMES]:
            if self._logged.get(reason) != (prefill, decode):
                fields = {"decode": _listed(decode), "prefill": _listed(prefill), "reason": reason}
                _log.warning("engines that do not fit are not paired", extra={"fields": fields})
        if self._logged and not self._refusals:
            _log.info("all prefillers and decode engines fit again")
        self._logged = self._refusals

    def _due(self) -> list[Target]:
        """Return the engines to ask; `_ask` each of them at once."""
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
            elif last is not None and not last.again and now_s - last.at_s < _REFRESH_S:
                continue
            due.append(target)
        # Those that take nothing until then go first.
        return sorted(due, key=self._asked.__contains__)

    async def _ask(self, target: Target) -> None:
        ones = self._instances.of(target)
        engines = max(len(one.engines) if isinstance(one, Prefiller) else 0 for one in ones)
        last = self._asked.get(target)
        silent = 0 if last is None else last.silent
        asked = self._asked[target] = _Asked(self._clock(), engines, silent)
        self._asking += 1
        try:
            pages = await asyncio.gather(
                *(self._page(target, path) for path in ("/version", "/v1/models", "/metrics"))
            )
        finally:
            self._asking -= 1
        if self._asked.get(target) is asked:  # Else it is in doubt again, or gone.
            asked.asking = False
            asked.silent = silent + 1 if None in pages else 0
            if not asked.silent or (not asked.again and target not in self.facts):
                version, models, metrics = (page or b"" for page in pages)
                served = _models(models)
                self.facts[target] = facts_of(_version(version), served, _caches(metrics))
                self._doubt(target, served, metrics)
            if not asked.again:
                self._answered[target] = asked
        if not self._asking:
            self._settle()

    def _settle(self) -> None:
        """Judge the pairs of all engines that have answered since, which may open then."""
        answered, self._answered = self._answered, {}
        if not answered:
            return
        for target, asked in answered.items():
            if self._asked.get(target) is asked:
                for one in self._instances.of(target):
                    one.asked = True
        self.update()
        self._changed()

    def _doubt(self, target: Target, served: Sequence[ServedModel], metrics: bytes) -> None:
        """Note the doubts that an engine's pages raise about its place, and log new ones."""
        parts = self._instances.of(target)
        headers = (one.header for one in parts if isinstance(one, Rank))
        found = tuple(
            doubts(
                target.role,
                self._connector,
                self.facts[target].version,
                served,
                _signs(metrics),
                wanted=self._models,
                ranks={int(header) for header in headers if header is not None},
            )
        )
        before = parts[0].page_doubts if parts else ()
        for one in parts:
            one.page_doubts = found
        for doubt in found:
            if doubt not in before:
                fields = {"role": target.role.value, "url": target.url, "reason": doubt}
                _log.warning("an engine may not be what it is taken for", extra={"fields": fields})

    async def _page(self, target: Target, path: str) -> bytes | None:
        """Return a page; empty if the engine has none, None if it does not answer."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._fetch(target.url + path)
        except (FetchError, TimeoutError) as error:
            fields = {"url": target.url, "page": path, "reason": str(error)}
            _log.debug("an engine does not tell what it is", extra={"fields": fields})
            answered = isinstance(error, FetchError) and error.fault in _ANSWERED
            return b"" if answered else None


def _is_any_up(instances: Sequence[Prefiller | Rank]) -> bool:
    return any(one.status is Status.UP for one in instances)


def _listed(names: Sequence[str]) -> str:
    shown, more = ", ".join(names[:_MOST_NAMES]), len(names) - _MOST_NAMES
    return f"{shown} and {more} others" if more > 0 else shown


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


def _signs(page: bytes) -> KvSigns:
    try:
        return kv_signs(page)
    except MetricsPageError:
        return KvSigns()


def _caches(page: bytes) -> list[dict[str, str]]:
    try:
        return cache_configs(page)
    except MetricsPageError:
        return []
