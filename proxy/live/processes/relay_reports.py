"""Reports of sessions as messages to the scheduler process."""

from typing import Any

from balanceroute.proxy.live.processes import from_relay
from balanceroute.proxy.live.request import reports


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
