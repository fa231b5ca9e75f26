"""Requests that wait for engines of which none is there."""

from typing import TYPE_CHECKING

from balanceroute.proxy.core.lifecycle import State
from balanceroute.proxy.live.engines.instances import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balanceroute.proxy.core.events import Eligible, RequestId
    from balanceroute.proxy.core.lifecycle import Request
    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.engines.instances import Instances


class Stranded:
    """Tells who has waited for long enough.

    Args:
        scheduler: Whose requests wait.
        instances: The engines.
        after_s: How long they wait for a role of which no instance is up.
    """

    def __init__(self, scheduler: "Scheduler", instances: "Instances", *, after_s: float) -> None:
        self._scheduler = scheduler
        self._instances = instances
        self._after_s = after_s
        # By the engines needed, and whether a prefiller is.
        self._unready_since_s: dict[tuple[Eligible | None, bool], float] = {}

    def begin(self) -> None:
        """Forget what was seen before: nothing was checked meanwhile."""
        self._unready_since_s.clear()

    def due(self, now_s: float) -> "Iterator[RequestId]":
        """Yield the requests to refuse, each when the one before it is gone."""
        if self._scheduler.intake.held:
            self._unready_since_s.clear()  # They wait for an administrator.
            return
        requests = self._scheduler.requests
        kinds = dict.fromkeys(map(_kind, requests.values()))
        unready = [kind for kind in kinds if self._lacks(*kind)]
        before = self._unready_since_s
        self._unready_since_s = {kind: before.get(kind, now_s) for kind in unready}
        for kind, since_s in self._unready_since_s.items():
            if now_s - since_s > self._after_s:
                # In this order: who leaves the pool makes room for the queue.
                for state in (State.QUEUED, State.POOLED):
                    waiting = [one for one in requests.values() if one.state is state]
                    yield from [one.request for one in waiting if _kind(one) == kind]

    def _lacks(self, eligible: "Eligible | None", prefill: bool) -> bool:
        missing = self._instances.missing_for(eligible)
        return Role.DECODE in missing or (prefill and Role.PREFILL in missing)


def _kind(request: "Request") -> "tuple[Eligible | None, bool]":
    return request.ticket.eligible, request.ticket.prefill
