"""The groups of engines behind one listener, and which of them serves a model.

Most proxies have one group, which serves whatever is asked for. Several share nothing but the listener,
the keys and the tenants' limits: each has a scheduler, a pool and a step clock of its own.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace

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
from balanceroute.proxy.live.openai.routes import Media, Route
from balanceroute.proxy.model_choice import ArrivalRate, GroupOutlook

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.core.admission import Refusal
    from balanceroute.proxy.live.frontend.pass_through import PassThrough
    from balanceroute.proxy.live.frontend.refusals import Refusals, Tenancy
    from balanceroute.proxy.live.frontend.request_head import KnownHead
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.shape import Api, Shape
    from balanceroute.proxy.live.openai.urgency import Urgency
    from balanceroute.proxy.live.request.shared import SessionContext
    from balanceroute.proxy.live.scheduling.driver import Driver
    from balanceroute.proxy.live.security import Tenant
    from balanceroute.proxy.live.settings.aliases import AliasConfig
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers, Late


NO_MODEL = (400, "you must provide a model parameter: the proxy serves several")


@dataclass(frozen=True, slots=True)
class Group:
    """One group."""

    name: str  # Empty if it is the only one.
    # The names that it serves and no others; empty to leave that to its engines.
    models: tuple[str, ...]
    intake: "Driver"  # Takes its requests.
    served: "ModelList"  # The models of its engines.
    routes: "ModelRoutes"  # Which of its engines serve which model.
    pass_through: "PassThrough"  # Serves requests that one of its engines answers alone.
    tenancy: "Tenancy"  # The tenants' limits.
    key_is_tenant: bool = False  # Whether each API key is a tenant of its queue.
    # Returns what time per output token and to the first one a request would meet, in ms; None if
    # nobody asks.
    forecast: "Callable[[Shape], tuple[float, float]] | None" = None

    @property
    def model(self) -> str:
        """The name by which the proxy itself asks its engines."""
        return self.models[0] if self.models else self.name

    def serves(self, model: str) -> bool:
        return model in self.models if self.models else model in self.routes.names

    def cards(self) -> "list[Mapping[str, Any]]":
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
    def context(self) -> "SessionContext":
        """The clock and the names of requests, which are the same in all groups."""
        return self.first.intake.context

    @property
    def ready(self) -> bool:
        """Whether any of them would take a request now."""
        return any(one.intake.ready for one in self)

    @property
    def uses_keys(self) -> bool:
        if self._only is not None:
            return self._only.intake.uses_keys
        return any(one.intake.uses_keys for one in self)

    @property
    def load(self) -> int:
        """How many requests there are."""
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


def unknown_alone(route: "Route", model: str, *, is_alias: bool) -> tuple[int, str]:
    """Return the same for a request that one engine is to answer."""
    if is_alias:
        return 400, f"`{model}` stands for several models: name one of them for this route"
    if route.media is Media.JSON:
        return unknown_model(model)
    return 400, "the proxy serves several models, and the request cannot tell which one it is for"


# Names that stand for several models: which of them answers a request.

_TASK = b"x-task"
_MOST_SHOWN = 64


class UnknownTaskError(Exception):
    """X-Task names no task of the alias, or is given twice."""


class Alias:
    """One alias.

    Args:
        clock: The loop's time, in seconds.
    """

    def __init__(self, config: "AliasConfig", groups: "Groups", clock: Callable[[], float]) -> None:
        self.config = config
        self._groups = groups
        self._clock = clock
        self._choice = config.make_choice()
        self._rate = ArrivalRate()
        self._places = {task: place for place, task in enumerate(config.tasks)}
        self._by_path = dict(config.paths)

    def task(self, headers: "Headers", tenant: "Tenant", path: str) -> str:
        """Return what a request asks for: by its word, its tenant, its path, or by default.

        Raises:
            UnknownTaskError: It asks for something else.
        """
        given = [value for name, value in headers if name == _TASK]
        if given:
            task = given[0].decode("latin-1")
            if len(given) == 1 and task in self._places:
                return task
            known = ", ".join(self.config.tasks)
            raise UnknownTaskError(
                f"X-Task is {task[:_MOST_SHOWN]!r}, must be given once and be one of {known}"
            )
        if tenant.task in self._places:
            return tenant.task
        return self._by_path.get(path, self.config.default_task)

    def choose(self, task: str, shape: "Shape") -> "Iterator[Group]":
        """Yield the group that is to answer, and then who may in its place.

        Those of smaller models come first, as they have more room. A group that takes no requests when
        its turn comes is left out.
        """
        rate_per_s = self._rate.observe(1e3 * self._clock())
        found = [self._groups.get(name) for name in self.config.groups]
        outlooks = [self._outlook(one, shape) for one in found]
        if not any(one.healthy for one in outlooks):
            return
        chosen = self._choice.choose(self._places[task], rate_per_s, outlooks)
        first = found[chosen]
        assert first is not None, "it is healthy"
        yield first
        for place in (*range(chosen - 1, -1, -1), *range(chosen + 1, len(found))):
            # By now it may be gone, or another one.
            group = self._groups.get(self.config.groups[place])
            if group is not None and _takes(group):
                yield group

    def _outlook(self, group: "Group | None", shape: "Shape") -> GroupOutlook:
        if group is None or not _takes(group):
            return GroupOutlook(inf, healthy=False)
        targets = self.config.targets
        if targets is None or group.forecast is None:
            return GroupOutlook(0.0)
        return GroupOutlook(targets.share_used(*group.forecast(shape)))


def _takes(group: "Group") -> bool:
    """Return whether a group takes requests for its model now."""
    routes, model = group.routes, group.model
    return group.intake.ready and routes.refuse(model, routes.eligible(model)) is None


def make_aliases(
    configs: "Iterable[AliasConfig]", groups: "Groups", clock: Callable[[], float]
) -> Mapping[str, Alias]:
    return {one.name: Alias(one, groups, clock) for one in configs}


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
        """Return who can serve a model; None for all."""
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


# TODO.


class Asking(Struct, eq=False):
    """One request that is to be generated."""

    refusals: "Refusals"
    tenant: "Tenant"
    api: "Api"
    shape: "Shape"
    urgency: "Urgency"
    known: "KnownHead"  # What follows from its head.
    headers: "Headers"  # The client's.
    body: "RequestBody"
    reply: "Reply"
    record: "RequestRecord"

    def for_model(self, model: str) -> "Asking":
        """Have engines asked for another model than the client named; return itself."""
        self.shape = replace(self.shape, model=model)
        self.body.model = model
        return self

    def attempt(self, model: str, reply: "Reply", record: "RequestRecord") -> "Asking":
        """Return the same for engines that are asked for this model, with an answer of its own."""
        return replace(self, reply=reply, record=record).for_model(model)

    def deny(
        self, status: int, reason: str, *, param: str | None = None, retry_s: int | None = None
    ) -> None:
        self.refusals.refuse(self.reply, self.record, status, reason, param=param, retry_s=retry_s)

    def limit(self, refusal: "Refusal") -> None:
        self.refusals.limit(self.reply, self.record, refusal)


# Requests of an alias that go on to the next group while nothing of an answer has been sent.
#
# Each group gets an attempt of its own, with a record of its own. An attempt that is given up is
# over for its group before the next one begins, and whatever comes of it reaches nobody: neither
# the client, nor the log, nor a metric. So a client has one answer, and a request one line.

MODEL_HEADER = b"x-balanceroute-model"
"""Names the model that answers a request of an alias."""

# What the deployment refuses a request for, and not its tenant: see `Refusal.cause`.
_OF_THE_GROUP = frozenset({"", "overload", "deadline"})


class FallBack:
    """Has one request answered by the first group that does.

    Args:
        groups: Who may answer, best first.
    """

    def __init__(
        self,
        asking: Asking,
        groups: "Iterator[Group]",
        config: "AliasConfig",
        submit: "Callable[[Asking, Group], None]",
        context: "SessionContext",
    ) -> None:
        self._asking = asking
        self._groups = groups
        self._config = config
        self._submit = submit
        self._context = context
        self._attempt: ModelAttempt | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> bool:
        """Ask the first group; return whether there is one."""
        group = next(self._groups, None)
        if group is not None:
            self._try(group)
        return group is not None

    def failed(self, attempt: "ModelAttempt", status: int) -> bool:
        """Go on to the next group, if such an answer is a reason to and there is one."""
        why = str(status)
        if status == 504:
            why = "timeout"
        known = why in self._config.fall_back and attempt.record.refused_for in _OF_THE_GROUP
        return known and self._go_on(attempt, why)

    def over(self) -> None:
        """Stay with the attempt that answers now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_on(self, attempt: "ModelAttempt", why: str) -> bool:
        group = None if attempt.inner.closed else next(self._groups, None)
        if group is None:
            return False
        self.over()
        attempt.give_up()
        record = self._asking.record
        record.fall_backs = (*record.fall_backs, (attempt.record.group, why))
        if attempt.inner.commented:
            record.status = 200  # Which its client has, whatever comes of it.
        self._try(group)
        return True

    def _try(self, group: "Group") -> None:
        asking = self._asking
        attempt = self._attempt = ModelAttempt(self, asking.reply, copy(asking.record))
        after_s = self._config.fall_back_after_s
        if after_s is not None and asking.record.stream:
            self._timer = self._context.call_later(after_s, self._late)
        # What a reply tells of itself is read alone.
        reply = cast("Reply", attempt)
        self._submit(asking.attempt(group.model, reply, attempt.record), group)

    def _late(self) -> None:
        self._timer = None
        if self._attempt is not None and not self._attempt.inner.started:
            self._go_on(self._attempt, "timeout")


class ModelAttempt:
    """What one group has for a client: see `Reply`."""

    def __init__(self, chain: FallBack, inner: "Reply", record: "RequestRecord") -> None:
        self.inner = inner  # The client.
        self.record = record  # The attempt's own.
        self._chain = chain
        self._given_up = False
        self._on_closed: Callable[[], None] | None = None

    def give_up(self) -> None:
        """End it for its group, as if its client had left, and let nothing more through."""
        self._given_up = self.record.superseded = True
        self.inner.on_pause = self.inner.on_resume = self.inner.on_closed = None
        left, self._on_closed = self._on_closed, None
        if left is not None:
            left()

    # What a group sees of the client.

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._given_up or self.inner.closed

    @property
    def started(self) -> bool:
        return not self._given_up and self.inner.started

    @property
    def written(self) -> int:
        return self.inner.written

    @property
    def paused(self) -> bool:
        return not self._given_up and self.inner.paused

    @property
    def more_headers(self) -> "Headers":
        return self.inner.more_headers

    @more_headers.setter
    def more_headers(self, headers: "Headers") -> None:
        if not self._given_up:
            self.inner.more_headers = headers

    @property
    def on_closed(self) -> Callable[[], None] | None:
        """Called if the client leaves, and if the attempt is given up."""
        return self._on_closed

    @on_closed.setter
    def on_closed(self, call: Callable[[], None] | None) -> None:
        self._on_closed = call
        if not self._given_up:
            self.inner.on_closed = call

    @property
    def on_pause(self) -> Callable[[], None] | None:
        return self.inner.on_pause

    @on_pause.setter
    def on_pause(self, call: Callable[[], None] | None) -> None:
        if not self._given_up:
            self.inner.on_pause = call

    @property
    def on_resume(self) -> Callable[[], None] | None:
        return self.inner.on_resume

    @on_resume.setter
    def on_resume(self, call: Callable[[], None] | None) -> None:
        if not self._given_up:
            self.inner.on_resume = call

    def release_body(self) -> None:
        if not self._given_up:
            self.inner.release_body()

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        """Send a whole answer, unless another group is to give one."""
        if not self._given_up and not self._chain.failed(self, status):
            self._chain.over()
            self.inner.send(status, headers, body)

    def start(self, status: int, headers: "Headers") -> None:
        """Begin a stream, which is this group's to its end."""
        if not self._given_up:
            self._chain.over()
            self.inner.start(status, headers)

    @property
    def commented(self) -> bool:
        """Whether the client has the head of a stream, though the answer may still be any group's."""
        return self.inner.commented

    def comment(self, headers: "Headers", data: bytes, late: "Late") -> None:
        """See `Reply`; another group may still answer."""
        if not self._given_up:
            if not self.inner.commented:  # Who answers is not said before it is known.
                told = self.inner.more_headers
                self.inner.more_headers = [one for one in told if one[0] != MODEL_HEADER]
            self.inner.comment(headers, data, late)

    def write(self, data: bytes) -> None:
        if not self._given_up:
            self.inner.write(data)

    def end(self) -> None:
        if not self._given_up:
            self.inner.end()

    def abort(self) -> None:
        if not self._given_up:
            self._chain.over()
            self.inner.abort()


def deny_model(deny: Callable[..., None], status: int, reason: str) -> None:
    """Refuse a request whose model no engine can serve now."""
    if status == 404:
        deny(404, reason, param="model")
    else:
        deny(status, reason, retry_s=1)
