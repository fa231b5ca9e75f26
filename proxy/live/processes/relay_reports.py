"""What sessions report and feed, as messages to the scheduler process."""

from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core import events
from balanceroute.proxy.live.processes import from_relay
from balanceroute.proxy.live.request import reports

if TYPE_CHECKING:
    from balanceroute.proxy.live.processes.uplink import Uplink


class Reports:
    """Tells the scheduler process what sessions report."""

    def __init__(self, uplink: "Uplink") -> None:
        self._uplink = uplink
        self._seen: set[reports.EngineSeen] = set()  # By the scheduler process's ids of prefillers.

    def tell(self, report: reports.Report) -> None:
        """Pass a report on; an engine that was seen only once, though every prefill answer names it."""
        if isinstance(report, reports.EngineSeen):
            if report in self._seen:
                return
            self._seen.add(report)
        elif isinstance(report, reports.KvMissing):  # Its next KV cache is news.
            self._seen = {seen for seen in self._seen if seen.prefiller != report.prefiller}
        self._uplink.send(_as_message(report))

    def begin_anew(self) -> None:
        """Tell everything to another scheduler process, which may have other ids."""
        self._seen.clear()


def event_message(
    event: events.Event, taken: int, *, pulls: bool, emitted: int
) -> from_relay.CoreEvent:
    """Return an event as a message, unless it is an end; see the messages for the arguments."""
    # Ordered by frequency, as in `_as_message`: a pattern with arguments costs more than one without.
    match event:
        case events.PrefillDone():
            number, lease_ns = event.request, event.lease_expires_ns
            tokens = event.prompt_tokens
            return from_relay.PrefillDone(number, taken, tokens, lease_ns, pulls, emitted)
        case events.DecodeStarted():
            return from_relay.DecodeStarted(event.request, taken, emitted)
        case events.PrefillLost(number, elsewhere, decode, same_rank):
            return from_relay.PrefillLost(number, taken, elsewhere, decode, same_rank)
        case events.DecodeLost(number):
            return from_relay.DecodeLost(number, taken)
        case events.FirstToken(number):
            return from_relay.FirstToken(number, taken)
        case events.RequestRecomputed(number, elsewhere, anew):
            return from_relay.Recomputed(number, taken, elsewhere, anew)
        case _:
            raise AssertionError(f"no session feeds {event}")


def _as_message(report: reports.Report) -> from_relay.Report:
    """Return what a report says as a message, unless it is an end; its request is the relay's own."""
    match report:
        case reports.LegSucceeded():
            target = report.target
            return from_relay.LegSucceeded(target.role, target.url, report.pull)
        case reports.PromptCounted():
            return from_relay.PromptCounted(report.request, report.prompt_tokens)
        case reports.EngineSeen(prefiller, engine_id):
            return from_relay.EngineSeen(prefiller, engine_id)
        case reports.LegFailed(target, fault, reason):
            return from_relay.LegFailed(target.role, target.url, fault, reason)
        case reports.PullFailed(number, prefiller, rank, fault, reason):
            return from_relay.PullFailed(number, prefiller, rank, fault, reason)
        case reports.KvMissing(prefiller, kind, reason):
            return from_relay.KvMissing(prefiller, kind, reason)
        case reports.KvAbandoned(how):
            word: Any = how
            return from_relay.KvAbandoned(word)
        case reports.RemotePrefillEnded(prefiller):
            return from_relay.RemotePrefillEnded(prefiller)
        case _:
            raise AssertionError(f"{report} is told with the end of its request")
