"""The engines and their models, as the scheduler process tells a relay of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import PrefillerId, RankId
from balanceroute.proxy.live.connectors import BootstrapIdentity
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.engines.model_list import ModelList, ServedModel
from balanceroute.proxy.live.frontend.model_routes import ModelRoutes
from balanceroute.proxy.live.processes import to_relay

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.client import Endpoint

_UNKNOWN = None, -1


@dataclass(frozen=True, slots=True)
class Renumbered:
    """How the engines of a scheduler process are those of the one before it.

    Attributes:
        prefillers: The id of each that both have, by the earlier one.
        ranks: Likewise.
        missing: Those that the earlier one had alone.
    """

    prefillers: Mapping[PrefillerId, PrefillerId]
    ranks: Mapping[RankId, RankId]
    missing: Sequence[Target]


class Mirror:
    """A copy of the deployment, with connections of its own.

    Args:
        connect: Makes the connections to an engine.
        quarantined: Called with an engine that is quarantined from now on.

    Attributes:
        instances: As they were told last.
        models: What the engines serve.
        routes: The engines of each model.
        endpoints: The connections, by base URL.
    """

    def __init__(
        self,
        connect: "Callable[[EngineUrl], Endpoint]",
        quarantined: Callable[[Target], None],
    ) -> None:
        self.instances = Instances()
        self.models = ModelList(self.instances)
        self.routes = ModelRoutes(self.instances)
        self.endpoints: dict[str, Endpoint] = {}
        self._connect = connect
        self._quarantined = quarantined
        # Those that the scheduler process before had, with their ids there.
        self._known: dict[tuple[Role, str], tuple[Prefiller | Rank, int]] = {}
        # Losses that the present one does not count.
        self._lost: dict[str, int] = {}

    def begin_anew(self) -> None:
        """Expect everything from another scheduler process, which may count engines otherwise."""
        instances: list[Prefiller | Rank] = [*self.instances.prefillers, *self.instances.ranks]
        present = [one for one in instances if one.status is not Status.REMOVED]
        self._known = {(one.target.role, one.name): (one, one.id) for one in present}
        self._lost = {one.name: one.lost_kv for one in self.instances.prefillers}
        self.instances.clear()

    def renumbered(self) -> Renumbered:
        """Return what has changed with the present scheduler process, which has told everything."""
        told: list[Prefiller | Rank] = [*self.instances.prefillers, *self.instances.ranks]
        here = {one for one in told if one.status is not Status.REMOVED}
        prefillers: dict[PrefillerId, PrefillerId] = {}
        ranks: dict[RankId, RankId] = {}
        missing = []
        for one, before in self._known.values():
            if one not in here:
                missing.append(one.target)
            elif isinstance(one, Prefiller):
                prefillers[PrefillerId(before)] = one.id
            else:
                ranks[RankId(before)] = one.id
        return Renumbered(prefillers, ranks, missing)

    def take_prefiller(self, state: to_relay.PrefillerState) -> None:
        """Take in a prefiller."""
        prefillers = self.instances.prefillers
        if state.id == len(prefillers):
            known, _ = self._known.get((Role.PREFILL, state.name), _UNKNOWN)
            target = Target(Role.PREFILL, state.url)
            if not isinstance(known, Prefiller):
                known = Prefiller(state.id, state.name, target, self._endpoint(state.url))
            known.id = state.id
            prefillers.append(known)
        prefiller = prefillers[state.id]
        prefiller.identity = None if state.identity is None else BootstrapIdentity(*state.identity)
        prefiller.lost_kv = self._lost.get(state.name, 0) + state.losses
        self._set(prefiller, state.status)

    def take_rank(self, state: to_relay.RankState) -> None:
        """Take in a rank."""
        ranks = self.instances.ranks
        if state.id == len(ranks):
            rank, _ = self._known.get((Role.DECODE, state.name), _UNKNOWN)
            target, endpoint = Target(Role.DECODE, state.url), self._endpoint(state.url)
            if not isinstance(rank, Rank):
                rank = Rank(state.id, state.name, target, endpoint, state.header)
            rank.id = state.id
            ranks.append(rank)
        ranks[state.id].still = state.still
        self._set(ranks[state.id], state.status)

    def take_models(self, message: to_relay.Models) -> None:
        """Take in what is known of the models."""
        known = {
            Target(role, url): tuple(
                ServedModel(one.name, one.parent, one.max_model_len, json.loads(one.card))
                for one in models
            )
            for role, url, models in message.known
        }
        self.models.update(known)
        self.routes.update(known)

    def close(self) -> None:
        """Close every connection."""
        for endpoint in self.endpoints.values():
            endpoint.close()

    def _set(self, instance: Prefiller | Rank, status: Status) -> None:
        before, instance.status = instance.status, status
        if status is before:
            return
        if status is Status.QUARANTINED:
            self._quarantined(instance.target)
        elif status is Status.REMOVED:
            self._drop_unused(instance.target.url)
        elif before is Status.REMOVED:
            instance.endpoint = self._endpoint(instance.target.url)

    def _endpoint(self, url: str) -> "Endpoint":
        endpoint = self.endpoints.get(url)
        if endpoint is None:
            endpoint = self.endpoints[url] = self._connect(EngineUrl.parse(url))
        return endpoint

    def _drop_unused(self, url: str) -> None:
        """Close the connections to an address where no engine is any more."""
        if not any(self.instances.has(Target(role, url)) for role in Role):
            endpoint = self.endpoints.pop(url, None)
            if endpoint is not None:
                endpoint.close()
