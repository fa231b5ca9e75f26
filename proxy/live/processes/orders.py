"""What the scheduler process orders, as calls of a session."""

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from balanceroute.proxy.live.engines.instances import Instances, Target
from balanceroute.proxy.live.processes import to_relay
from balanceroute.proxy.live.telemetry.process_log import set_log_level

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session


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


def obey(session: "Session", message: Any, instances: Instances) -> None:
    """Have a session do what is said."""
    match message:
        case to_relay.StartPrefill():
            session.start_prefill(instances.prefillers[message.prefiller])
        case to_relay.StartDecode():
            session.start_decode(instances.ranks[message.rank])
        case to_relay.LeaseEnded(_, cheaper):
            session.lease_ended(cheaper=cheaper)
        case to_relay.PrefillAgain():
            session.prefill_again()
        case to_relay.Expire(_, reason):
            session.expire(reason)
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
