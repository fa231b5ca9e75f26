"""Which engines serve a model, where not all of them serve the same ones.

An engine that is down, or whose list cannot be read, counts as serving what it served last; one whose
list was never read may serve anything. While all known lists name the same models nothing is restricted.
"""

import logging
from collections.abc import Collection, Mapping

from balanceroute.proxy.core.events import Eligible
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.engines.model_list import ServedModel

_log = logging.getLogger(__name__)
_Models = tuple[ServedModel, ...]


def refuse_unlisted(model: str, listed: Collection[str]) -> tuple[int, str] | None:
    """Return status and reason, in vLLM's words, if a model is not served and no engine says so."""
    if not model or not listed or model in listed:
        return None
    return 404, f"The model `{model[:128]}` does not exist. Valid aliases: {', '.join(listed)}."


class ModelRoutes:
    """The engines of each model.

    Attributes:
        differ: Whether the engines serve different models.
        names: What any of them is known to serve.
    """

    def __init__(self, instances: Instances) -> None:
        self.differ = False
        self.names: frozenset[str] = frozenset()
        self._instances = instances
        self._last: dict[Target, _Models] = {}
        self._names: list[tuple[Prefiller | Rank, frozenset[str] | None]] = []
        self._eligible: dict[str, Eligible] = {}
        # For names on no list.
        self._unlisted: Eligible | None = None

    def update(self, known: Mapping[Target, _Models]) -> None:
        """Take in what is known of the engines that are up, and of which engines there are."""
        engines: list[Prefiller | Rank] = [*self._instances.prefillers, *self._instances.ranks]
        engines = [one for one in engines if one.status is not Status.REMOVED]
        last = {**self._last, **known}
        self._last = {one.target: last[one.target] for one in engines if one.target in last}
        # Many ranks may share a server, and so its list.
        names_of = {
            target: frozenset(model.name for model in models)
            for target, models in self._last.items()
            if models
        }
        names = [(one, names_of.get(one.target)) for one in engines]
        if names == self._names:
            return
        self._names = names
        lists = {those for _, those in names if those is not None}
        self.differ = len(lists) > 1
        self.names = frozenset().union(*lists)
        self._eligible, self._unlisted = {}, None
        if not self.differ:
            return
        self._eligible = {name: self._find(name) for name in self.names}
        bases = {
            frozenset(model.name for model in models if model.parent is None)
            for models in self._last.values()
        }
        if len(bases) > 1:
            self._unlisted = self._find(None)
        # Else only adapters differ, and engines may load one on demand.
        self._warn()

    def eligible(self, model: str) -> Eligible | None:
        """Return who can serve a model; None for all.

        Args:
            model: The `model` of a request; empty for any.
        """
        if not self.differ or not model:
            return None
        return self._eligible.get(model, self._unlisted)

    def refuse(
        self, model: str, eligible: Eligible | None, *, decode: bool = True
    ) -> tuple[int, str] | None:
        """Return the status and the reason of a request that no engine can serve now, else None."""
        if eligible is None:
            return None
        missing, name = self._instances.missing_for(eligible), f"`{model[:128]}`"
        roles = [("prefiller", bool(eligible.prefillers), Role.PREFILL not in missing)]
        if decode:
            roles.append(("decode rank", bool(eligible.ranks), Role.DECODE not in missing))
        for role, able, _ in roles:
            if not able:
                why = f" No {role} serves it." if model in self._eligible else ""
                return 404, f"The model {name} does not exist.{why}"
        for role, _, up in roles:
            if not up:
                return 503, f"no {role} that may serve the model {name} is up"
        return None

    def _find(self, name: str | None) -> Eligible:
        """Return who serves a model; for None, of whom nothing is known."""
        able = [one for one, names in self._names if names is None or name in names]
        return Eligible(
            frozenset(one.id for one in able if isinstance(one, Prefiller)),
            frozenset(one.id for one in able if isinstance(one, Rank)),
        )

    def _warn(self) -> None:
        found = sorted(self._eligible.items())
        names_by_engine = {one.name: names for one, names in self._names}
        fields = {
            "engines": "; ".join(
                f"{engine}: {'unknown' if names is None else ', '.join(sorted(names))}"
                for engine, names in names_by_engine.items()
            ),
            "without_prefiller": ", ".join(name for name, who in found if not who.prefillers),
            "without_rank": ", ".join(name for name, who in found if not who.ranks),
        }
        message = "the engines serve different models: a request goes to those that serve its model"
        _log.warning(message, extra={"fields": fields})
