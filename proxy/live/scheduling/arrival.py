"""A request that clients sent and that nobody has accepted or refused yet."""

from typing import TYPE_CHECKING

from msgspec import Struct

from balanceroute.proxy.core.events import Ticket
from balanceroute.proxy.live.request.direct import Direct, guessed_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.core.admission import Refusal
    from balanceroute.proxy.core.events import Eligible
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.openai.urgency import Urgency
    from balanceroute.proxy.live.request.session_host import SessionContext
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply


class Asked(Struct, frozen=True):
    """What a request asks for.

    Attributes:
        eligible: The engines of its model; None for all.
        expected_tokens: What its client expects one sequence to emit; None if it does not say.
        tenant: Whose it is; empty if tenants are not told apart.
        session: See `Ticket`.
        early_token: See `Ticket`.
        adapter: Whether its model is an adapter: its token ids are not all that its blocks depend on.
    """

    shape: "Shape"
    eligible: "Eligible | None"
    expected_tokens: int | None
    urgency: "Urgency"
    tenant: str
    session: int = 0
    early_token: bool = False
    adapter: bool = False

    def ticket(self, prompt_tokens: int, context: "SessionContext") -> Ticket:
        """Return what the scheduler is to know of it; `prompt_tokens` may be an estimate."""
        shape = self.shape
        decode = (
            not shape.direct or context.legs.direct_of(guessed_tokens(shape)) is not Direct.PREFILL
        )
        split = not shape.direct and not context.connector.facts.decode_first
        return Ticket(
            prompt_tokens=prompt_tokens,
            slots=shape.sequences,
            prefill=split or not decode,
            decode=decode,
            eligible=self.eligible,
            max_tokens=shape.max_tokens,
            expected_tokens=self.expected_tokens,
            model=shape.model,
            tenant=self.tenant,
            level=self.urgency.level,
            weight=self.urgency.weight,
            deadline_ns=self.urgency.deadline_ns,
            session=self.session,
            early_token=self.early_token,
        )


class Arrival(Struct, frozen=True):
    """One request.

    Attributes:
        headers: Returns the lines of every engine leg, given what the engines are to call the request.
        record: What is known of it.
        refuse: Answers the client that it is refused.
    """

    asked: Asked
    body: "RequestBody"
    headers: "Callable[[str], bytes]"
    reply: "Reply"
    record: "RequestRecord"
    refuse: "Callable[[Refusal], None]"
