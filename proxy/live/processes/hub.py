"""What all relays share at the scheduler process: the deployment as they are told, and what they count."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from balanceroute.proxy.live.engines.instances import Prefiller, Target
from balanceroute.proxy.live.engines.model_list import ServedModel
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.frames import VERSION
from balanceroute.proxy.live.processes.gathering import Gathering
from balanceroute.proxy.live.request.suspects import EngineDied
from balanceroute.proxy.live.telemetry.process_log import log_level

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.live.engines.instances import Rank
    from balanceroute.proxy.live.engines.model_list import ModelList
    from balanceroute.proxy.live.frontend.model_routes import ModelRoutes
    from balanceroute.proxy.live.frontend.tenancy import Tenancy
    from balanceroute.proxy.live.processes.outbox import Outbox
    from balanceroute.proxy.live.processes.remote_request import RemoteRequest
    from balanceroute.proxy.live.scheduling.driver import Driver
    from balanceroute.proxy.live.scheduling.pushed_counts import PushedCounts
    from balanceroute.proxy.live.telemetry.metrics import Metrics
    from balanceroute.proxy.live.telemetry.record import Log

States = dict[tuple[str, int], to_relay.ToRelay]

# How often readiness is looked at, which changes with time alone too.
_LOOK_S = 0.25


class Desk(Protocol):
    """Who serves one relay; see `RelayDesk`."""

    out: "Outbox[to_relay.ToRelay]"
    requests: "dict[int, RemoteRequest]"
    occupancy: from_relay.Occupancy
    drained: bool

    def welcome(self, message: to_relay.Welcome) -> None:
        """Tell the relay of the deployment from now on."""


class Hub:
    """Connects relays with one driver.

    Args:
        driver: Decides for all of them.
        routes: The engines of each model.
        models: What the engines serve.
        tenancy: The tenants' limits.
        settings: The digest of the settings, which relays must share.
        name: Names this scheduler process.
        relays: How many relays there are to be.
        page_of_metrics: Renders the metrics.

    Attributes:
        desks: The relays that are connected and welcome, by their places.
        counts: How far streams are.
        gathering: Keeps what relays say until all running requests are known.
    """

    def __init__(
        self,
        driver: "Driver",
        loop: "asyncio.AbstractEventLoop",
        *,
        routes: "ModelRoutes",
        models: "ModelList",
        tenancy: "Tenancy",
        metrics: "Metrics",
        log: "Log",
        settings: str,
        name: str,
        relays: int,
        page_of_metrics: Callable[[], bytes],
        counts: "PushedCounts[RemoteRequest]",
    ) -> None:
        self.driver = driver
        self.loop = loop
        self.eligible = routes.eligible
        self.desks: dict[int, Desk] = {}
        self.counts = counts
        self.gathering = Gathering(relays, loop.call_later)
        self._metrics = metrics
        self._log = log
        self._settings = settings
        self._name = name
        self._relays = relays
        self._page_of_metrics = page_of_metrics
        self._models = models
        self.tenancy = tenancy
        self._models_known: dict[Target, tuple[ServedModel, ...]] = {}
        self._models_told = to_relay.Models(())
        self._on_drained: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._states: States = {}
        self._all_changed = True
        self._changed: dict[Prefiller | Rank, None] = {}
        driver.changed = self.changed
        self._suspects = driver.context.suspects
        self._suspects.changed = lambda: self.changed(None)

    def hello(self, desk: Desk, hello: from_relay.Hello) -> None:
        """Welcome a relay, or say why it is not."""
        reason = ""
        if hello.version != VERSION:
            reason = f"the relay speaks version {hello.version}, the scheduler {VERSION}"
        elif hello.settings != self._settings:
            reason = "the relay has other settings"
        elif hello.relay in self.desks:
            reason = f"relay {hello.relay} is connected already"
        if reason:
            desk.out.send(to_relay.Unwelcome(reason))
            return
        if not self.desks:  # Else others have been told the key.
            self._suspects.adopt(hello.suspects_key, hello.suspects)
        self.desks[hello.relay] = desk
        desk.welcome(
            to_relay.Welcome(
                VERSION,
                self._name,
                self._relays,
                self.driver.uses_keys,
                self.driver.uses_blocks,
                self.driver.token_block,
                self._suspects.key,
            )
        )
        if self.driver.draining:
            desk.out.send(to_relay.Drain())
        if self._timer is None:
            self._look()

    def forget(self, desk: Desk) -> None:
        """Forget a relay that is gone."""
        for place in [place for place, one in self.desks.items() if one is desk]:
            del self.desks[place]
            self.driver.veto.forget_observer(place)
        self.relay_drained()

    def changed(self, instances: "Iterable[Prefiller | Rank] | None" = None) -> None:
        """See that relays are told of every change of the deployment with their next frame.

        Args:
            instances: Those that changed; None if any of them did, or something else.
        """
        if instances is None:
            self._all_changed = True
        else:
            self._changed.update(dict.fromkeys(instances))
        for desk in self.desks.values():
            desk.out.flush_soon()

    def states(self) -> "States":
        """Return the state of the deployment, each part by its name; another object if it changed."""
        # Asked with every frame to a relay, while changes are rare.
        if self._all_changed:
            instances = self.driver.instances
            parts = self._parts((*instances.prefillers, *instances.ranks))
        elif self._changed:
            parts = self._parts(self._changed)
        else:
            return self._states
        self._all_changed, self._changed = False, {}
        changed = {part: state for part, state in parts if self._states.get(part) != state}
        if changed:
            self._states = self._states | changed
        return self._states

    def _parts(
        self, instances: "Iterable[Prefiller | Rank]"
    ) -> "Iterator[tuple[tuple[str, int], to_relay.ToRelay]]":
        for one in instances:
            if isinstance(one, Prefiller):
                known = one.identity
                identity = None if known is None else (known.engine_id, known.bootstrap_address)
                yield (
                    ("prefiller", one.id),
                    to_relay.PrefillerState(
                        one.id, one.name, one.target.url, one.status, identity, one.lost_kv
                    ),
                )
            else:
                yield (
                    ("rank", one.id),
                    to_relay.RankState(
                        one.id, one.name, one.target.url, one.status, one.header, one.still
                    ),
                )
        yield ("models", 0), self._models_told
        yield ("readiness", 0), to_relay.Readiness(self.driver.ready)
        yield ("suspects", 0), to_relay.SuspectPrompts(self._suspects.tell())
        yield ("log level", 0), to_relay.LogLevel(log_level(other_than=""))

    def drain(self, drained: Callable[[], None]) -> None:
        """Have every relay take nothing new; `drained` is called when all are done."""
        self._on_drained = drained
        self.changed()  # Nothing new is taken any more.
        for desk in self.desks.values():
            desk.out.send(to_relay.Drain())
        self.relay_drained()

    def relay_drained(self) -> None:
        """Look whether all relays are done."""
        if all(desk.drained for desk in self.desks.values()):
            self._on_drained()

    def close(self) -> None:
        """Look at nothing any more."""
        self.gathering.close()
        if self._timer is not None:
            self._timer.cancel()

    def page(self, path: str) -> bytes:
        """Return a page for clients."""
        if path == "/metrics":
            return self._page_of_metrics()
        passing = sum(desk.occupancy.passing for desk in self.desks.values())
        return b"%d" % (len(self.driver.sessions) + passing)

    # What relays count.

    def take_gaps(self, message: from_relay.Gaps) -> None:
        """Add gaps between pieces of streams."""
        self._metrics.legs.gaps.add(message.counts, message.total_s, message.refused)

    def take_looks(self, desk: Desk, message: from_relay.Looks) -> None:
        """Note what a relay sees of the ranks."""
        known = len(self.driver.instances.ranks)
        seen = [one for one in message.sightings if 0 <= one.rank < known]
        for place, one in self.desks.items():
            if one is desk:
                self.driver.veto.look(place, message.elapsed_s, seen)

    def take_record(self, message: from_relay.Recorded) -> None:
        """Count or log a request."""
        match message.what:
            case "refused":
                self._metrics.requests.ended(message.record)
            case "passed_through":
                self._metrics.requests.passed_through(message.record)
            case "line":
                self._log.request_ended(message.record)

    def take_death(self, message: from_relay.EngineDied) -> None:
        """Take note of an engine that died."""
        fingerprint, name, role, url, *rest = structs.astuple(message)
        self._suspects.died(EngineDied(fingerprint, name, Target(role, url), *rest))

    def take_retry(self, message: from_relay.LegRetried) -> None:
        """Count a leg that was sent again."""
        self._metrics.legs.retry(message.leg, message.fault.value)

    def take_failure(self, message: from_relay.Failure) -> None:
        """Count a failure of a relay's own handling, which it has logged."""
        self._metrics.decisions.failed(message.what)

    def _look(self) -> None:
        self._timer = None
        if not self.desks:
            return
        known = dict(self._models.known)
        if known != self._models_known:
            self._models_known = known
            self._models_told = to_relay.Models(
                tuple(
                    (target.role, target.url, tuple(_as_message(model) for model in served))
                    for target, served in known.items()
                )
            )
        self.changed()
        self._timer = self.loop.call_later(_LOOK_S, self._look)


def _as_message(model: ServedModel) -> to_relay.Model:
    card = json.dumps(model.card, separators=(",", ":")).encode()
    return to_relay.Model(model.name, model.parent, model.max_model_len, card)
