"""A request that clients sent and that nobody has accepted or refused yet."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.core.admission import Refusal
    from balanceroute.proxy.core.events import Eligible
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.openai.urgency import Urgency
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        eligible: The engines of its model; None for all.
        expected_tokens: What its client expects one sequence to emit; None if it does not say.
        headers: Returns those of every engine leg, given what the engines are to call the request.
        record: What is known of it.
        refuse: Answers the client that it is refused.
    """

    shape: "Shape"
    eligible: "Eligible | None"
    expected_tokens: int | None
    urgency: "Urgency"
    tenant: str
    body: "RequestBody"
    headers: "Callable[[str], Headers]"
    reply: "Reply"
    record: "RequestRecord"
    refuse: "Callable[[Refusal], None]"
