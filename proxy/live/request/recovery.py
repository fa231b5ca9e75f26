"""Whether an attempt that failed is followed by another, and which engine the failure counts against."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from balanceroute.proxy.live.openai.answer import (
    STREAM_HEADERS,
    dump_compact,
    ended_events,
    ended_token_events,
    message_events,
    write_events,
)
from balanceroute.proxy.live.openai.errors import JSON_HEADERS
from balanceroute.proxy.live.openai.numeric_members import flag
from balanceroute.proxy.live.openai.shape import OPTIONAL_APIS, Api, Shape
from balanceroute.proxy.live.request.failures import Blame, Failure, Next, What, triage
from balanceroute.proxy.live.request.session_host import LegFailed, PullFailed
from balanceroute.proxy.live.telemetry.record import Leg

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.engines.instances import Prefiller, Rank
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.request.client_answer import ClientAnswer
    from balanceroute.proxy.live.request.holding import Attempt
    from balanceroute.proxy.live.request.leg_settings import LegSettings
    from balanceroute.proxy.live.request.session_host import Host


# Then an engine is asked again for a route that it lacked: it may have been replaced behind its address.
_LACKS_S = 60.0
# Leases of one request that may end on the way to a rank as they may in the pool, so that no clock makes it
# try for ever.
_MOST_LAPSES = 2


@dataclass(frozen=True, slots=True)
class Retry:
    """How a request goes on after a failure.

    Attributes:
        then: What it is to try next.
        same_rank: Whether the rank that failed may be tried again.
        delay_s: How long it waits before.
        free: Whether nobody failed: it goes on at once, and the retry budget is not asked.
    """

    then: Next
    same_rank: bool
    delay_s: float
    free: bool = False


class Recovery(Struct, eq=False):
    """What one request has been through.

    Attributes:
        lacking: The engines without its route, with what they said; None for those that were passed over.
    """

    _number: "RequestId"
    _host: "Host"
    _legs: "LegSettings"
    _tries: dict[Leg, int] = {}
    _broken: int = 0  # Engines that broke off under it and live.
    _lapses: int = 0  # Leases that ended on the way to a rank.
    lacking: "dict[Prefiller | Rank, Failure | None]" = {}

    def begin(self, leg: Leg) -> None:
        """Count an attempt."""
        self._tries[leg] = self._tries.get(leg, 0) + 1

    def may_try_again(self, leg: Leg) -> bool:
        """Return whether one more attempt is left, if the retry budget allows it too."""
        return self._tries.get(leg, 0) < self._legs.retry_attempts

    def note_lacking(self, attempt: "Attempt", api: "Api", failure: Failure, now_s: float) -> None:
        """Note that the engine does not have the route."""
        self.lacking[attempt.engine] = failure
        if api in OPTIONAL_APIS:
            attempt.engine.lacks[api.value] = now_s + _LACKS_S

    def foresee(self, attempt: "Attempt", api: "Api", now_s: float) -> Retry | Failure | None:
        """Return what is known of an attempt before it is made.

        Returns:
            How to go on, if the engine is known to lack the route; its failure, if it is the earliest of
            all that there are; None if it is to be asked.
        """
        engine = attempt.engine
        if engine in self.lacking:
            # None: it was passed over, and so were all others. It may have the route by now.
            return self.lacking[engine]
        if engine.lacks.get(api.value, 0.0) <= now_s:
            return None
        self.lacking[engine] = None
        decodes = attempt.leg is Leg.DECODE
        return Retry(Next.OTHER_RANK if decodes else Next.OTHER_PREFILLER, False, 0.0)

    def after(
        self, attempt: "Attempt", failure: Failure, *, stream_open: bool, deaths: int
    ) -> Retry | None:
        """End the attempt, blame whom the rules blame, and return how to go on; None if nothing mends it.

        The retry budget is not asked yet.

        Args:
            attempt: What failed.
            failure: How.
            stream_open: Whether the client has the head of its answer.
            deaths: How many engines died under its prompt, this one included.
        """
        attempt.fail(failure)  # What failed may be the answer, not the connection.
        pair = attempt.pair
        host, leg, engine = self._host, attempt.leg, attempt.engine
        if leg is not Leg.PREFILL and failure.what is What.BROKEN and not failure.is_death:
            self._broken += 1
        rule = triage(
            leg,
            failure,
            stream_open=stream_open,
            continuable=stream_open and attempt.continuable,
            pulls=pair is not None,
            offers=attempt.offers,
            deaths=deaths + self._broken,
        )
        if rule.close_idle:
            engine.endpoint.close_idle()
        if rule.blame is Blame.ENGINE:
            blamed = failure.blamed or engine.target
            host.report(LegFailed(blamed, failure.fault, failure.reason))
        elif rule.blame is Blame.PULL and pair is not None:
            prefiller, rank = pair
            host.report(
                PullFailed(self._number, prefiller.id, rank.id, failure.fault, failure.reason)
            )
        free = failure.what in (What.STALE, What.NO_ROUTE)
        if failure.what is What.TOO_LATE:
            self._lapses += 1
            free = self._lapses <= _MOST_LAPSES
        if free and failure.what is not What.NO_ROUTE:
            self._tries[leg] -= 1  # A stale one once, as the next legs go on new connections.
        if rule.then in (Next.RELAY, Next.FAIL) or not self.may_try_again(leg):
            return None
        tried, legs = self._tries[leg], self._legs
        # A rank that fails again, with another prefiller, is at fault itself. One that hangs is slow to.
        same_rank = failure.what is not What.TIMED_OUT and tried == 1
        return Retry(
            rule.then,
            same_rank,
            min(legs.retry_backoff_limit_s, legs.retry_backoff_s * 2 ** (tried - 1)),
            free,
        )


# The answer of a prefiller that met a stop condition on its one token, as the client wants it.
#
# Nothing is left to decode then, and there is no KV cache to pull: the prefiller's answer is the
# answer. A client that asked for a stream gets the same events that a decode engine would have
# sent.

_PARAMS = "kv_transfer_params"


def answer_shortly(
    client: "ClientAnswer", shape: "Shape", body: "RequestBody", message: Mapping[str, Any]
) -> None:
    """Send the prefiller's answer to the client, as a stream if it asked for one."""
    if shape.api is Api.MESSAGES:  # vLLM leaves out there what is null.
        message = {name: value for name, value in message.items() if name != _PARAMS}
        if not shape.stream:
            client.send(200, JSON_HEADERS, dump_compact(message))
            return
        client.open(200, STREAM_HEADERS)
        client.reply.write(message_events(message))
        client.reply.end()
        return
    if not shape.stream:
        client.send(200, JSON_HEADERS, short_answer_body(message))
        return
    options = body.values.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    client.open(200, STREAM_HEADERS)
    ids = flag(body.values.get("return_token_ids")) is True
    events = short_answer_events(shape.api, message, include_usage=usage, shows_ids=ids)
    client.reply.write(events)
    client.reply.end()


def short_answer_body(message: Mapping[str, Any]) -> bytes:
    """Return the prefiller's answer as that to a request that is not streamed."""
    return dump_compact({**message, _PARAMS: None})


def short_answer_events(
    api: Api, message: Mapping[str, Any], *, include_usage: bool, shows_ids: bool = False
) -> bytes:
    """Return the prefiller's answer as server-sent events; `shows_ids`: with the ids that it tells."""
    if api is Api.GENERATE:
        events = ended_token_events(message, include_usage=include_usage)
    else:
        events = ended_events(api, message, include_usage=include_usage, shows_ids=shows_ids)
    return write_events(events) + b"data: [DONE]\n\n"
