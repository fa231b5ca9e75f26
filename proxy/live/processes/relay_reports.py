"""What sessions report and feed, as messages to the scheduler process."""

from typing import Any

from balanceroute.proxy.core import events
from balanceroute.proxy.live.processes import from_relay
from balanceroute.proxy.live.request import reports

ENDINGS = (events.RequestFinished, events.RequestFailed, events.RequestCancelled)
"""The events after which a request is no more for the scheduler."""


def event_message(
    event: events.Event, taken: int, *, pulls: bool, emitted: int
) -> from_relay.CoreEvent:
    """Return an event as a message; see the messages for the arguments."""
    match event:
        case events.PrefillDone(number, prompt_tokens, lease_ns):
            return from_relay.PrefillDone(number, taken, prompt_tokens, lease_ns, pulls)
        case events.PrefillLost(number, elsewhere, decode, same_rank):
            return from_relay.PrefillLost(number, taken, elsewhere, decode, same_rank)
        case events.DecodeLost(number):
            return from_relay.DecodeLost(number, taken)
        case events.DecodeStarted(number):
            return from_relay.DecodeStarted(number, taken, emitted)
        case events.RequestRecomputed(number, elsewhere):
            return from_relay.Recomputed(number, taken, elsewhere)
        case events.RequestFinished(number):
            return from_relay.Ended(number, taken, "finished")
        case events.RequestFailed(number):
            return from_relay.Ended(number, taken, "failed")
        case events.RequestCancelled(number):
            return from_relay.Ended(number, taken, "cancelled")
        case _:
            raise AssertionError(f"no session feeds {event}")


def as_message(report: reports.Report) -> from_relay.Report:
    """Return what a report says as a message; its request is the relay's own number."""
    match report:
        case reports.LegSucceeded(target):
            return from_relay.LegSucceeded(target.role, target.url)
        case reports.LegFailed(target, fault, reason):
            return from_relay.LegFailed(target.role, target.url, fault, reason)
        case reports.PullSucceeded(prefiller, rank):
            return from_relay.PullSucceeded(prefiller, rank)
        case reports.PullFailed(number, prefiller, rank, fault, reason):
            return from_relay.PullFailed(number, prefiller, rank, fault, reason)
        case reports.EngineSeen(prefiller, engine_id):
            return from_relay.EngineSeen(prefiller, engine_id)
        case reports.PromptCounted(number, prompt_tokens):
            return from_relay.PromptCounted(number, prompt_tokens)
        case reports.KvAbandoned(how):
            word: Any = how
            return from_relay.KvAbandoned(word)
        case reports.RemotePrefillEnded(prefiller):
            return from_relay.RemotePrefillEnded(prefiller)
        case reports.SessionEnded(number, record):
            return from_relay.SessionEnded(number, record)
