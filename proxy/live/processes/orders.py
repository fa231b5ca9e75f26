"""What the scheduler process orders, as calls of a session."""

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.processes import to_relay
from balanceroute.proxy.live.telemetry.process_log import set_log_level

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balanceroute.proxy.live.engines.instances import Instances
    from balanceroute.proxy.live.processes.links import Link
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.scheduling.isolation import Isolation


def accept(session: "Session", message: to_relay.Accepted) -> None:
    """Have a session know that it was accepted, and as what."""
    session.ticket = replace(session.ticket, prompt_tokens=message.prompt_estimate)
    session.record.prompt_estimate = message.prompt_estimate
    session.record.local_prefill = message.local_prefill
    if message.local_prefill:
        session.ticket = replace(session.ticket, prefill=False)
        session.pooled()


def await_anew(session: "Session") -> None:
    """Have a session wait for another scheduler process, which decides anew who prefills."""
    if session.record.local_prefill:
        session.ticket = replace(session.ticket, prefill=True)
    session.prefill_again()


def log_as_told(message: to_relay.LogLevel) -> None:
    """Log as much as the scheduler process does."""
    if message.level:
        set_log_level(message.level)


class Orders:
    """Has sessions do what is said, unless their requests have ended.

    Args:
        links: All requests.
        instances: The engines, kept up to date.
        isolation: Ends alone what failed.
        now_ns: The loop's time.
    """

    def __init__(
        self,
        links: "Mapping[RequestId, Link]",
        instances: "Instances",
        isolation: "Isolation",
        now_ns: "Callable[[], int]",
    ) -> None:
        self._links = links
        self._instances = instances
        self._isolation = isolation
        self._now_ns = now_ns

    def start_prefill(self, order: to_relay.StartPrefill) -> None:
        """Have a prefiller asked, unless the binding is void."""
        link = self._links.get(RequestId(order.number))
        if link is not None and link.starts_prefill(order, self._now_ns()):
            session, prefiller = link.session, self._instances.prefillers[order.prefiller]
            self._isolation.run_for(session, "action", session.start_prefill, prefiller)

    def start_decode(self, order: to_relay.StartDecode) -> None:
        """Have a rank asked, unless the binding is void."""
        link = self._links.get(RequestId(order.number))
        if link is not None and link.starts_decode(order):
            session, rank = link.session, self._instances.ranks[order.rank]
            self._isolation.run_for(session, "action", session.start_decode, rank)

    def other(self, message: Any) -> None:
        """Have done what else is said."""
        link = self._links.get(RequestId(message.number))
        if link is None or not link.takes(message, self._now_ns()):
            return
        session = link.session
        if isinstance(message, to_relay.Crash):
            self._isolation.end(session, "relay")
        else:
            self._isolation.run_for(session, "action", _obey, session, message)


def _obey(session: "Session", message: Any) -> None:
    match message:
        case to_relay.LeaseEnded(_, cheaper):
            session.lease_ended(cheaper=cheaper)
        case to_relay.PrefillAgain():
            session.prefill_again()
        case to_relay.Expire(_, reason):
            session.expire(reason)
        case to_relay.ExpectAbort():
            session.expect_abort()
        case to_relay.GiveUp(_, reason):
            session.give_up(reason)
        case to_relay.EngineLost(_, role, url):
            session.engine_lost(Target(role, url))
        case to_relay.DropLostKv():
            session.drop_lost_kv()
        case to_relay.InstanceRemoved(_, role, url, gently):
            target = Target(role, url)
            if session.is_on(target):
                session.instance_removed(target, gently=gently)
        case _:
            raise ValueError(f"a scheduler does not say {message}")
