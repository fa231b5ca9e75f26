"""The tenants' limits as a relay has them: the scheduler process keeps them and says what is left."""

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from balanceroute.proxy.core.admission import Allowance, Refusal
from balanceroute.proxy.live.frontend.clients import allowance_headers
from balanceroute.proxy.live.processes import from_relay, to_relay

if TYPE_CHECKING:
    from balanceroute.proxy.live.processes.questions import Questions
    from balanceroute.proxy.live.scheduling.arrival import Arrival
    from balanceroute.proxy.live.telemetry.record import RequestRecord

_NONE: Mapping[str, Allowance] = {}
NO_SCHEDULER = Refusal(503, "the scheduler process is not there", 1)
"""Why nobody has decided about a request for too long."""


class RelayTenancy:
    """See `Limits`.

    Args:
        questions: Asks the scheduler process.
        limited: Whether there are tenants.
    """

    def __init__(self, questions: "Questions", *, limited: bool) -> None:
        self._questions = questions
        self._limited = limited
        self._left: dict[str, Mapping[str, Allowance]] = {}
        # By the number of its question: who waits for an answer, the first one first.
        self._waiting: dict[int, Callable[[Refusal | None], None]] = {}
        self._may_wait = math.inf

    def told(self, arrival: "Arrival", left: Mapping[str, Allowance]) -> None:
        """Take what is left of the rates of a request's tenant, and tell its client."""
        tenant = arrival.record.tenant
        self._left[tenant] = left
        arrival.reply.more_headers = allowance_headers(left)

    def answered(self, message: to_relay.AloneAnswered) -> None:
        """Take the answer to a question of `offer_alone`."""
        self._questions.answer(message.question, message)

    def refuse_early(self, tenant: str) -> None:
        """Refuse nobody: its body is read before the scheduler process refuses a request."""
        del tenant

    def offer_alone(self, tenant: str, answer: Callable[[Refusal | None], None]) -> None:
        """Ask about a request that one engine answers alone."""
        if not self._limited:
            answer(None)
            return
        if len(self._waiting) >= self._may_wait:
            answer(NO_SCHEDULER)
            return

        def answered(message: to_relay.AloneAnswered) -> None:
            del self._waiting[message.question]
            self._left[tenant] = message.allowances
            refusal = Refusal(message.status, message.reason, message.retry_after_s, message.cause)
            answer(refusal if message.status else None)

        number = self._questions.ask(
            answered, lambda question: from_relay.AskAlone(question, tenant)
        )
        self._waiting[number] = answer

    def limit_waiting(self, most: float) -> None:
        """Refuse who waits beyond so many, now and from now on."""
        self._may_wait = most
        if len(self._waiting) > most:
            for number in list(islice(self._waiting, int(most), None)):
                self._questions.withdraw(number)
                self._waiting.pop(number)(NO_SCHEDULER)

    def ended_alone(self, record: "RequestRecord") -> None:
        """Do nothing: the record of such a request tells of its end."""

    def allowances(self, tenant: str) -> Mapping[str, Allowance]:
        """Return what was told last."""
        return self._left.get(tenant, _NONE)
