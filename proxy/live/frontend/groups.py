"""The groups of engines behind one listener, and which of them serves a model.

Most proxies have one group, which serves whatever is asked for. Several share nothing but the listener,
the keys and the tenants' limits: each has a scheduler, a pool and a step clock of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.openai.routes import Media

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balanceroute.proxy.live.engines.model_list import ModelList
    from balanceroute.proxy.live.frontend.model_routes import ModelRoutes
    from balanceroute.proxy.live.frontend.pass_through import PassThrough
    from balanceroute.proxy.live.frontend.tenancy import Tenancy
    from balanceroute.proxy.live.openai.routes import Route
    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.request.session_host import SessionContext
    from balanceroute.proxy.live.scheduling.driver import Driver

NO_MODEL = (400, "you must provide a model parameter: the proxy serves several")


@dataclass(frozen=True, slots=True)
class Group:
    """One group.

    Attributes:
        name: Empty if it is the only one.
        models: The names that it serves and no others; empty to leave that to its engines.
        intake: Takes its requests.
        served: The models of its engines.
        routes: Which of its engines serve which model.
        pass_through: Serves requests that one of its engines answers alone.
        tenancy: The tenants' limits.
        key_is_tenant: Whether each API key is a tenant of its queue.
        forecast: Returns what time per output token and to the first one a request would meet, in ms;
            None if nobody asks.
    """

    name: str
    models: tuple[str, ...]
    intake: "Driver"
    served: "ModelList"
    routes: "ModelRoutes"
    pass_through: "PassThrough"
    tenancy: "Tenancy"
    key_is_tenant: bool = False
    forecast: "Callable[[Shape], tuple[float, float]] | None" = None

    @property
    def model(self) -> str:
        """The name by which the proxy itself asks its engines."""
        return self.models[0] if self.models else self.name

    def serves(self, model: str) -> bool:
        """Return whether a model is one of its own."""
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
        """Whether any of them asks for the keys of requests."""
        if self._only is not None:
            return self._only.intake.uses_keys
        return any(one.intake.uses_keys for one in self)

    @property
    def load(self) -> int:
        """How many requests there are."""
        return sum(len(one.intake.sessions) + one.pass_through.in_flight for one in self)

    def add(self, group: Group) -> None:
        """Serve one more."""
        self._groups[group.name] = group
        self._change()

    def remove(self, name: str) -> None:
        """Serve one less."""
        del self._groups[name]
        self._change()

    def get(self, name: str) -> Group | None:
        """Return a group by its own name."""
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
