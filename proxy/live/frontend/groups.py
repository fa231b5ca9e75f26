"""The groups of engines behind one listener, and which of them serves a model.

Most proxies have one group, which serves whatever is asked for. Several share nothing but the listener,
the keys and the tenants' limits: each has a scheduler, a pool and a step clock of its own.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from balanceroute.proxy.core.admission import Refusal
from balanceroute.proxy.core.events import Eligible
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.engines.model_list import ModelList, ServedModel
from balanceroute.proxy.live.frontend.pass_through import PassThrough
from balanceroute.proxy.live.frontend.refusals import Refusals, Tenancy
from balanceroute.proxy.live.frontend.request_head import KnownHead
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.routes import Media, Route
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.openai.urgency import Urgency
from balanceroute.proxy.live.request.shared import SessionContext
from balanceroute.proxy.live.scheduling.driver import Driver
from balanceroute.proxy.live.security import Tenant
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers

MODEL_HEADER = b"x-balanceroute-model"
"""Names the model that answers a request of an alias."""
NO_MODEL = (400, "you must provide a model parameter: the proxy serves several")


@dataclass(frozen=True, slots=True)
class Group:
    """One group."""

    name: str  # Empty if it is the only one.
    # The only names that it serves; empty to leave that to its engines.
    models: tuple[str, ...]
    intake: Driver  # Takes its requests.
    served: ModelList  # The models of its engines.
    routes: "ModelRoutes"  # Which of its engines serve which model.
    pass_through: PassThrough  # Serves requests that one of its engines answers alone.
    tenancy: Tenancy  # The tenants' limits.
    key_is_tenant: bool = False  # Whether each API key is a tenant of its queue.
    # Returns what time per output token and to the first one a request would meet, in ms; None if no
    # alias needs it.
    forecast: Callable[[Shape], tuple[float, float]] | None = None

    @property
    def model(self) -> str:
        """The name by which the proxy itself asks its engines."""
        return self.models[0] if self.models else self.name

    def serves(self, model: str) -> bool:
        return model in self.models if self.models else model in self.routes.names

    def cards(self) -> list[Mapping[str, Any]]:
        """Return the entries of its models for a list."""
        cards = self.served.cards()
        # A sole group's list is what its engines say.
        return [one for one in cards if one["id"] in self.models] if self._lists else cards

    @property
    def _lists(self) -> bool:
        return bool(self.name and self.models)


class Groups:
    """The groups of a listener, at least one."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._groups = {one.name: one for one in groups}
        self._only: Group | None
        self._change()

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    @property
    def several(self) -> bool:
        """Whether a request must name its model."""
        return self._only is None

    @property
    def context(self) -> SessionContext:
        """The clock and the names of requests, which are the same in all groups."""
        return self.first.intake.context

    @property
    def ready(self) -> bool:
        return any(one.intake.ready for one in self)

    @property
    def uses_keys(self) -> bool:
        if self._only is not None:
            return self._only.intake.uses_keys
        return any(one.intake.uses_keys for one in self)

    @property
    def load(self) -> int:
        return sum(len(one.intake.sessions) + one.pass_through.in_flight for one in self)

    def add(self, group: Group) -> None:
        self._groups[group.name] = group
        self._change()

    def remove(self, name: str) -> None:
        del self._groups[name]
        self._change()

    def get(self, name: str) -> Group | None:
        return self._groups.get(name)

    def find(self, model: str) -> Group | None:
        """Return the group that serves a model; None if there is none.

        Args:
            model: The `model` of a request; empty if it names none.
        """
        if self._only is not None:
            return self._only
        if model in self._groups and not self._groups[model].models:
            return self._groups[model]
        # The one named by the file goes before one whose engines happen to have it.
        return next(
            (one for one in self if one.models and one.serves(model)),
            next((one for one in self if not one.models and one.serves(model)), None),
        )

    def _change(self) -> None:
        self.first = next(iter(self))
        self._only = None if self.first.name else self.first


def unknown_model(model: str) -> tuple[int, str]:
    """Return the status and the reason for a request whose model no group serves."""
    return (404, f"The model `{model[:128]}` does not exist.") if model else NO_MODEL


def unknown_alone(route: Route, model: str, *, is_alias: bool) -> tuple[int, str]:
    """Return the same for a request that one engine is to answer."""
    if is_alias:
        return 400, f"`{model}` stands for several models: name one of them for this route"
    if route.media is Media.JSON:
        return unknown_model(model)
    return 400, "the proxy serves several models, and the request cannot tell which one it is for"


# Which engines serve a model, where not all of them serve the same ones.
#
# An engine that is down, or whose list cannot be read, counts as serving what it served last; one
# whose list was never read may serve anything. While all known lists name the same models nothing
# is restricted.

_log = logging.getLogger(__name__)
_Models = tuple[ServedModel, ...]


def refuse_unlisted(model: str, listed: Collection[str]) -> tuple[int, str] | None:
    """Return status and reason, in vLLM's words, if a model is not served and no engine says so."""
    if not model or not listed or model in listed:
        return None
    return 404, f"The model `{model[:128]}` does not exist. Valid aliases: {', '.join(listed)}."


class ModelRoutes:
    """The engines of each model."""

    def __init__(self, instances: Instances) -> None:
        self.differ = False  # Whether the engines serve different models.
        self.names: frozenset[str] = frozenset()  # What any of them is known to serve.
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
        """Return the engines that can serve a model; None for all."""
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
        """Return the engines that serve a model; for None, those of which nothing is known."""
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


class Asking(Struct, eq=False):
    """One request that is to be generated."""

    refusals: Refusals
    tenant: Tenant
    api: Api
    shape: Shape
    urgency: Urgency
    known: KnownHead
    headers: Headers  # The client's.
    body: RequestBody
    reply: Reply
    record: RequestRecord

    def for_model(self, model: str) -> "Asking":
        """Have engines asked for another model than the client named; return itself."""
        self.shape = replace(self.shape, model=model)
        self.body.model = model
        return self

    def attempt(self, model: str, reply: Reply, record: RequestRecord) -> "Asking":
        """Return the same for engines that are asked for this model, with an answer of its own."""
        return replace(self, reply=reply, record=record).for_model(model)

    def deny(
        self, status: int, reason: str, *, param: str | None = None, retry_s: int | None = None
    ) -> None:
        self.refusals.refuse(self.reply, self.record, status, reason, param=param, retry_s=retry_s)

    def limit(self, refusal: Refusal) -> None:
        self.refusals.limit(self.reply, self.record, refusal)


def deny_model(deny: Callable[..., None], status: int, reason: str) -> None:
    """Refuse a request whose model no engine can serve now."""
    if status == 404:
        deny(404, reason, param="model")
    else:
        deny(status, reason, retry_s=1)
