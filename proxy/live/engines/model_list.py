"""The models of all engines, as far as they are known."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from math import inf
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.engines.engine_url import FetchError
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Rank, Status, Target
from balanceroute.proxy.live.openai.body import is_deep


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of one engine."""

    name: str
    parent: str | None  # The base model of an adapter; None for a base model.
    max_model_len: int | None  # The longest context, in tokens; None if the engine does not say.
    card: Mapping[str, Any]  # Its entry of the page.


class ModelList:
    """The known models of each engine that is up."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        # The models of each, in its order.
        self.known: Mapping[Target, tuple[ServedModel, ...]] = {}
        self.adapters: frozenset[str] = frozenset()  # The names of those that are adapters.
        # By name, and of any model by "": asked for every request.
        self._longest: dict[str, int] = {}

    def update(self, known: Mapping[Target, tuple[ServedModel, ...]]) -> None:
        """Keep what is known now; the caller may change it until the next update."""
        self.known = known
        self._longest = self._find_longest()
        self.adapters = frozenset(one.name for one in self._all() if one.parent is not None)

    def targets(self) -> list[Target]:
        present: list[Prefiller | Rank] = [*self._instances.prefillers, *self._instances.ranks]
        return list(dict.fromkeys(one.target for one in present if one.status is Status.UP))

    def find(self, name: str) -> ServedModel | None:
        return next((model for model in self._all() if model.name == name), None)

    def cards(self) -> list[Mapping[str, Any]]:
        """Return the entries of all models, each as the first engine that lists it shows it."""
        return list({model.name: model.card for model in reversed([*self._all()])}.values())[::-1]

    def max_model_len(self, name: str) -> int | None:
        """Return a context that no engine which is up exceeds for a model; None if one may.

        Args:
            name: The `model` of a request; empty for any model.
        """
        return self._longest.get(name)

    def _find_longest(self) -> dict[str, int]:
        if any(target not in self.known for target in self.targets()):
            return {}
        longest: dict[str, int] = {}
        unknown = set()
        for model in self._all():
            for name in ("", model.name):
                if model.max_model_len is None:
                    unknown.add(name)
                else:
                    longest[name] = max(longest.get(name, 0), model.max_model_len)
        return {name: length for name, length in longest.items() if name not in unknown}

    def _all(self) -> Iterable[ServedModel]:
        for models in self.known.values():
            yield from models


# What each engine serves, by its /v1/models page: names, adapters, and the longest context.
#
# The page is read in the background, soon after an engine comes (back) up and once a minute:
# adapters are loaded and unloaded while an engine runs. Of an engine that is not up nothing is
# known.

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_AT_ONCE = 100
_REFRESH_S = 60.0
_RETRY_S = 5.0
_TIMEOUT_S = 5.0
# A page that names more is not read to its end.
_MAX_MODELS = 10_000
# No context is longer; a page may hold any number.
_MOST_TOKENS = 1 << 30


class ModelsPageError(BalanceRouteError):
    """A page is not what /v1/models answers."""


def parse_models(page: bytes) -> tuple[ServedModel, ...]:
    """Return the models of a page, in its order. An adapter's context is its base model's.

    Raises:
        ModelsPageError: The page is of another shape.
    """
    try:
        message = json.loads(page)
    except (ValueError, RecursionError):
        raise ModelsPageError("the page is not JSON") from None
    cards = message.get("data") if isinstance(message, dict) else None
    if is_deep(cards):
        raise ModelsPageError("the page is nested too deep to be shown")
    if not isinstance(cards, list) or len(cards) > _MAX_MODELS:
        raise ModelsPageError("the page has no list of models")
    lengths: dict[str, int | None] = {}
    models = []
    for card in cards:
        if not isinstance(card, dict) or not isinstance(card.get("id"), str):
            raise ModelsPageError("a model has no id")
        name, parent, length = card["id"], card.get("parent"), card.get("max_model_len")
        parent = parent if isinstance(parent, str) else None
        if type(length) is not int or not 1 <= length <= _MOST_TOKENS:
            length = None if parent is None else lengths.get(parent)
        lengths[name] = length
        models.append(ServedModel(name, parent, length, card))
    return tuple(models)


class ServedModels:
    """Reads the lists of each engine that is up.

    Args:
        fetch: GETs a URL and returns the body of a 200; raises FetchError if there is none.
        changed: Called with the known models, after every round of reading.
    """

    def __init__(
        self,
        models: ModelList,
        *,
        fetch: Callable[[str], Awaitable[bytes]],
        clock: Callable[[], float],
        changed: Callable[[Mapping[Target, tuple[ServedModel, ...]]], None],
    ) -> None:
        self._models = models
        self._fetch = fetch
        self._clock = clock
        self._changed = changed
        self._known: dict[Target, tuple[ServedModel, ...]] = {}
        self._read_s: dict[Target, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.gather(*(self._read(target) for target in self._due()))
            self._models.update(self._known)
            self._changed(self._known)
            await asyncio.sleep(_TICK_S)

    def _due(self) -> list[Target]:
        """Return the engines to ask now, a few of very many, and forget those that are not up."""
        targets = self._models.targets()
        present = set(targets)
        for known in (self._known, self._read_s):
            for target in known.keys() - present:
                del known[target]
        now_s = self._clock()
        due = [
            (self._read_s.get(target, -inf), place)
            for place, target in enumerate(targets)
            if now_s - self._read_s.get(target, -inf) >= _REFRESH_S
        ]
        return [targets[place] for _, place in nsmallest(_AT_ONCE, due)]

    async def _read(self, target: Target) -> None:
        now_s = self._clock()
        self._read_s[target] = now_s
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self._known[target] = parse_models(await self._fetch(f"{target.url}/v1/models"))
        except (FetchError, ModelsPageError, TimeoutError) as error:
            self._known.pop(target, None)
            self._read_s[target] = now_s - _REFRESH_S + _RETRY_S
            fields = {"url": target.url, "reason": str(error)}
            _log.debug("the models of an engine are not known", extra={"fields": fields})
